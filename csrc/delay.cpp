#include "delay.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace wlb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMaxSteps = int64_t{1} << 62;
// Where all that has arrived can run with at most this loss, it does, and nothing waits.
constexpr double kEven = 0.002;
// A global batch that waits for a step weighs as much as this share of the step's linear work.
constexpr double kWaitPrice = 0.1;
// A step is full with this share of the tokens that it should hold.
constexpr double kFull = 0.9;

// The filler that waits, as if it could be divided at will, and how much of it a step takes.
struct Filler {
  int64_t filled(int64_t large_tokens) const {
    return std::min(std::max<int64_t>(0, target - large_tokens), tokens);
  }

  int64_t tokens, arrived;
  double density;
  int64_t target, limit;
};

// Micro-batches with the large documents of a candidate, and sums over these.
struct Tried : Bins {
  using Bins::Bins;

  void add(const Document& document, size_t at) {
    Bins::add(document, at);
    total_tokens += document.length;
    work_weighted_tokens += real(document.length) * real(document.work);
  }

  int64_t total_tokens = 0;
  double work_weighted_tokens = 0.0;
};

// Large documents that a step could run.
struct Candidate {
  bool operator<(const Candidate& other) const {
    return std::pair(full, value) < std::pair(other.full, other.value);
  }

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
  Step(int64_t step, const Sizes& sizes, const Limits& limits) : step_(step), sizes_(sizes), limits_(limits) {}

  Packed choose(const std::vector<Document>& waiting, int64_t credit) const {
    std::vector<Document> forced, rest, filler, large, chosen;
    for (const Document& d : waiting) {
      (is_forced(d) ? forced : rest).push_back(d);
      if (!is_forced(d)) (is_filler(d) ? filler : large).push_back(d);
    }
    // Before all others, documents that are near the bound on their delay.
    Tried bins(sizes_);
    const Filler all = all_of(filler, credit);
    int64_t forced_tokens = 0;
    for (const Document& d : by_length(forced)) {
      if (forced_tokens + d.length > all.limit) continue;
      forced_tokens += d.length;
      chosen.push_back(d);
      const size_t next = bins.next();
      if (bins.tokens[next] + d.length <= sizes_.max_tokens) bins.add(d, next);
    }
    const size_t num_forced = chosen.size();
    // Steps 1 to 3 of docs/packing.md.
    int64_t sum = bins.total_tokens;
    for (const Document& d : large_of(rest, by_length(large), bins, all)) chosen.push_back(d), sum += d.length;
    filler.resize(first(filler, sum, sum + all.filled(sum)));
    chosen.insert(chosen.end(), filler.begin(), filler.end());
    // Step 4: as in the same step, forced documents before all.
    const auto others = chosen.begin() + static_cast<std::ptrdiff_t>(num_forced);
    std::sort(others, chosen.end(), [](const Document& a, const Document& b) { return a.row < b.row; });
    const std::vector<Document> sorted = by_length({others, chosen.end()});
    std::copy(sorted.begin(), sorted.end(), others);
    return place_documents(chosen, sizes_);
  }

 private:
  bool is_forced(const Document& document) const {
    return step_ - document.arrival >= limits_.max_delay_steps - kForcedSteps;
  }

  bool is_filler(const Document& document) const {
    return document.length <= limits_.batch_tokens / (kFillerShare * sizes_.num_micro_batches);
  }

  Filler all_of(const std::vector<Document>& filler, int64_t credit) const {
    int64_t tokens = 0, work = 0, arrived = 0;
    for (const Document& d : filler) {
      tokens += d.length, work += d.work;
      if (d.arrival <= step_) arrived += d.length;
    }
    const int64_t batch = limits_.batch_tokens;
    const int64_t repay = static_cast<int64_t>(kTokenRepay * real(batch));
    const int64_t band = static_cast<int64_t>(kTokenBand * real(batch));
    credit = std::max(-2 * batch, std::min(credit, batch));  // more changes nothing, and could overflow
    // The target sees to it that training is not ahead of its tokens, where documents allow; else the limit does.
    const double density = tokens ? real(work) / real(tokens) : 0.0;
    return {tokens, arrived, density, batch + std::max(-repay, std::min(repay, credit)),
            std::max(batch - repay, batch + std::min(band, batch + credit))};
  }

  // The large documents that run: the next ones, or those of the best candidate.
  std::vector<Document> large_of(const std::vector<Document>& rest, const std::vector<Document>& large,
                                 const Tried& forced, const Filler& filler) const {
    // Step 1: the next documents of the stream run if that loses at most kEven.
    std::vector<Document> next;
    const size_t count = first(rest, forced.total_tokens, filler.target);
    for (size_t i = 0; i < count; ++i)
      if (!is_filler(rest[i])) next.push_back(rest[i]);
    const Candidate in_order = best_from(forced, filler, by_length(next), 0, kInfinity, true);
    if (in_order.full == 1.0 && in_order.loss <= kEven) return in_order.documents;
    // Step 3: else runs of similar length compete with it. Where documents are so alike that no candidate of at most
    // the first one's work fills the step, also heavier ones.
    Candidate best{-1.0, 0.0, 0.0, {}};
    try_runs(large, forced, filler, true, best);
    if (std::max(best.full, in_order.full) < 1.0) try_runs(large, forced, filler, false, best);
    return (in_order < best ? best : in_order).documents;
  }

  // The best of the candidates that begin at some document, for as many of these as time allows, and the empty one. A
  // candidate takes every following (shorter) document that fits; if `capped`, without making a micro-batch heavier
  // than its first document or than the mean.
  void try_runs(const std::vector<Document>& large, const Tried& forced, const Filler& filler, bool capped,
                Candidate& best) const {
    const size_t size = large.size(), starts = std::max<size_t>(8, std::min(size, 200'000 / std::max<size_t>(1, size)));
    const size_t stride = std::max<size_t>(1, size / starts);
    for (size_t start = 0;; start = std::min(size, start + stride)) {
      const double cap = start < size && capped ? real(large[start].work) : kInfinity;
      Candidate candidate = best_from(forced, filler, large, start, cap, false);
      if (best < candidate) best = std::move(candidate);
      if (start == size) return;
    }
  }

  // Adds those of `large` from `start` on that fit; the best of the candidates on the way, or the last one.
  Candidate best_from(Tried bins, const Filler& filler, const std::vector<Document>& large, size_t start, double cap,
                      bool only_last) const {
    const size_t every = std::max<size_t>(1, static_cast<size_t>(sizes_.num_micro_batches) / 16);
    Candidate best{-1.0, 0.0, 0.0, {}};
    size_t best_size = 0;
    std::vector<Document> chosen;
    double relief = 0.0;
    for (size_t k = start; k <= large.size(); ++k) {
      if (k < large.size()) {
        const Document& d = large[k];
        const auto at = fitting(d, bins, cap, filler);
        if (!at) continue;
        bins.add(d, *at);
        chosen.push_back(d);
        if (d.arrival <= step_) relief += real(d.length) * real(step_ - d.arrival + 1);
        if (only_last || chosen.size() % every) continue;
      }
      const Candidate candidate = judged(bins, filler, relief);
      if (best < candidate) best = candidate, best_size = chosen.size();
    }
    chosen.resize(best_size);
    best.documents = std::move(chosen);
    return best;
  }

  std::optional<size_t> fitting(const Document& document, const Tried& bins, double cap, const Filler& filler) const {
    const size_t at = bins.next();
    const int64_t tokens = bins.total_tokens + document.length;
    if (tokens > filler.limit || bins.tokens[at] + document.length > sizes_.max_tokens) return std::nullopt;
    const double work = real(bins.work[at] + document.work);
    const double filled = filler.density * real(filler.filled(tokens));
    const double mean = (real(bins.total_work + document.work) + filled) / real(sizes_.num_micro_batches);
    return work <= cap || work <= mean ? std::optional(at) : std::nullopt;
  }

  // A candidate's loss is the time of the costliest rank, once the filler is in (step 2), beyond an even share of the
  // work and the bubble that could not be spared: a document of length d and work w fills d / T of the step's T tokens,
  // and steps of such documents alone have a largest micro-batch of w. So the mean of w over tokens is what clustering
  // by length cannot go below, over all steps, whatever is packed with what.
  Candidate judged(const Tried& bins, const Filler& filler, double relief) const {
    const int64_t filled = filler.filled(bins.total_tokens), tokens = bins.total_tokens + filled;
    const double work = real(bins.total_work) + filler.density * real(filled);
    const double full = std::min(1.0, real(tokens) / (real(filler.target) * kFull));
    double clustered = real(sizes_.total_weight) * (work / real(sizes_.ranks));
    clustered += real(sizes_.largest_weight) * (bins.work_weighted_tokens / real(std::max<int64_t>(1, tokens)));
    const double lost =
        cost_once_filled(bins, filler, filler.density * real(filled)) - std::max(clustered, bins.even_cost(work));
    const double unit =
        real(limits_.unit_weight) * real(limits_.crossover_tokens) * (real(limits_.batch_tokens) / real(sizes_.ranks));
    relief += real(std::min(filled, filler.arrived));
    return {full, lost / unit, kWaitPrice * (relief / real(limits_.batch_tokens)) - lost / unit, {}};
  }

  // Cost of the costliest rank, once so much work of filler has gone where costs are least. By Newton's method from
  // below; a rank's work is a concave function of its cost.
  double cost_once_filled(const Bins& bins, const Filler& filler, double work) const {
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
            filler.density * real(static_cast<int64_t>(bins.each) * sizes_.max_tokens - rank.tokens);
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

  int64_t step_;
  const Sizes& sizes_;
  const Limits& limits_;
};

}  // namespace

Packed release_documents(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes,
                         const Limits& limits) {
  check_documents(waiting, sizes);
  check_range("unit_weight", limits.unit_weight, 1, kMaxWeight);
  check_range("batch_tokens", limits.batch_tokens, 1, kMaxMicroBatches * kMaxTokens);
  check_range("crossover_tokens", limits.crossover_tokens, 1, kMaxCost);
  check_range("max_delay_steps", limits.max_delay_steps, 1, kMaxSteps);
  check_range("step", step, 0, kMaxSteps);
  for (const Document& d : waiting) check_range("arrival", d.arrival, 0, kMaxSteps);
  return Step(step, sizes, limits).choose(waiting, credit);
}

}  // namespace wlb
