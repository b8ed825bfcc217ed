// Documents as the packing cores see them, and the checks that keep sums of their work within 64 bits.
#pragma once

#include <cstdint>
#include <vector>

namespace wlb {

// `arrival` is the step in which a document came; Algorithm 1 does not look at it.
struct Document {
  int64_t index, length, work, arrival = 0;
};

struct Packed {
  std::vector<int64_t> order;   // document indices, by micro-batch
  std::vector<int64_t> bounds;  // micro-batch i is order[bounds[i], bounds[i + 1])
};

Packed packed(const std::vector<std::vector<int64_t>>& micro_batches);

// All throw std::invalid_argument. The limits of check_range are inclusive.
void check_range(const char* name, int64_t value, int64_t least, int64_t most);
void check_sizes(int64_t num_micro_batches, int64_t max_tokens);
void check_documents(const std::vector<Document>& documents, int64_t max_tokens);

}  // namespace wlb
