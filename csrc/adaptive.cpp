#include "adaptive.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "ranking.h"

namespace wlb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMaxSteps = int64_t{1} << 62, kMaxCost = int64_t{1} << 62, kMaxWeight = int64_t{1} << 20;

double real(int64_t value) { return static_cast<double>(value); }

std::vector<Document> by_length(const std::vector<Document>& documents) {
  std::vector<int64_t> lengths;
  for (const Document& d : documents) lengths.push_back(d.length);
  std::vector<Document> sorted;
  for (size_t i : longest_first(lengths)) sorted.push_back(documents[i]);
  return sorted;
}

// Micro-batches under construction: work and tokens of each, and of every rank. Micro-batches are numbered by rank, and
// count from `at`.
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
    total_tokens += document.length;
    alike += real(document.length) * real(document.work);
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
  int64_t total_work = 0, total_tokens = 0;
  double alike = 0.0;
};

// The fluid documents that wait, as one liquid, and how much of it a step takes.
struct Fluid {
  int64_t poured(int64_t solid_tokens) const {
    return std::min(std::max<int64_t>(0, target - solid_tokens), tokens);
  }

  int64_t tokens, arrived;
  double density;
  int64_t target, limit;
};

// Solid documents that a step could run.
struct Set {
  bool operator<(const Set& other) const { return std::pair(full, value) < std::pair(other.full, other.value); }

  double full, loss, value;
  std::vector<Document> documents;
};

// How many of `documents` bring `tokens` as near to `target` as the order allows.
size_t first(const std::vector<Document>& documents, int64_t tokens, int64_t target) {
  size_t count = 0;
  for (const Document& d : documents) {
    const int64_t over = tokens + d.length - target;
    if (over > 0 && over > target - tokens) break;
    tokens += d.length;
    ++count;
  }
  return count;
}

// A step that is being packed.
class Step {
 public:
  Step(int64_t step, const Sizes& sizes) : step_(step), sizes_(sizes) {}

  Packed choose(const std::vector<Document>& waiting, int64_t credit) const {
    std::vector<Document> forced, rest, fluid, solid, chosen;
    for (const Document& d : waiting) {
      (is_forced(d) ? forced : rest).push_back(d);
      if (!is_forced(d)) (is_fluid(d) ? fluid : solid).push_back(d);
    }
    Bins bins(sizes_);
    const Fluid poured = liquid(fluid, credit);
    int64_t forced_tokens = 0;
    for (const Document& d : by_length(forced)) {
      if (forced_tokens + d.length > poured.limit) continue;
      forced_tokens += d.length;
      chosen.push_back(d);
      const size_t next = bins.next();
      if (bins.tokens[next] + d.length <= sizes_.max_tokens) bins.add(d, next);
    }
    int64_t sum = bins.total_tokens;
    for (const Document& d : release(rest, by_length(solid), bins, poured)) chosen.push_back(d), sum += d.length;
    fluid.resize(first(fluid, sum, sum + poured.poured(sum)));
    chosen.insert(chosen.end(), fluid.begin(), fluid.end());
    return place(std::move(chosen));
  }

 private:
  bool is_forced(const Document& document) const {
    return step_ - document.arrival >= sizes_.max_delay_steps - kForcedSteps;
  }

  bool is_fluid(const Document& document) const {
    return document.length <= sizes_.batch_tokens / (kFluidShare * sizes_.num_micro_batches);
  }

  Fluid liquid(const std::vector<Document>& fluid, int64_t credit) const {
    int64_t tokens = 0, work = 0, arrived = 0;
    for (const Document& d : fluid) {
      tokens += d.length, work += d.work;
      if (d.arrival <= step_) arrived += d.length;
    }
    const int64_t batch = sizes_.batch_tokens;
    const int64_t repay = static_cast<int64_t>(kTokenRepay * real(batch));
    const int64_t band = static_cast<int64_t>(kTokenBand * real(batch));
    credit = std::max(-2 * batch, std::min(credit, batch));  // more changes nothing, and could overflow
    // The target sees to it that training is not ahead of its tokens, where documents allow; else the limit does.
    const double density = tokens ? real(work) / real(tokens) : 0.0;
    return {tokens, arrived, density, batch + std::max(-repay, std::min(repay, credit)),
            std::max(batch - repay, batch + std::min(band, batch + credit))};
  }

  // First what comes next in the stream is tried. If that loses more than kEven, sets of neighbouring length compete
  // with it: where they are so alike that no set of at most the first's work fills the step, also heavier ones.
  std::vector<Document> release(const std::vector<Document>& rest, const std::vector<Document>& solid,
                                const Bins& forced, const Fluid& fluid) const {
    std::vector<Document> ahead;
    const size_t count = first(rest, forced.total_tokens, fluid.target);
    for (size_t i = 0; i < count; ++i)
      if (!is_fluid(rest[i])) ahead.push_back(rest[i]);
    const Set in_order = judge(forced, fluid, by_length(ahead), 0, kInfinity, true);
    if (in_order.full == 1.0 && in_order.loss <= kEven) return in_order.documents;
    Set best{-1.0, 0.0, 0.0, {}};
    neighbours(solid, forced, fluid, true, best);
    if (std::max(best.full, in_order.full) < 1.0) neighbours(solid, forced, fluid, false, best);
    return (in_order < best ? best : in_order).documents;
  }

  // The best of the sets that begin at some document, for as many of these as time allows, and the empty set. A set
  // takes every following (shorter) document that fits; if `capped`, without making a micro-batch heavier than its
  // first document or than the mean.
  void neighbours(const std::vector<Document>& solid, const Bins& forced, const Fluid& fluid, bool capped,
                  Set& best) const {
    const size_t size = solid.size(), starts = std::max<size_t>(8, std::min(size, 200'000 / std::max<size_t>(1, size)));
    const size_t stride = std::max<size_t>(1, size / starts);
    for (size_t start = 0;; start = std::min(size, start + stride)) {
      const double cap = start < size && capped ? real(solid[start].work) : kInfinity;
      Set set = judge(forced, fluid, solid, start, cap, false);
      if (best < set) best = std::move(set);
      if (start == size) return;
    }
  }

  // Adds those of `solid` from `start` on that fit; the best of the sets on the way, or the last one.
  Set judge(Bins bins, const Fluid& fluid, const std::vector<Document>& solid, size_t start, double cap,
            bool only_last) const {
    const size_t every = std::max<size_t>(1, static_cast<size_t>(sizes_.num_micro_batches) / 16);
    Set best{-1.0, 0.0, 0.0, {}};
    size_t best_size = 0;
    std::vector<Document> chosen;
    double relief = 0.0;
    for (size_t k = start; k <= solid.size(); ++k) {
      if (k < solid.size()) {
        const Document& d = solid[k];
        const auto at = fitting(d, bins, cap, fluid);
        if (!at) continue;
        bins.add(d, *at);
        chosen.push_back(d);
        if (d.arrival <= step_) relief += real(d.length) * real(step_ - d.arrival + 1);
        if (only_last || chosen.size() % every) continue;
      }
      const Set set = judged(bins, fluid, relief);
      if (best < set) best = set, best_size = chosen.size();
    }
    chosen.resize(best_size);
    best.documents = std::move(chosen);
    return best;
  }

  std::optional<size_t> fitting(const Document& document, const Bins& bins, double cap, const Fluid& fluid) const {
    const size_t at = bins.next();
    const int64_t tokens = bins.total_tokens + document.length;
    if (tokens > fluid.limit || bins.tokens[at] + document.length > sizes_.max_tokens) return std::nullopt;
    const double work = real(bins.work[at] + document.work);
    const double poured = fluid.density * real(fluid.poured(tokens));
    const double mean = (real(bins.total_work + document.work) + poured) / real(sizes_.num_micro_batches);
    return work <= cap || work <= mean ? std::optional(at) : std::nullopt;
  }

  // What is lost is the time of the costliest rank, once the fluid is in, beyond an even share of the work and the
  // bubble that could not be spared: a document of length d and work w fills d / T of the step's T tokens, and steps of
  // such documents alone have a largest micro-batch of w. So the mean of w over tokens is what clustering by length
  // cannot go below, over all steps, whatever is packed with what.
  Set judged(const Bins& bins, const Fluid& fluid, double relief) const {
    const int64_t poured = fluid.poured(bins.total_tokens), tokens = bins.total_tokens + poured;
    const double work = real(bins.total_work) + fluid.density * real(poured);
    const double full = std::min(1.0, real(tokens) / (real(fluid.target) * kFull));
    double clustered = real(sizes_.total_weight) * (work / real(sizes_.ranks));
    clustered += real(sizes_.largest_weight) * (bins.alike / real(std::max<int64_t>(1, tokens)));
    const double lost = filled(bins, fluid, fluid.density * real(poured)) - std::max(clustered, even(work));
    const double unit =
        real(sizes_.unit_weight) * real(sizes_.crossover_tokens) * (real(sizes_.batch_tokens) / real(sizes_.ranks));
    relief += real(std::min(poured, fluid.arrived));
    return {full, lost / unit, kWaitPrice * (relief / real(sizes_.batch_tokens)) - lost / unit, {}};
  }

  // Cost of a rank if all micro-batches had an even share of the work.
  double even(double work) const {
    return real(sizes_.total_weight) * (work / real(sizes_.ranks)) +
           real(sizes_.largest_weight) * (work / real(sizes_.num_micro_batches));
  }

  // Cost of the costliest rank, once so much work of fluid has been poured where costs are least. By Newton's method
  // from below; a rank's work is a concave function of its cost.
  double filled(const Bins& bins, const Fluid& fluid, double work) const {
    const double each = real(static_cast<int64_t>(bins.each));
    const double per_work = real(bins.per_work), per_largest = real(bins.per_largest);
    const double spread = per_work + per_largest / each;
    int64_t highest = 0;
    for (size_t r = 0; r < bins.ranks.size(); ++r) highest = std::max(highest, bins.cost[r]);
    double cost = real(highest);
    for (int round = 0; round < 8; ++round) {
      double lacking = work, slope = 0.0;
      for (const Bins::Rank& rank : bins.ranks) {
        const double largest = real(rank.largest), total = real(rank.work);
        const bool under = cost <= (per_work * each + per_largest) * largest;
        const double more = under ? (cost - per_largest * largest) / per_work - total : cost / spread - total;
        const double most =
            fluid.density * real(static_cast<int64_t>(bins.each) * sizes_.max_tokens - rank.tokens);
        if (more >= most) {
          lacking -= most;
        } else {
          lacking -= more;
          slope += under ? 1.0 / per_work : 1.0 / spread;
        }
      }
      if (lacking <= 0.0) return cost;
      if (slope == 0.0) return 2.0 * cost;
      cost += lacking / slope;
    }
    return cost;
  }

  // Longest first (forced ones before all) to where there is room; then refine.
  Packed place(std::vector<Document> chosen) const {
    const auto by_row = [](const Document& a, const Document& b) { return a.row < b.row; };
    std::sort(chosen.begin(), chosen.end(), by_row);
    chosen = by_length(chosen);
    std::stable_partition(chosen.begin(), chosen.end(), [&](const Document& d) { return is_forced(d); });
    Bins bins(sizes_);
    std::vector<std::vector<Document>> held(bins.work.size());
    for (const Document& d : chosen) {
      const auto at = bins.next_within(sizes_.max_tokens - d.length);
      if (!at) continue;
      bins.add(d, *at);
      held[*at].push_back(d);
    }
    refine(held, bins);
    Packed packed{{}, {0}};
    for (size_t i = 0; i < bins.ranks.size() * bins.each; ++i) {
      auto& documents = held[bins.at(i / bins.each, i % bins.each)];
      std::sort(documents.begin(), documents.end(), by_row);
      for (const Document& d : documents) packed.rows.push_back(d.row);
      packed.bounds.push_back(static_cast<int64_t>(packed.rows.size()));
    }
    return packed;
  }

  // Exchanges documents of the heaviest micro-batch of the costliest rank for less, while that lowers the cost: with
  // the lightest micro-batches of that rank, if it waits for its largest, and of the cheapest other ranks.
  void refine(std::vector<std::vector<Document>>& held, Bins& bins) const {
    const double least = even(real(bins.total_work));
    using Amounts = std::vector<std::pair<int64_t, size_t>>;
    const auto lightest_of = [](Amounts all) {
      const auto few = std::min(all.size(), static_cast<size_t>(kLightest));
      std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(few), all.end());
      all.resize(few);
      return all;
    };
    for (int64_t k = 0; k < kExchanges; ++k) {
      size_t worst = 0;
      for (size_t r = 1; r < bins.ranks.size(); ++r)
        if (bins.cost[r] > bins.cost[worst]) worst = r;
      if (real(bins.cost[worst]) <= 1.0002 * least) return;
      const size_t begin = bins.at(worst, 0), end = bins.at(worst, bins.each);
      size_t here = begin;
      for (size_t i = begin; i < end; ++i)
        if (bins.work[i] > bins.work[here]) here = i;
      Amounts ranks, inside;
      for (size_t r = 0; r < bins.ranks.size(); ++r)
        if (r != worst) ranks.push_back({bins.cost[r], r});
      for (size_t i = begin; i < end && sizes_.largest_weight; ++i) inside.push_back({bins.work[i], i});
      std::vector<size_t> lightest;
      for (const auto& [cost, r] : lightest_of(ranks)) lightest.push_back(bins.work.least_of(r));
      for (const auto& [work, i] : lightest_of(inside))
        if (i != here) lightest.push_back(i);

      int64_t best = bins.cost[worst];
      std::optional<size_t> other;
      size_t best_a = 0, best_b = 0;  // which goes, and which comes back, counted from 1; 0: none
      for (const size_t there : lightest) {
        const size_t rank = bins.rank_of(there);
        const bool same = rank == worst;
        const int64_t rest = bins.largest_without(worst, here, there);
        const int64_t rest_there = bins.largest_without(rank, there, there);
        for (size_t a = 0; a < held[here].size(); ++a) {
          for (size_t b = 0; b <= held[there].size(); ++b) {
            const Document& down = held[here][a];
            const Document up = b ? held[there][b - 1] : Document{};
            const int64_t work = down.work - up.work, tokens = down.length - up.length;
            if (work <= 0 || bins.tokens[there] + tokens > sizes_.max_tokens ||
                bins.tokens[here] - tokens > sizes_.max_tokens)
              continue;
            const int64_t lower = std::max(rest, bins.work[here] - work), higher = bins.work[there] + work;
            const int64_t cost = same ? bins.cost_with(worst, 0, std::max(lower, higher))
                                      : std::max(bins.cost_with(worst, -work, lower),
                                                 bins.cost_with(rank, work, std::max(rest_there, higher)));
            if (cost < best) best = cost, other = there, best_a = a, best_b = b;
          }
        }
      }
      if (!other) return;
      auto &from = held[here], &to = held[*other];
      const Document down = from[best_a], up = best_b ? to[best_b - 1] : Document{};
      from.erase(from.begin() + static_cast<std::ptrdiff_t>(best_a));
      if (best_b) to.erase(to.begin() + static_cast<std::ptrdiff_t>(best_b - 1)), from.push_back(up);
      to.push_back(down);
      bins.change(here, up.work - down.work, up.length - down.length);
      bins.change(*other, down.work - up.work, down.length - up.length);
    }
  }

  int64_t step_;
  const Sizes& sizes_;
};

}  // namespace

Packed choose_adaptive(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes) {
  check_range("num_micro_batches", sizes.num_micro_batches, 1, kMaxMicroBatches);
  check_range("max_tokens", sizes.max_tokens, 1, kMaxTokens);
  check_range("ranks", sizes.ranks, 1, sizes.num_micro_batches);
  if (sizes.num_micro_batches % sizes.ranks)
    throw std::invalid_argument(std::to_string(sizes.num_micro_batches) + " micro-batches cannot be shared by " +
                                std::to_string(sizes.ranks) + " ranks");
  check_range("total_weight", sizes.total_weight, 1, kMaxWeight);
  check_range("largest_weight", sizes.largest_weight, 0, kMaxWeight);
  check_range("unit_weight", sizes.unit_weight, 1, kMaxWeight);
  check_range("batch_tokens", sizes.batch_tokens, 1, kMaxMicroBatches * kMaxTokens);
  check_range("crossover_tokens", sizes.crossover_tokens, 1, kMaxCost);
  check_range("max_delay_steps", sizes.max_delay_steps, 1, kMaxSteps);
  check_range("step", step, 0, kMaxSteps);
  int64_t left = kMaxCost / (sizes.total_weight + sizes.largest_weight);
  for (const Document& d : waiting) {
    check_range("a document's length", d.length, 1, sizes.max_tokens);
    check_range("a document's work", d.work, 0, d.length * kMaxWorkPerToken);
    check_range("arrival", d.arrival, 0, kMaxSteps);
    check_range("the work of a document after those before it", d.work, 0, left);
    left -= d.work;
  }
  return Step(step, sizes).choose(waiting, credit);
}

}  // namespace wlb
