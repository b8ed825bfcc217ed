#include "adaptive.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "ranking.h"

namespace wlb {
namespace {

// As in adaptive_core.py, which says what they are.
constexpr int64_t kForcedSteps = 6;
constexpr double kTolerance = 0.003, kAgeTolerance = 0.008, kRatioLimit = 1.045;
constexpr double kTokenBand = 0.07, kTokenRepay = 0.0125, kFull = 0.9;
constexpr double kImbalancePrice = 8.0, kTokenPrice = 3.0;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kRefinements = 200;
constexpr size_t kLightest = 4;
constexpr int64_t kMaxSteps = int64_t{1} << 62, kMaxWaitingWork = int64_t{1} << 62;

struct Exchange {
  size_t light, a;
  std::ptrdiff_t b;
};

// N micro-batches under construction: work and tokens of each, the lightest first.
struct Bins {
  explicit Bins(size_t size) : work(size), tokens(size) {
    for (size_t i = 0; i < size; ++i) order.emplace_back(0, i);
  }

  size_t lightest() const { return order.front().second; }

  void add_to_lightest(const Document& document) {
    std::pop_heap(order.begin(), order.end(), std::greater<>());
    const size_t i = order.back().second;
    work[i] += document.work;
    tokens[i] += document.length;
    order.back().first = work[i];
    std::push_heap(order.begin(), order.end(), std::greater<>());
    total_work += document.work;
    total_tokens += document.length;
    largest = std::max(largest, work[i]);
  }

  std::vector<int64_t> work, tokens;
  std::vector<std::pair<int64_t, size_t>> order;
  int64_t total_work = 0, total_tokens = 0, largest = 0;
};

// The fluid documents that wait, as one liquid, and how much of it a step takes.
struct Fluid {
  int64_t poured(int64_t solid_tokens) const {
    return std::min(std::max<int64_t>(0, target - solid_tokens), tokens);
  }

  int64_t tokens;
  double density;
  int64_t target, limit;
};

// A step that is being packed.
class Step {
 public:
  Step(int64_t step, const Sizes& sizes)
      : step_(step),
        sizes_(sizes),
        n_(static_cast<size_t>(sizes.num_micro_batches)),
        batch_tokens_(sizes.num_micro_batches * sizes.context_length) {}

  Packed choose(const std::vector<Document>& waiting, int64_t credit) const;

 private:
  bool is_forced(const Document& document) const {
    return step_ - document.arrival >= sizes_.max_delay_steps - kForcedSteps;
  }
  Fluid liquid(const std::vector<Document>& fluid, int64_t credit) const;
  std::vector<char> release(const std::vector<Document>& solid, const Bins& forced, const Fluid& fluid) const;
  Packed place(std::vector<Document> chosen) const;

  int64_t step_;
  Sizes sizes_;
  size_t n_;
  int64_t batch_tokens_;
};

Packed Step::choose(const std::vector<Document>& waiting, int64_t credit) const {
  std::vector<Document> forced, fluid, rest, solid;
  for (const Document& d : waiting)
    (is_forced(d) ? forced : 8 * d.length <= sizes_.context_length ? fluid : rest).push_back(d);
  for (size_t i : longest_first(rest)) solid.push_back(rest[i]);

  Bins bins(n_);
  for (size_t i : longest_first(forced))
    if (bins.tokens[bins.lightest()] + forced[i].length <= sizes_.max_tokens) bins.add_to_lightest(forced[i]);

  const Fluid poured = liquid(fluid, credit);
  std::vector<Document> chosen = forced;
  const std::vector<char> released = release(solid, bins, poured);
  int64_t sum = bins.total_tokens;
  for (size_t r = 0; r < solid.size(); ++r)
    if (released[r]) chosen.push_back(solid[r]), sum += solid[r].length;
  const int64_t target = sum + poured.poured(sum);
  for (const Document& d : fluid) {
    const int64_t over = sum + d.length - target;
    if (over > 0 && over > target - sum) break;
    sum += d.length;
    chosen.push_back(d);
  }
  return place(std::move(chosen));
}

Fluid Step::liquid(const std::vector<Document>& fluid, int64_t credit) const {
  int64_t tokens = 0, work = 0;
  for (const Document& d : fluid) tokens += d.length, work += d.work;
  const auto share = [&](double part) { return static_cast<int64_t>(part * static_cast<double>(batch_tokens_)); };
  const int64_t repay = share(kTokenRepay), band = share(kTokenBand);
  credit = std::max(-2 * batch_tokens_, std::min(credit, batch_tokens_));  // more changes nothing, and could overflow
  // The target sees to it that training is not ahead of its tokens, where documents allow; else the limit does.
  const int64_t limit = batch_tokens_ + std::min(band, batch_tokens_ + credit);
  return {tokens, tokens ? static_cast<double>(work) / static_cast<double>(tokens) : 0.0,
          batch_tokens_ + std::max(-repay, std::min(repay, credit)), std::max(batch_tokens_ - repay, limit)};
}

std::vector<char> Step::release(const std::vector<Document>& solid, const Bins& forced, const Fluid& fluid) const {
  const size_t size = solid.size(), starts = std::max<size_t>(8, std::min(size, 200'000 / std::max<size_t>(1, size)));
  const size_t stride = std::max<size_t>(1, size / starts), every = std::max<size_t>(1, n_ / 16);
  const double n = static_cast<double>(n_), batch = static_cast<double>(batch_tokens_);

  const auto fits = [&](const Document& d, const Bins& bins, double cap) {
    const size_t i = bins.lightest();
    const int64_t tokens = bins.total_tokens + d.length;
    if (tokens > fluid.limit || bins.tokens[i] + d.length > sizes_.max_tokens) return false;
    const double work = static_cast<double>(bins.work[i] + d.work);
    const double mean = (static_cast<double>(bins.total_work + d.work) +
                         fluid.density * static_cast<double>(fluid.poured(tokens))) / n;
    return work <= cap || work <= mean * (1 + kTolerance);
  };
  // How full the step is, and its largest micro-batch over the mean once the fluid is in.
  const auto judge = [&](const Bins& bins) -> std::pair<double, double> {
    const int64_t poured = fluid.poured(bins.total_tokens);
    const double needed = static_cast<double>(fluid.target) * kFull;
    const double full = std::min(1.0, static_cast<double>(bins.total_tokens + poured) / needed);
    const double mean = (static_cast<double>(bins.total_work) + fluid.density * static_cast<double>(poured)) / n;
    if (mean == 0.0) return {full, 1.0};
    double lacking = 0.0;
    size_t low = 0;
    for (size_t i = 0; i < n_; ++i) {
      const double most =
          static_cast<double>(bins.work[i]) + fluid.density * static_cast<double>(sizes_.max_tokens - bins.tokens[i]);
      if (most < mean) lacking += mean - most, ++low;
    }
    const double level = low < n_ ? mean + lacking / static_cast<double>(n_ - low) : 2.0 * mean;
    return {full, std::max(static_cast<double>(bins.largest), level) / mean};
  };

  std::vector<size_t> best, fallback, chosen;
  bool has_best = false, has_fallback = false;
  double best_value = 0;
  std::pair<double, double> fallback_key;
  const auto search = [&](bool capped) {
    has_fallback = false;
    size_t start = 0;
    while (true) {
      Bins bins = forced;
      chosen.clear();
      double relief = 0.0;
      int64_t oldest = 0;
      const double cap =
          start < size && capped ? static_cast<double>(solid[start].work) * (1 + kTolerance) : kInfinity;
      for (size_t r = start; r <= size; ++r) {
        if (r < size) {
          const Document& d = solid[r];
          if (!fits(d, bins, cap)) continue;
          bins.add_to_lightest(d);
          chosen.push_back(r);
          const int64_t age = std::max<int64_t>(0, step_ - d.arrival);
          oldest = std::max(oldest, age);
          relief += static_cast<double>(d.length) * (static_cast<double>(age) + 1.0);
          if (chosen.size() % every) continue;
        }
        const auto [full, ratio] = judge(bins);
        const double allowed = 1 + kTolerance + kAgeTolerance * static_cast<double>(oldest);
        if (full == 1.0 && ratio <= std::min(allowed, kRatioLimit)) {
          double value = relief / batch - kImbalancePrice * (ratio - 1);
          value -= kTokenPrice *
                   std::abs(static_cast<double>(std::max(bins.total_tokens, fluid.target)) / batch - 1);
          if (!has_best || value > best_value) has_best = true, best_value = value, best = chosen;
        }
        const std::pair<double, double> key{-full, ratio};
        if (!has_fallback || key < fallback_key) has_fallback = true, fallback_key = key, fallback = chosen;
      }
      if (start == size) break;
      start = std::min(size, start + stride);
    }
  };
  search(true);
  // Where documents are so alike that no set of at most the first's work fills the step, sets may be heavier.
  if (!has_best && -fallback_key.first < 1.0) search(false);
  std::vector<char> released(size, 0);
  for (size_t r : has_best ? best : fallback) released[r] = 1;
  return released;
}

Packed Step::place(std::vector<Document> chosen) const {
  const auto by_row = [](const Document& a, const Document& b) { return a.row < b.row; };
  std::sort(chosen.begin(), chosen.end(), by_row);
  std::vector<size_t> order = longest_first(chosen);
  std::stable_partition(order.begin(), order.end(), [&](size_t k) { return is_forced(chosen[k]); });
  std::vector<std::vector<Document>> micro_batches(n_);
  Ranking work(n_), tokens(n_);
  int64_t sum = 0;
  for (size_t k : order) {
    const Document& d = chosen[k];
    const size_t i = work.least_within(tokens, sizes_.max_tokens - d.length);
    if (i == n_) continue;
    micro_batches[i].push_back(d);
    work.add(i, d.work);
    tokens.add(i, d.length);
    sum += d.work;
  }

  // Move a document from the heaviest micro-batch to one of the lightest, or swap two, while it helps.
  for (int k = 0; k < kRefinements; ++k) {
    std::vector<size_t> light(n_);
    std::iota(light.begin(), light.end(), size_t{0});
    const size_t heavy =
        *std::max_element(light.begin(), light.end(), [&](size_t a, size_t b) { return work[a] < work[b]; });
    if (static_cast<double>(work[heavy]) * static_cast<double>(n_) <= static_cast<double>(sum) * 1.0002) break;
    const size_t few = std::min(n_, kLightest);
    std::partial_sort(light.begin(), light.begin() + static_cast<std::ptrdiff_t>(few), light.end(),
                      [&](size_t a, size_t b) { return std::pair(work[a], a) < std::pair(work[b], b); });
    std::optional<Exchange> exchange;
    int64_t best = work[heavy];
    for (size_t z = 0; z < few; ++z) {
      const size_t l = light[z];
      const int64_t gap = work[heavy] - work[l];
      if (l == heavy) continue;
      for (size_t a = 0; a < micro_batches[heavy].size(); ++a) {
        const Document& down = micro_batches[heavy][a];
        for (std::ptrdiff_t b = -1; b < static_cast<std::ptrdiff_t>(micro_batches[l].size()); ++b) {
          const Document up = b >= 0 ? micro_batches[l][static_cast<size_t>(b)] : Document{};
          const int64_t shifted = down.work - up.work, more = down.length - up.length;
          if (shifted <= 0 || shifted >= gap || tokens[l] + more > sizes_.max_tokens ||
              tokens[heavy] - more > sizes_.max_tokens)
            continue;
          const int64_t largest = std::max(work[heavy] - shifted, work[l] + shifted);
          if (largest < best) best = largest, exchange = {l, a, b};
        }
      }
    }
    if (!exchange) break;
    auto &from = micro_batches[heavy], &to = micro_batches[exchange->light];
    const Document down = from[exchange->a];
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(exchange->a));
    Document up{};
    if (exchange->b >= 0) {
      up = to[static_cast<size_t>(exchange->b)];
      to.erase(to.begin() + exchange->b);
      from.push_back(up);
    }
    to.push_back(down);
    work.add(heavy, up.work - down.work), tokens.add(heavy, up.length - down.length);
    work.add(exchange->light, down.work - up.work), tokens.add(exchange->light, down.length - up.length);
  }

  Packed packed{{}, {0}};
  for (auto& documents : micro_batches) {
    std::sort(documents.begin(), documents.end(), by_row);
    for (const Document& d : documents) packed.rows.push_back(d.row);
    packed.bounds.push_back(static_cast<int64_t>(packed.rows.size()));
  }
  return packed;
}

}  // namespace

Packed choose_adaptive(const std::vector<Document>& waiting, int64_t step, int64_t credit, const Sizes& sizes) {
  check_sizes(sizes.num_micro_batches, sizes.max_tokens);
  check_range("context_length", sizes.context_length, 1, sizes.max_tokens);
  check_range("max_delay_steps", sizes.max_delay_steps, 1, kMaxSteps);
  check_range("step", step, 0, kMaxSteps);
  check_documents(waiting, sizes.max_tokens);
  int64_t left = kMaxWaitingWork;
  for (const Document& d : waiting) {
    check_range("arrival", d.arrival, 0, kMaxSteps);
    check_range("the work of a document after those before it", d.work, 0, left);
    left -= d.work;
  }
  return Step(step, sizes).choose(waiting, credit);
}

}  // namespace wlb
