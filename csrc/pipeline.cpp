#include "pipeline.h"

#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace wlb {
namespace {

struct Rank {
  std::vector<size_t> held;
  std::vector<int64_t> work, others;  // of what is held, and the largest of what is held besides
  int64_t total, least, largest, second, cost;
};

// Ranks by cost, as `rank_cost` of the reference has it, which swap micro-batches.
class Placement {
 public:
  Placement(const std::vector<int64_t>& work, size_t dp, int64_t total_weight, int64_t largest_weight)
      : work_(work), total_weight_(total_weight), largest_weight_(largest_weight), ranks_(dp) {
    std::vector<size_t> falling(work.size());
    std::iota(falling.begin(), falling.end(), size_t{0});
    std::stable_sort(falling.begin(), falling.end(), [&](size_t a, size_t b) { return work[a] > work[b]; });
    for (size_t k = 0; k < falling.size(); ++k) {
      const size_t turn = k % dp;
      ranks_[k / dp % 2 ? dp - 1 - turn : turn].held.push_back(falling[k]);
    }
    for (size_t r = 0; r < dp; ++r) update(r);
  }

  // Makes the costliest rank cheaper, if there is a swap that does.
  bool swap() {
    const auto worst = by_cost_.lower_bound({by_cost_.rbegin()->first, 0});
    const int64_t limit = worst->first - (worst->first >> 13);
    for (const auto& [cost, other] : by_cost_) {
      if (cost >= limit) return false;
      if (!swap(ranks_[worst->second], ranks_[other], limit)) continue;
      for (const size_t r : {worst->second, other}) {
        by_cost_.erase({ranks_[r].cost, r});
        update(r);
      }
      return true;
    }
    return false;
  }

  std::vector<int64_t> rows() {
    std::vector<int64_t> all;
    for (Rank& rank : ranks_) {
      std::sort(rank.held.begin(), rank.held.end());
      all.insert(all.end(), rank.held.begin(), rank.held.end());
    }
    return all;
  }

 private:
  void update(size_t r) {
    Rank& rank = ranks_[r];
    rank.work.clear();
    for (const size_t i : rank.held) rank.work.push_back(work_[i]);
    const auto largest = std::max_element(rank.work.begin(), rank.work.end());
    rank.total = std::accumulate(rank.work.begin(), rank.work.end(), int64_t{0});
    rank.least = *std::min_element(rank.work.begin(), rank.work.end());
    rank.largest = std::exchange(*largest, 0);
    rank.second = *std::max_element(rank.work.begin(), rank.work.end());
    *largest = rank.largest;
    rank.others.assign(rank.work.size(), rank.largest);
    rank.others[static_cast<size_t>(largest - rank.work.begin())] = rank.second;
    rank.cost = cost(rank.total, rank.largest);
    by_cost_.insert({rank.cost, r});
  }

  int64_t cost(int64_t total, int64_t largest) const { return total_weight_ * total + largest_weight_ * largest; }

  // The swap after which the costlier of both is cheapest, if it costs less than `limit`.
  bool swap(Rank& a, Rank& b, int64_t limit) const {
    std::pair<size_t, size_t> best{a.work.size(), 0};
    for (size_t i = 0; i < a.work.size(); ++i) {
      const int64_t mine = a.work[i];
      // What the two cost at least.
      if (cost(a.total - mine + b.least, std::max(a.others[i], b.least)) >= limit) continue;
      if (cost(b.total - b.largest + mine, std::max(b.second, mine)) >= limit) continue;
      for (size_t j = 0; j < b.work.size(); ++j) {
        const int64_t moved = b.work[j] - mine;
        const int64_t then = std::max(cost(a.total + moved, std::max(a.others[i], b.work[j])),
                                      cost(b.total - moved, std::max(b.others[j], mine)));
        if (then < limit) limit = then, best = {i, j};
      }
    }
    if (best.first == a.work.size()) return false;
    std::swap(a.held[best.first], b.held[best.second]);
    return true;
  }

  const std::vector<int64_t>& work_;
  int64_t total_weight_, largest_weight_;
  std::vector<Rank> ranks_;
  std::set<std::pair<int64_t, size_t>> by_cost_;  // cost and rank
};

}  // namespace

std::vector<int64_t> place(const std::vector<int64_t>& work, size_t dp, int64_t total_weight, int64_t largest_weight) {
  if (dp < 1 || work.empty() || work.size() % dp)
    throw std::invalid_argument(std::to_string(work.size()) + " micro-batches cannot be shared by " +
                                std::to_string(dp) + " data-parallel ranks; give a multiple");
  Placement placement(work, dp, total_weight, largest_weight);
  while (placement.swap()) continue;
  return placement.rows();
}

std::vector<double> node_ends(const int64_t* first, const int64_t* second, const double* times, size_t size) {
  std::vector<double> ends(size + 1);
  for (size_t k = 0; k < size; ++k) ends[k + 1] = std::max(ends[first[k]], ends[second[k]]) + times[k];
  return ends;
}

}  // namespace wlb
