// Which waiting documents run now, under a bound on their delay, decided by the time that the step would lose with
// them. docs/packing.md numbers the steps; tests/reference/delay.py says the same in Python, to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "place.h"

namespace wlb {

// A document is forced this many steps before the bound on its delay. Forced documents fill at least N * C / 2 tokens a
// step, and what waits is at most four global batches and a window: 10 steps run all of it.
constexpr int64_t kForcedSteps = 10;
// Documents of at most this part of a mean micro-batch are filler.
constexpr int64_t kFillerShare = 8;
// A step holds at most 1 + kTokenBand times N * C tokens, and makes up for earlier ones by this share of N * C.
constexpr double kTokenBand = 0.07, kTokenRepay = 0.0125;

// `Limits` of megatron_wlb/packing/delay.py.
struct Limits {
  int64_t unit_weight;       // of work that is spread evenly, in the cost of a rank
  int64_t batch_tokens;      // N * C
  int64_t crossover_tokens;  // Lc
  int64_t max_delay_steps;
};

// The documents of a step, of those that wait, which are ordered by row. `credit` tokens are owed to earlier steps.
// Throws std::invalid_argument as `check_documents`.
Packed release_documents(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes,
                         const Limits& limits);

}  // namespace wlb
