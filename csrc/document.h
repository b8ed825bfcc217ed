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

// `arrival` is the step in which a document came; only adaptive packing looks at it.
struct Document {
  int64_t index, length, work = 0, arrival = 0;
};

// Where a document runs.
struct Placed {
  int64_t index;
  size_t micro_batch;
};

struct Packed {
  std::vector<int64_t> order;   // document indices, by micro-batch
  std::vector<int64_t> bounds;  // micro-batch i is order[bounds[i], bounds[i + 1])
};

// The documents of each micro-batch, in the order of `placed`.
Packed packed(const std::vector<Placed>& placed, size_t num_micro_batches);

// Positions in `documents`, whose lengths are 1 to kMaxTokens: longest first, ties by index. O(n).
std::vector<size_t> longest_first(const std::vector<Document>& documents);

// All throw std::invalid_argument. The limits of check_range are inclusive.
void check_range(const char* name, int64_t value, int64_t least, int64_t most);
void check_sizes(int64_t num_micro_batches, int64_t max_tokens);
void check_documents(const std::vector<Document>& documents, int64_t max_tokens);

}  // namespace wlb
