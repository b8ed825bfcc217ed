// Micro-batches over data-parallel ranks, and their order on a rank for the shortest 1F1B.
// megatron_wlb/plan/pipeline.py is the reference; both give the same to the bit.
#pragma once

#include <cstdint>
#include <vector>

namespace wlb {

// Both throw std::invalid_argument, also where sums might not fit 64 bits.

// By rank, ascending; as many micro-batches for each of the ranks.
std::vector<int64_t> place(const std::vector<int64_t>& work, int64_t dp_size, int64_t num_stages, int64_t num_chunks);

// Of one rank's micro-batches.
std::vector<int64_t> order(const std::vector<int64_t>& work, int64_t num_stages, int64_t num_chunks);

}  // namespace wlb
