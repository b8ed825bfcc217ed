// Micro-batches under construction, of all ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "document.h"
#include "ranking.h"

namespace wlb {

constexpr int64_t kMaxCost = int64_t{1} << 62, kMaxWeight = int64_t{1} << 20;

// `Sizes` of megatron_wlb/packing/place.py.
struct Sizes {
  int64_t num_micro_batches;             // M
  int64_t ranks;                         // run M / ranks of them each, and wait for each other
  int64_t total_weight, largest_weight;  // of a rank's work, and of its largest micro-batch, in its cost
  int64_t max_tokens;                    // S_max, at least the longest document
};

inline double real(int64_t value) { return static_cast<double>(value); }

// Work and tokens of each micro-batch, and of every rank. Micro-batches are numbered by rank, and count from `at`.
struct Bins {
  explicit Bins(const Sizes& sizes)
      : each(static_cast<size_t>(sizes.num_micro_batches / sizes.ranks)),
        per_work(sizes.total_weight),
        per_largest(sizes.largest_weight),
        ranks(static_cast<size_t>(sizes.ranks)),
        cost(ranks.size()),
        work(ranks.size(), each),
        tokens(ranks.size(), each) {}

  struct Rank {
    int64_t work = 0, tokens = 0, largest = 0;
  };

  size_t at(size_t rank, size_t i) const { return work.at(rank, i); }
  size_t rank_of(size_t at) const { return at / work.at(1, 0); }

  // The lightest micro-batch of the rank of least cost.
  size_t next() const { return work.least_of(cost.least()); }

  // The same, among those that have at most so many tokens.
  std::optional<size_t> next_within(int64_t limit) const {
    const size_t rank = cost.least_within(tokens, limit);
    if (rank == cost.size()) return std::nullopt;
    return work.least_of_within(rank, tokens, limit);
  }

  void add(const Document& document, size_t at) {
    change(at, document.work, document.length);
    total_work += document.work;
  }

  void change(size_t at, int64_t more_work, int64_t more_tokens) {
    const size_t r = rank_of(at);
    work.add(at, more_work);
    tokens.add(at, more_tokens);
    Rank& rank = ranks[r];
    rank.work += more_work;
    rank.tokens += more_tokens;
    rank.largest = more_work >= 0 ? std::max(rank.largest, work[at]) : largest_without(r, work.size(), work.size());
    cost.add(r, cost_with(r, 0, rank.largest) - cost[r]);
  }

  // Cost of a rank with so much more work and such a largest micro-batch.
  int64_t cost_with(size_t rank, int64_t more_work, int64_t largest) const {
    return per_work * (ranks[rank].work + more_work) + per_largest * largest;
  }

  // Cost of a rank if all micro-batches had an even share of so much work.
  double even_cost(double all_work) const {
    const double count = static_cast<double>(ranks.size());
    return real(per_work) * (all_work / count) +
           real(per_largest) * (all_work / (count * static_cast<double>(each)));
  }

  // Work of the largest micro-batch of a rank but these two.
  int64_t largest_without(size_t rank, size_t a, size_t b) const {
    int64_t most = 0;
    for (size_t i = at(rank, 0); i < at(rank, each); ++i)
      if (i != a && i != b) most = std::max(most, work[i]);
    return most;
  }

  size_t each;
  int64_t per_work, per_largest;
  std::vector<Rank> ranks;
  Ranking cost, work, tokens;  // of ranks; of every rank's micro-batches
  int64_t total_work = 0;
};

}  // namespace wlb
