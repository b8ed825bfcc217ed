// In which rounds the attention of a micro-batch runs, whose documents are on their ranks, so that K and V of each
// travel while the one before computes. Documents that are whole on a rank need no exchange and go first. The others go
// together, or in shares: every rank its own keys first, then shares of all others as they arrive. Whichever is
// predicted to be fastest is taken: little travels before there is anything to compute, and little leaves when nothing
// is left to compute. tests/reference/rounds.py is the same in Python, to the bit.
#pragma once

#include <cstddef>
#include <vector>

#include "pieces.h"

namespace wlb {

// `RoundCosts` of megatron_wlb/sharding/select.py and its `ExchangeModel`.
struct RoundCosts {
  Kernel forward, backward;
  double latency, arrive, leave, prefetch, merge;
  std::vector<std::vector<double>> key_bounds;
};

struct Rounds {
  double time;                 // predicted, forward and backward
  std::vector<double> key_bounds;  // of rounds; empty: together
};

// Throws std::invalid_argument for what cannot be tried.
void check(const RoundCosts& costs);

// The fastest rounds for documents in pieces, a document's one after the other in the order of their rows. O(pieces),
// and sorts the documents that are on several ranks.
Rounds in_rounds(const std::vector<Piece>& pieces, size_t cp_size, const RoundCosts& costs);

// Kernels of every rank, and how long these take together with the exchange.
struct AttentionTimes {
  std::vector<double> forward, backward;
  double forward_end, backward_end;
};

// What attention takes by `Rounds::key_bounds`. Pieces as in `in_rounds`. `moved`: rows of K and V through the busiest
// rank, where a window needs fewer than all.
AttentionTimes attention_times(const std::vector<Piece>& pieces, size_t cp_size, const std::vector<double>& key_bounds,
                               const RoundCosts& costs, std::optional<int64_t> moved);

}  // namespace wlb
