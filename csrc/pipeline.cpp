#include "pipeline.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "document.h"

namespace wlb {
namespace {

using Order = std::vector<size_t>;

constexpr size_t kExhaustive = 6, kRounds = 4, kMoves = 64;  // EXHAUSTIVE, ROUNDS and LANES of the reference
constexpr size_t kLanes = 16;                                // orders that are timed at once
constexpr int64_t kMaxStages = int64_t{1} << 16, kMaxPasses = int64_t{1} << 24;
constexpr int64_t kExact = int64_t{1} << 53;  // integers up to it are doubles

template <typename Time>
using Lanes = std::array<Time, kLanes>;

// 1F1B as upstream runs it: passes of all stages, each after those that it waits for. Virtual stage u is chunk u / P of
// stage u % P; forward comes from u - 1, backward from u + 1. Times are int64_t, or double where they fit its 53 bits,
// which every 64-bit processor computes two at a time.
template <typename Time>
class Schedule {
 public:
  Schedule(size_t count, size_t num_stages, size_t num_chunks)
      : count_(count), stages_(num_stages), chunks_(num_chunks), values_(num_stages + 2) {
    const size_t group = group_size();
    for (size_t first = 0; first < count; first += group)
      for (size_t chunk = 0; chunk < chunks_; ++chunk)
        for (size_t m = first; m < std::min(first + group, count); ++m) table_.push_back({m, chunk});
    arrived_[0].resize(count * stages_ * chunks_);
    arrived_[1].resize(count * stages_ * chunks_);
    done_.resize(stages_);
    passes_.reserve(2 * table_.size() * stages_);
    for (size_t before = 1; before != passes_.size();) {
      before = passes_.size();
      for (size_t stage = 0; stage < stages_; ++stage) advance(stage, group);
    }
    if (passes_.size() != 2 * table_.size() * stages_)
      throw std::logic_error("the stages of a schedule wait for each other");
  }

  // When the last stage is done, for a lane each; `work` has the micro-batches of every lane in order.
  Lanes<Time> makespans(const std::vector<Lanes<Time>>& work) {
    std::fill(values_.begin(), values_.end(), Lanes<Time>{});
    for (const Pass& pass : passes_) {
      Lanes<Time> &clock = values_[pass.stage], &to = values_[pass.to];
      const Lanes<Time> &from = values_[pass.from], &need = work[pass.work];
      Lanes<Time> end;
      for (size_t k = 0; k < kLanes; ++k) end[k] = std::max(clock[k], from[k]) + need[k];
      to = end;
      clock = end;
    }
    Lanes<Time> last{};
    for (size_t stage = 0; stage < stages_; ++stage)
      for (size_t k = 0; k < kLanes; ++k) last[k] = std::max(last[k], values_[stage][k]);
    return last;
  }

 private:
  struct Pass {
    uint32_t work, stage, from, to;
  };

  size_t group_size() const {
    for (size_t group = stages_; group < count_; ++group) {
      const size_t last = count_ % group;
      if (last == 0 || last >= stages_) return group;
    }
    return count_;
  }

  // The next pass of a stage, if what it waits for has been computed.
  bool advance(size_t stage, size_t group) {
    const size_t n = table_.size(), k = done_[stage], later = stages_ - 1 - stage;
    if (k == 2 * n) return false;
    const size_t ahead = std::min(n, chunks_ == 1 ? later : 2 * later + (chunks_ - 1) * group);
    const size_t steady = std::max(k, ahead) - ahead;
    const bool backward = k >= ahead && (steady >= 2 * (n - ahead) || steady % 2);
    const size_t at = k < ahead ? k : !backward ? ahead + steady / 2 : steady < 2 * (n - ahead) ? steady / 2 : k - n;
    const auto [m, chunk] = table_[at];
    const size_t u = (backward ? chunks_ - 1 - chunk : chunk) * stages_ + stage, last = stages_ * chunks_ - 1;
    const size_t first = m * (last + 1), end = backward ? 0 : last;
    uint32_t from = nothing();
    if (u != last - end) {
      from = arrived_[backward][first + u];
      if (from == 0) return false;
      free_.push_back(from);
    }
    uint32_t to = nothing() + 1;
    if (u != end) {
      if (free_.empty()) {
        free_.push_back(static_cast<uint32_t>(values_.size()));
        values_.emplace_back();
      }
      to = arrived_[backward][first + (backward ? u - 1 : u + 1)] = free_.back();
      free_.pop_back();
    }
    passes_.push_back({static_cast<uint32_t>(2 * m + backward), static_cast<uint32_t>(stage), from, to});
    ++done_[stage];
    return true;
  }

  uint32_t nothing() const { return static_cast<uint32_t>(stages_); }

  size_t count_, stages_, chunks_;
  std::vector<std::pair<size_t, size_t>> table_;  // micro-batch and chunk
  std::array<std::vector<uint32_t>, 2> arrived_;  // forward and backward: where the input of (m, u) is, 0 for nowhere
  std::vector<size_t> done_;                      // passes of each stage
  std::vector<uint32_t> free_;
  std::vector<Pass> passes_;
  // Ends: of the stages' last passes, nothing, what nobody waits for, and what is between two stages.
  std::vector<Lanes<Time>> values_;
};

// The first of the best orders that were offered.
template <typename Time>
class Search {
 public:
  Search(const std::vector<int64_t>& work, size_t num_stages, size_t num_chunks)
      : work_(work), schedule_(work.size(), num_stages, num_chunks), lanes_(2 * work.size()) {}

  void offer(const Order& order) {
    const size_t lane = offered_.size();
    for (size_t i = 0; i < order.size(); ++i) {
      lanes_[2 * i][lane] = static_cast<Time>(work_[order[i]]);
      lanes_[2 * i + 1][lane] = 2 * lanes_[2 * i][lane];
    }
    offered_.push_back(order);
    if (offered_.size() == kLanes) time();
  }

  const Order& best() {
    time();
    return best_;
  }

 private:
  void time() {
    const Lanes<Time> times = schedule_.makespans(lanes_);
    for (size_t k = 0; k < offered_.size(); ++k)
      if (times[k] < best_time_) best_time_ = times[k], best_ = offered_[k];
    offered_.clear();
  }

  const std::vector<int64_t>& work_;
  Schedule<Time> schedule_;
  std::vector<Lanes<Time>> lanes_;  // forward and backward of each micro-batch in order
  std::vector<Order> offered_;
  Order best_;
  Time best_time_ = std::numeric_limits<Time>::max();
};

template <typename Time>
void offer_shapes(const std::vector<int64_t>& work, Search<Time>& search) {
  const size_t count = work.size();
  Order up(count), shape;
  std::iota(up.begin(), up.end(), size_t{0});
  search.offer(up);
  std::stable_sort(up.begin(), up.end(), [&](size_t a, size_t b) { return work[a] < work[b]; });
  std::vector<bool> down(count);
  for (size_t few = 0; few <= count; few += std::max<size_t>(1, few / 4))
    for (int kind = 0; kind < 4; ++kind) {
      std::fill(down.begin(), down.end(), false);
      for (size_t k = 0; k < few; ++k) down[kind < 2 ? k : k * count / few] = true;
      if (kind % 2) down.flip();
      shape.clear();
      for (size_t k = 0; k < count; ++k)
        if (!down[k]) shape.push_back(up[k]);
      for (size_t k = count; k-- > 0;)
        if (down[k]) shape.push_back(up[k]);
      search.offer(shape);
    }
}

template <typename Time>
void offer_moves(size_t round, Search<Time>& search) {
  const Order base = search.best();
  const size_t count = base.size(), all = 3 * count * (count - 1) / 2, stride = (all + kMoves - 1) / kMoves;
  size_t i = 0, row = 0;  // the moves of i begin at row
  for (size_t k = round * stride / kRounds % stride; k < all; k += stride) {
    for (; k - row >= 2 * count - 2 - i; ++i) row += 2 * count - 2 - i;
    // A move to every j before i; a move to, and a swap with, every j after it.
    const size_t nth = k - row, j = nth < i ? nth : i + 1 + (nth - i) / 2;
    Order moved = base;
    const auto slot = [&](size_t at) { return moved.begin() + static_cast<std::ptrdiff_t>(at); };
    if (nth >= i && (nth - i) % 2)
      std::swap(moved[i], moved[j]);
    else if (i < j)
      std::rotate(slot(i), slot(i + 1), slot(j + 1));
    else
      std::rotate(slot(j), slot(i), slot(i + 1));
    search.offer(moved);
  }
}

// Ranks by cost, as `rank_cost` in the reference has it, which swap micro-batches.
class Placement {
 public:
  Placement(const std::vector<int64_t>& work, size_t dp_size, int64_t num_stages, int64_t num_chunks)
      : work_(work), waits_(num_stages - 1), chunks_(num_chunks), ranks_(dp_size) {
    std::vector<std::pair<int64_t, size_t>> falling(work.size());
    for (size_t k = 0; k < work.size(); ++k) falling[k] = {-work[k], k};
    std::sort(falling.begin(), falling.end());
    for (size_t k = 0; k < falling.size(); ++k) {
      const size_t round = k / dp_size, turn = k % dp_size;
      ranks_[round % 2 ? dp_size - 1 - turn : turn].held.push_back(falling[k].second);
    }
    for (size_t r = 0; r < dp_size; ++r) update(r);
  }

  // Makes the costliest rank cheaper, if there is a swap that does.
  bool swap() {
    const auto worst = by_cost_.lower_bound({by_cost_.rbegin()->first, 0});
    const int64_t limit = worst->first - (worst->first >> 13);
    for (const auto& [cost, other] : by_cost_) {
      if (cost >= limit) return false;
      if (!swap(worst->second, other, limit)) continue;
      for (const size_t r : {worst->second, other}) {
        by_cost_.erase({ranks_[r].cost, r});
        update(r);
      }
      return true;
    }
    return false;
  }

  std::vector<int64_t> rows() const {
    std::vector<int64_t> all;
    for (const Rank& rank : ranks_) {
      all.insert(all.end(), rank.held.begin(), rank.held.end());
      std::sort(all.end() - static_cast<std::ptrdiff_t>(rank.held.size()), all.end());
    }
    return all;
  }

 private:
  struct Rank {
    Order held;
    std::vector<int64_t> work, others;  // of what is held, and the largest of what is held besides
    int64_t total, least, largest, second, cost;
  };

  void update(size_t r) {
    Rank& rank = ranks_[r];
    const size_t count = rank.held.size();
    rank.work.resize(count);
    for (size_t i = 0; i < count; ++i) rank.work[i] = work_[rank.held[i]];
    const auto largest = std::max_element(rank.work.begin(), rank.work.end());
    rank.largest = *largest;
    rank.second = 0;
    for (auto w = rank.work.begin(); w != rank.work.end(); ++w)
      if (w != largest) rank.second = std::max(rank.second, *w);
    rank.others.assign(count, rank.largest);
    rank.others[static_cast<size_t>(largest - rank.work.begin())] = rank.second;
    rank.least = *std::min_element(rank.work.begin(), rank.work.end());
    rank.total = std::accumulate(rank.work.begin(), rank.work.end(), int64_t{0});
    rank.cost = cost(rank.total, rank.largest);
    by_cost_.insert({rank.cost, r});
  }

  int64_t cost(int64_t total, int64_t largest) const { return chunks_ * total + waits_ * largest; }

  // The swap after which the costlier of both is cheapest, if it costs less than `limit`.
  bool swap(size_t worst, size_t other, int64_t limit) {
    Rank &a = ranks_[worst], &b = ranks_[other];
    std::pair<size_t, size_t> best;
    bool found = false;
    for (size_t i = 0; i < a.work.size(); ++i) {
      const int64_t mine = a.work[i], my_others = a.others[i];
      // What the two cost at least.
      if (cost(a.total - mine + b.least, std::max(my_others, b.least)) >= limit) continue;
      if (cost(b.total - b.largest + mine, std::max(b.second, mine)) >= limit) continue;
      for (size_t j = 0; j < b.work.size(); ++j) {
        const int64_t moved = b.work[j] - mine;
        const int64_t then = std::max(cost(a.total + moved, std::max(my_others, b.work[j])),
                                      cost(b.total - moved, std::max(b.others[j], mine)));
        if (then < limit) limit = then, best = {i, j}, found = true;
      }
    }
    if (found) std::swap(a.held[best.first], b.held[best.second]);
    return found;
  }

  const std::vector<int64_t>& work_;
  int64_t waits_, chunks_;
  std::vector<Rank> ranks_;
  std::set<std::pair<int64_t, size_t>> by_cost_;  // cost and rank
};

template <typename Time>
Order search(const std::vector<int64_t>& work, size_t num_stages, size_t num_chunks) {
  Search<Time> search(work, num_stages, num_chunks);
  if (work.size() <= kExhaustive) {
    Order any(work.size());
    std::iota(any.begin(), any.end(), size_t{0});
    do search.offer(any);
    while (std::next_permutation(any.begin(), any.end()));
  } else {
    offer_shapes(work, search);
    for (size_t round = 0; round < kRounds; ++round) offer_moves(round, search);
  }
  return search.best();
}

int64_t check_pipeline(const std::vector<int64_t>& work, int64_t num_stages, int64_t num_chunks) {
  const auto count = static_cast<int64_t>(work.size());
  check_range("num_micro_batches", count, 1, kMaxMicroBatches);
  check_range("num_stages", num_stages, 1, kMaxStages);
  check_range("num_chunks", num_chunks, 1, kMaxStages);
  return count;
}

// So that `times` the largest of `work`, which it returns, fits 64 bits.
int64_t check_work(const std::vector<int64_t>& work, int64_t times) {
  const auto [least, most] = std::minmax_element(work.begin(), work.end());
  const int64_t limit = std::numeric_limits<int64_t>::max() / times;
  if (*least < 0 || *most > limit)
    throw std::invalid_argument("a micro-batch has work " + std::to_string(*least < 0 ? *least : *most) +
                                "; it must be 0 to " + std::to_string(limit) +
                                " for predicted times to fit 64 bits; lower S_max or the crossover");
  return *most;
}

}  // namespace

std::vector<int64_t> place(const std::vector<int64_t>& work, int64_t dp_size, int64_t num_stages, int64_t num_chunks) {
  const int64_t count = check_pipeline(work, num_stages, num_chunks);
  check_range("dp_size", dp_size, 1, count);
  if (count % dp_size)
    throw std::invalid_argument("dp_size is " + std::to_string(dp_size) + "; it must divide the " +
                                std::to_string(count) + " micro-batches");
  check_work(work, num_chunks * count + num_stages - 1);
  Placement placement(work, static_cast<size_t>(dp_size), num_stages, num_chunks);
  while (placement.swap()) continue;
  return placement.rows();
}

std::vector<int64_t> order(const std::vector<int64_t>& work, int64_t num_stages, int64_t num_chunks) {
  const int64_t count = check_pipeline(work, num_stages, num_chunks);
  check_range("micro-batches times stages times chunks", count * num_stages * num_chunks, 1, kMaxPasses);
  const auto stages = static_cast<size_t>(num_stages), chunks = static_cast<size_t>(num_chunks);
  // As long as all stages take for everything, one after the other.
  const int64_t times = 3 * num_stages * num_chunks * count, most = check_work(work, times);
  if (num_stages == 1) {
    std::vector<int64_t> given(work.size());
    std::iota(given.begin(), given.end(), 0);
    return given;
  }
  const auto run = most <= kExact / times ? search<double> : search<int64_t>;
  const Order found = run(work, stages, chunks);
  return std::vector<int64_t>(found.begin(), found.end());
}

}  // namespace wlb
