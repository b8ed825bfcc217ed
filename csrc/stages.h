// In which stages the attention of a micro-batch runs, whose documents are on their ranks.
// megatron_wlb/sharding/rounds.py is the reference; both give the same to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pieces.h"

namespace wlb {

struct Stage {
  int64_t document_set;
  std::optional<std::pair<int64_t, int64_t>> heads = {};
  std::optional<std::pair<double, double>> keys = {};
};

// `Staging` and its `ExchangeModel`.
struct Staging {
  Kernel forward, backward;
  double latency, arrive, leave, ahead, merge;
  bool kept;
  int64_t num_heads;
  std::vector<int64_t> edges;
  std::vector<std::vector<double>> shares;
};

struct Staged {
  double time;                // predicted, forward and backward
  std::vector<int64_t> sets;  // of each document; 0 for those that are whole on a rank
  std::vector<Stage> stages;
};

// Throws std::invalid_argument for what cannot be tried.
void check(const Staging& staging);

// The fastest stages for documents in pieces, a document's one after the other in the order of their rows. O(pieces),
// and sorts the documents that are on several ranks.
Staged stage(const std::vector<Piece>& pieces, size_t num_documents, size_t cp_size, const Staging& staging);

}  // namespace wlb
