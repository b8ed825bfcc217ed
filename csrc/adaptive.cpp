#include "adaptive.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "ranking.h"

namespace wlb {
namespace {

constexpr int64_t kForcedSteps = 6;
constexpr double kCatchUp = 0.9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kRefinements = 200;
constexpr size_t kLightest = 4;
constexpr int64_t kMaxSteps = int64_t{1} << 62;
constexpr int64_t kMaxWaitingWork = int64_t{1} << 62;

void check_ratio(const char* name, double value, double most) {
  if (!(value >= 0 && value <= most))  // not a number is refused, too
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 0 to " +
                                std::to_string(most));
}

AdaptiveSettings checked(const AdaptiveSettings& s) {
  constexpr double kMaxRatio = 1e6;
  check_sizes(s.num_micro_batches, s.max_tokens);
  check_range("context_length", s.context_length, 1, s.max_tokens);
  check_range("max_delay_steps", s.max_delay_steps, 1, kMaxSteps);
  check_ratio("tolerance", s.tolerance, kMaxRatio);
  check_ratio("age_tolerance", s.age_tolerance, kMaxRatio);
  check_ratio("ratio_limit", s.ratio_limit, kMaxRatio);
  check_ratio("token_band", s.token_band, static_cast<double>(s.max_tokens) / static_cast<double>(s.context_length));
  check_ratio("token_repay", s.token_repay, 0.99);
  check_ratio("imbalance_price", s.imbalance_price, kMaxRatio);
  check_ratio("token_price", s.token_price, kMaxRatio);
  return s;
}

struct Exchange {
  size_t light = 0, a = 0;
  std::ptrdiff_t b = -1;
  bool found = false;
};

}  // namespace

// N micro-batches under construction: work and tokens of each, the lightest first.
struct AdaptiveCore::Bins {
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
struct AdaptiveCore::Fluid {
  int64_t poured(int64_t solid_tokens) const {
    const int64_t wanted = constant ? target : limit;
    return std::min(std::max<int64_t>(0, wanted - solid_tokens), tokens);
  }

  int64_t tokens;
  double density;
  int64_t target, floor, limit;
  bool constant;
};

AdaptiveCore::AdaptiveCore(const AdaptiveSettings& settings)
    : settings_(checked(settings)),
      n_(static_cast<size_t>(settings.num_micro_batches)),
      batch_tokens_(settings.num_micro_batches * settings.context_length) {}

void AdaptiveCore::add(const std::vector<Document>& documents) {
  check_documents(documents, settings_.max_tokens);
  int64_t work = std::accumulate(pool_.begin(), pool_.end(), int64_t{0},
                                 [](int64_t sum, const Document& d) { return sum + d.work; });
  const Document* last = pool_.empty() ? nullptr : &pool_.back();
  for (const Document& d : documents) {
    check_range("arrival", d.arrival, 0, kMaxSteps);
    if (last && d.index <= last->index)
      throw std::invalid_argument("document " + std::to_string(d.index) + " comes after document " +
                                  std::to_string(last->index) + "; indices must ascend");
    if (d.work > kMaxWaitingWork - work)
      throw std::invalid_argument("the work of waiting documents exceeds " + std::to_string(kMaxWaitingWork) +
                                  " in all; lower the crossover");
    work += d.work;
    last = &d;
  }
  pool_.insert(pool_.end(), documents.begin(), documents.end());
}

bool AdaptiveCore::is_forced(const Document& document, int64_t step) const {
  return step - document.arrival >= settings_.max_delay_steps - kForcedSteps;
}

Packed AdaptiveCore::step(int64_t step, int64_t credit) {
  check_range("step", step, 0, kMaxSteps);
  std::vector<Document> forced, fluid, rest, solid;
  for (const Document& d : pool_)
    (is_forced(d, step) ? forced : 8 * d.length <= settings_.context_length ? fluid : rest).push_back(d);
  for (size_t i : longest_first(rest)) solid.push_back(rest[i]);

  Bins bins(n_);
  for (size_t i : longest_first(forced))
    if (bins.tokens[bins.lightest()] + forced[i].length <= settings_.max_tokens) bins.add_to_lightest(forced[i]);

  int64_t tokens = 0, work = 0;
  for (const Document& d : fluid) tokens += d.length, work += d.work;
  const auto share = [&](double part) { return static_cast<int64_t>(part * static_cast<double>(batch_tokens_)); };
  const int64_t repay = share(settings_.token_repay);
  int64_t floor = batch_tokens_ - repay, limit = batch_tokens_ + share(settings_.token_band);
  if (!settings_.constant_tokens && credit > batch_tokens_) floor = share(kCatchUp);
  // How far training may be ahead of its tokens; with constant tokens the target sees to it, where documents allow.
  const int64_t ahead = settings_.constant_tokens ? batch_tokens_ : 0;
  credit = std::max(-2 * batch_tokens_, std::min(credit, limit));  // more changes nothing, and could overflow
  limit = std::max(floor, std::min(limit, batch_tokens_ + ahead + credit));
  const Fluid liquid{tokens,
                     tokens ? static_cast<double>(work) / static_cast<double>(tokens) : 0.0,
                     batch_tokens_ + std::max(-repay, std::min(repay, credit)),
                     floor,
                     limit,
                     settings_.constant_tokens};

  std::vector<Document> chosen = forced;
  const std::vector<char> released = release(solid, bins, liquid, step);
  int64_t sum = bins.total_tokens;
  for (size_t r = 0; r < solid.size(); ++r)
    if (released[r]) chosen.push_back(solid[r]), sum += solid[r].length;
  const int64_t target = sum + liquid.poured(sum);
  for (const Document& d : fluid) {
    const int64_t over = sum + d.length - target;
    if (over > 0 && over > target - sum) break;
    sum += d.length;
    chosen.push_back(d);
  }
  return place(chosen, step);
}

std::vector<char> AdaptiveCore::release(const std::vector<Document>& solid, const Bins& forced, const Fluid& fluid,
                                        int64_t step) const {
  const AdaptiveSettings& s = settings_;
  const size_t size = solid.size(), starts = std::max<size_t>(8, std::min(size, 200'000 / std::max<size_t>(1, size)));
  const size_t stride = std::max<size_t>(1, size / starts), every = std::max<size_t>(1, n_ / 16);
  const double n = static_cast<double>(n_), batch = static_cast<double>(batch_tokens_);

  const auto fits = [&](const Document& d, const Bins& bins, double cap) {
    const size_t i = bins.lightest();
    const int64_t tokens = bins.total_tokens + d.length;
    if (tokens > fluid.limit || bins.tokens[i] + d.length > s.max_tokens) return false;
    const double work = static_cast<double>(bins.work[i] + d.work);
    const double mean = (static_cast<double>(bins.total_work + d.work) +
                         fluid.density * static_cast<double>(fluid.poured(tokens))) / n;
    return work <= cap || work <= mean * (1 + s.tolerance);
  };
  // How full the step is, and its largest micro-batch over the mean once the fluid is in.
  const auto judge = [&](const Bins& bins) -> std::pair<double, double> {
    const int64_t poured = fluid.poured(bins.total_tokens);
    const double needed = fluid.constant ? static_cast<double>(fluid.target) * 0.9 : static_cast<double>(fluid.floor);
    const double full = std::min(1.0, static_cast<double>(bins.total_tokens + poured) / needed);
    const double mean = (static_cast<double>(bins.total_work) + fluid.density * static_cast<double>(poured)) / n;
    if (mean == 0.0) return {full, 1.0};
    double lacking = 0.0;
    size_t low = 0;
    for (size_t i = 0; i < n_; ++i) {
      const double most =
          static_cast<double>(bins.work[i]) + fluid.density * static_cast<double>(s.max_tokens - bins.tokens[i]);
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
          start < size && capped ? static_cast<double>(solid[start].work) * (1 + s.tolerance) : kInfinity;
      for (size_t r = start; r <= size; ++r) {
        if (r < size) {
          const Document& d = solid[r];
          if (!fits(d, bins, cap)) continue;
          bins.add_to_lightest(d);
          chosen.push_back(r);
          const int64_t age = std::max<int64_t>(0, step - d.arrival);
          oldest = std::max(oldest, age);
          relief += static_cast<double>(d.length) * (static_cast<double>(age) + 1.0);
          if (chosen.size() % every) continue;
        }
        const auto [full, ratio] = judge(bins);
        const double allowed = 1 + s.tolerance + s.age_tolerance * static_cast<double>(oldest);
        if (full == 1.0 && ratio <= std::min(allowed, s.ratio_limit)) {
          double value = relief / batch - s.imbalance_price * (ratio - 1);
          value -= s.token_price *
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

Packed AdaptiveCore::place(const std::vector<Document>& chosen, int64_t step) {
  std::vector<size_t> order = longest_first(chosen);
  std::stable_partition(order.begin(), order.end(), [&](size_t k) { return is_forced(chosen[k], step); });
  std::vector<std::vector<Document>> micro_batches(n_);
  Ranking work(n_), tokens(n_);
  int64_t sum = 0;
  for (size_t k : order) {
    const Document& d = chosen[k];
    const size_t i = work.least_within(tokens, settings_.max_tokens - d.length);
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
    Exchange exchange;
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
          if (shifted <= 0 || shifted >= gap || tokens[l] + more > settings_.max_tokens ||
              tokens[heavy] - more > settings_.max_tokens)
            continue;
          const int64_t largest = std::max(work[heavy] - shifted, work[l] + shifted);
          if (largest < best) best = largest, exchange = {l, a, b, true};
        }
      }
    }
    if (!exchange.found) break;
    auto &from = micro_batches[heavy], &to = micro_batches[exchange.light];
    const Document down = from[exchange.a];
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(exchange.a));
    Document up{};
    if (exchange.b >= 0) {
      up = to[static_cast<size_t>(exchange.b)];
      to.erase(to.begin() + exchange.b);
      from.push_back(up);
    }
    to.push_back(down);
    work.add(heavy, up.work - down.work), tokens.add(heavy, up.length - down.length);
    work.add(exchange.light, down.work - up.work), tokens.add(exchange.light, down.length - up.length);
  }

  std::vector<Placed> placed;
  for (size_t i = 0; i < n_; ++i)
    for (const Document& d : micro_batches[i]) placed.push_back({d.index, i});
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) { return a.index < b.index; });
  std::vector<Document> waiting;
  auto next = placed.begin();
  for (const Document& d : pool_) {
    if (next != placed.end() && next->index == d.index)
      ++next;
    else
      waiting.push_back(d);
  }
  pool_ = std::move(waiting);
  return packed(placed, n_);
}

}  // namespace wlb
