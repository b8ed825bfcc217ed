// Documents as the packing cores see them, and the checks that keep sums of their work within 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wlb {

// A micro-batch's work is at most kMaxTokens * kMaxWorkPerToken = 2^62.
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 26;
constexpr int64_t kMaxWorkPerToken = int64_t{1} << 36;

// `row` is its place among those that wait, in the order of the stream. `arrival` is the step in which it came; only
// adaptive packing looks at it.
struct Document {
  int64_t row, length, work, arrival = 0;
};

// Positions of documents, which are ordered by row: longest first, ties by row. O(n).
std::vector<size_t> longest_first(const std::vector<Document>& documents);
std::vector<size_t> longest_first(const std::vector<int64_t>& lengths);

// All throw std::invalid_argument; limits are inclusive. Documents have 1 to `max_tokens` tokens, and of work at most
// kMaxWorkPerToken for each.
void check_range(const char* name, int64_t value, int64_t least, int64_t most);
void check_sizes(int64_t num_micro_batches, int64_t max_tokens);
void check_documents(const std::vector<Document>& documents, int64_t max_tokens);

}  // namespace wlb
