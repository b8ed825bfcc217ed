// Adaptive packing: which waiting documents run now, decided by the time that the step would lose with them.
// megatron_wlb/packing/adaptive.py says why; tests/reference/adaptive.py says the same in Python, to the bit: values
// are doubles computed in the same order in both, without fused multiply-add.
#pragma once

#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// A document is forced this many steps before the bound on its delay. Forced documents fill at least N * C / 2 tokens a
// step, and what waits is at most four global batches and a window: 10 steps run all of it.
constexpr int64_t kForcedSteps = 10;
// Documents of at most this part of a mean micro-batch are fluid.
constexpr int64_t kFluidShare = 8;
// Where all that has arrived can run with at most this loss, it does, and nothing waits.
constexpr double kEven = 0.002;
// A global batch that waits for a step weighs as much as this share of the step's linear work.
constexpr double kWaitPrice = 0.1;
// A step holds at most 1 + kTokenBand times N * C tokens, and makes up for earlier ones by this share of N * C.
constexpr double kTokenBand = 0.07, kTokenRepay = 0.0125;
// A step is full with this share of the tokens that it should hold.
constexpr double kFull = 0.9;
// Exchanges that refine a step at most, and micro-batches that each is tried with.
constexpr int64_t kExchanges = 200, kLightest = 4;

struct Sizes {
  int64_t num_micro_batches;                          // M
  int64_t ranks;                                      // run M / ranks of them each, and wait for each other
  int64_t total_weight, largest_weight, unit_weight;  // `CostWeights` of pipeline/timeline.py
  int64_t max_tokens;                                 // S_max, at least the longest document
  int64_t batch_tokens;                               // N * C
  int64_t crossover_tokens, max_delay_steps;
};

struct Packed {
  std::vector<int64_t> rows;    // of documents, by micro-batch
  std::vector<int64_t> bounds;  // micro-batch i is rows[bounds[i], bounds[i + 1])
};

// The documents of a step, of those that wait, which are ordered by row. `credit` tokens are owed to earlier steps.
// Throws std::invalid_argument on values whose sums or casts might not fit 64 bits.
Packed choose_adaptive(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes);

}  // namespace wlb
