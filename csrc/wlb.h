// The placement of Algorithm 1 of WLB-LLM (section 4.3); `place` in megatron_wlb/packing/wlb.py is the reference.
#pragma once

#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// The micro-batch of each document, or M where it fits nowhere; one after the other, as they stand. O(n log M).
// Throws std::invalid_argument on values whose sums might not fit 64 bits.
std::vector<int64_t> place_wlb(const std::vector<Document>& documents, int64_t num_micro_batches, int64_t max_tokens);

}  // namespace wlb
