// Documents as packing sees them, their order by length, and limits that keep sums of their work within 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wlb {

// A micro-batch's work is at most kMaxTokens * kMaxWorkPerToken = 2^62.
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 26;
constexpr int64_t kMaxWorkPerToken = int64_t{1} << 36;

// `row` is its place among those that wait, in the order of the stream; `arrival` the step in which it came.
struct Document {
  int64_t row, length, work, arrival;
};

// Positions of documents, which are ordered by row: longest first, ties by row. O(n).
std::vector<size_t> longest_first(const std::vector<int64_t>& lengths);

// Throws std::invalid_argument; limits are inclusive.
void check_range(const char* name, int64_t value, int64_t least, int64_t most);

}  // namespace wlb
