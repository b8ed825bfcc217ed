// Adaptive packing: which waiting documents run now, decided by the time that the step would lose with them.
// `choose` in megatron_wlb/packing/adaptive_core.py is the reference; adaptive.py beside it explains the algorithm.
// Both give the same plans to the bit: values are doubles computed in the same order in both, without fused
// multiply-add.
#pragma once

#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// As `Sizes` of adaptive_core.py.
struct Sizes {
  int64_t num_micro_batches, ranks, total_weight, largest_weight, unit_weight, max_tokens, batch_tokens,
      crossover_tokens, max_delay_steps;
};

struct Packed {
  std::vector<int64_t> rows;    // of documents, by micro-batch
  std::vector<int64_t> bounds;  // micro-batch i is rows[bounds[i], bounds[i + 1])
};

// The documents of a step, of those that wait, which are ordered by row. `credit` tokens are owed to earlier steps.
// Throws std::invalid_argument on values whose sums or casts might not fit 64 bits.
Packed choose_adaptive(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes);

}  // namespace wlb
