// Drives the planning cores with random and hostile input and aborts where an invariant breaks.
//
//   stress SEED ROUNDS [threads|bytes]    round r repeats alone as `stress SEED+r 1` (or `stress SEED+r 1 bytes`)
//   stress files FILE...                  inputs of the fuzzer, one after the other
//
// With `threads`, four threads run cores of their own, as planner threads do. With `bytes`, choices come from random
// bytes through the entry point of libFuzzer, which takes the place of main where this is built with -DWLB_FUZZ.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../adaptive.h"
#include "../fixed.h"
#include "../original.h"
#include "../pipeline.h"
#include "../sharding.h"
#include "../wlb.h"

namespace {

using wlb::Document;
using wlb::kMaxTokens;
using wlb::kMaxWorkPerToken;
using Model = std::map<int64_t, Document>;  // what must wait, by index

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min(), kHighest = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxWaitingWork = int64_t{1} << 62;
constexpr int64_t kForcedSteps = 6;

thread_local std::string round_name = "input of the fuzzer";

void require(bool holds, const char* invariant) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s: broken: %s\n", round_name.c_str(), invariant);
  std::abort();
}

// Every decision of a round, from a seed or from a fuzzer's bytes.
class Choices {
 public:
  explicit Choices(uint64_t seed) : random_(seed) {}
  Choices(const uint8_t* data, size_t size) : data_(data), left_(size), fuzzed_(true) {}

  bool over() const { return fuzzed_ && left_ == 0; }

  int64_t between(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(bits() % (static_cast<uint64_t>(most - least) + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == n; }

  template <typename T>
  T of(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  uint64_t bits() {
    if (!fuzzed_) return random_();
    uint64_t value = 0;
    for (int i = 0; i < 4 && left_; ++i, --left_) value = value << 8 | *data_++;
    return value;
  }

  std::mt19937_64 random_;
  const uint8_t* data_ = nullptr;
  size_t left_ = 0;
  bool fuzzed_ = false;
};

// Documents of one kind of length and one kind of work.
std::vector<Document> documents(Choices& choose, int64_t count, int64_t longest, int64_t first, int64_t arrival) {
  const int64_t kind = choose.between(0, 5), work_kind = choose.between(0, 7);
  const int64_t same = choose.between(1, longest), crossover = choose.of<int64_t>({1, 7, 50'000, int64_t{1} << 35});
  std::vector<Document> rows;
  for (int64_t k = 0; k < count; ++k) {
    int64_t length = same;
    if (kind == 0) length = choose.between(1, longest);
    if (kind == 1) length = longest;
    if (kind == 2) length = 1;
    if (kind == 3) length = choose.one_in(20) ? longest : choose.between(1, std::max<int64_t>(1, longest / 16));
    if (kind == 4) length = longest / 2 + 1 > longest ? longest : longest / 2 + choose.between(0, 1);
    length = std::max<int64_t>(1, length);
    int64_t work = length * (length + crossover);
    if (work_kind == 0) work = 0;
    if (work_kind == 1) work = length * kMaxWorkPerToken;
    if (work_kind == 2) work = choose.between(0, length * kMaxWorkPerToken);
    rows.push_back({first + k, length, work, arrival});
  }
  return rows;
}

// One of the documents becomes what must be refused.
void spoil(Choices& choose, std::vector<Document>& rows, int64_t max_tokens) {
  Document& d = rows[static_cast<size_t>(choose.between(0, static_cast<int64_t>(rows.size()) - 1))];
  if (choose.one_in(2)) {
    d.length = choose.of<int64_t>({0, -1, kLowest, kHighest, max_tokens + 1});
  } else {
    d.work = choose.of<int64_t>({-1, kLowest, kHighest, d.length * kMaxWorkPerToken + 1});
  }
}

bool refuses(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

int64_t tokens_of(const Model& model) {
  int64_t sum = 0;
  for (const auto& [index, d] : model) sum += d.length;
  return sum;
}

std::vector<int64_t> indices(const std::vector<Document>& rows) {
  std::vector<int64_t> values;
  for (const Document& d : rows) values.push_back(d.index);
  return values;
}

// Takes a step's documents out of the model.
void check_packed(const wlb::Packed& packed, int64_t num_micro_batches, int64_t max_tokens, Model& model) {
  require(packed.bounds.size() == static_cast<size_t>(num_micro_batches) + 1, "N + 1 bounds");
  require(packed.bounds.front() == 0, "bounds begin at 0");
  require(packed.bounds.back() == static_cast<int64_t>(packed.order.size()), "bounds end with the documents");
  require(std::is_sorted(packed.bounds.begin(), packed.bounds.end()), "bounds are monotone");
  for (size_t i = 0; i + 1 < packed.bounds.size(); ++i) {
    int64_t sum = 0;
    for (int64_t k = packed.bounds[i]; k < packed.bounds[i + 1]; ++k) {
      const auto found = model.find(packed.order[static_cast<size_t>(k)]);
      require(found != model.end(), "a packed document has waited and is packed once");
      sum += found->second.length;
      model.erase(found);
    }
    require(sum <= max_tokens, "a micro-batch holds at most S_max");
  }
}

// What the core says is waiting is the model, every document once and unchanged.
void check_waiting(const std::vector<Document>& rows, const Model& model) {
  require(rows.size() == model.size(), "as many documents wait as should");
  std::vector<int64_t> seen = indices(rows);
  std::sort(seen.begin(), seen.end());
  require(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "no document waits twice");
  for (const Document& d : rows) {
    const auto found = model.find(d.index);
    require(found != model.end(), "no packed or unknown document waits");
    const Document& known = found->second;
    require(d.length == known.length && d.work == known.work && d.arrival == known.arrival, "documents don't change");
  }
}

std::vector<Document> waiting_of(const wlb::WlbCore& core) {
  std::vector<Document> rows = core.remained();
  for (const auto& queue : core.queues()) rows.insert(rows.end(), queue.begin(), queue.end());
  return rows;
}

void check_queues(const wlb::WlbCore& core, const std::vector<int64_t>& thresholds) {
  for (size_t i = 0; i < core.queues().size(); ++i)
    for (const Document& d : core.queues()[i])
      require(d.length >= thresholds[i] && (i + 1 == thresholds.size() || d.length < thresholds[i + 1]),
              "a document waits in the queue of its length");
}

void stress_wlb(Choices& choose) {
  const int64_t n = choose.of<int64_t>({1, 2, 3, 4, 9, 33});
  const int64_t max_tokens = choose.of<int64_t>({1, 2, 7, 64, 1000, int64_t{1} << 17, int64_t{1} << 26});
  std::vector<int64_t> thresholds;
  for (int64_t level = choose.between(0, 3); level > 0; --level) thresholds.push_back(choose.between(1, max_tokens));
  std::sort(thresholds.begin(), thresholds.end());
  for (int64_t bad : {int64_t{0}, int64_t{-1}, kLowest, kHighest}) {
    require(refuses([&] { wlb::WlbCore(bad, max_tokens, thresholds); }), "a bad N is refused");
    require(refuses([&] { wlb::WlbCore(n, bad, thresholds); }), "a bad S_max is refused");
  }

  wlb::WlbCore core(n, max_tokens, thresholds);
  Model model;
  bool overfilled = false;  // only `load` can put N documents into a queue
  int64_t next = 0;
  for (int64_t k = choose.between(1, 12); k > 0 && !choose.over(); --k) {
    std::vector<Document> rows = documents(choose, choose.between(0, 60), max_tokens, next, 0);
    next += static_cast<int64_t>(rows.size());
    if (!rows.empty() && choose.one_in(3)) {
      spoil(choose, rows, max_tokens);
      const auto queues = core.queues();
      const auto remained = indices(core.remained());
      require(refuses([&] { core.step(rows); }), "step refuses a bad document");
      require(refuses([&] { core.load(rows, std::vector<bool>(rows.size())); }), "load refuses a bad document");
      for (size_t i = 0; i < queues.size(); ++i)
        require(indices(queues[i]) == indices(core.queues()[i]), "a refused call changes no queue");
      require(indices(core.remained()) == remained, "a refused call changes nothing");
    } else if (choose.one_in(4)) {
      std::vector<Document> all = waiting_of(core);
      all.insert(all.end(), rows.begin(), rows.end());
      model.clear();
      std::vector<bool> ready;
      for (const Document& d : all) {
        model[d.index] = d;
        ready.push_back(choose.one_in(3));
      }
      core.load(all, ready);
      overfilled = true;
    } else {
      for (const Document& d : rows) model[d.index] = d;
      check_packed(core.step(rows, choose.between(0, next)), n, max_tokens, model);
      for (const auto& queue : core.queues())
        require(overfilled || queue.size() < static_cast<size_t>(n), "fewer than N documents wait in a queue");
    }
    check_waiting(waiting_of(core), model);
    check_queues(core, thresholds);
  }

  core.load(waiting_of(core), std::vector<bool>(model.size(), true));
  while (!model.empty()) {
    const size_t before = model.size();
    check_packed(core.step({}), n, max_tokens, model);
    require(model.size() < before, "documents that run next do run");
  }
}

wlb::AdaptiveSettings adaptive_settings(Choices& choose) {
  const int64_t n = choose.of<int64_t>({1, 2, 3, 4, 9, 33});
  const int64_t window = choose.of<int64_t>({1, 2, 8, 64, 200, 512, int64_t{1} << 25});
  const int64_t max_tokens = window * choose.of<int64_t>({100, 110, 125, 200}) / 100;
  const double room = static_cast<double>(max_tokens) / static_cast<double>(window) - 1;
  const int64_t delay = choose.between(kForcedSteps + 1, 25);
  if (choose.one_in(2)) return {n, max_tokens, window, true, delay, 0.008, 0.005, 1.05, 0.055, 0.0125, 12.0, 6.0};
  return {n, max_tokens, window, false, delay, 0.015, 0.035, 1.2, room, 0.6, 8.0, 0.0};
}

void check_settings_refused(const wlb::AdaptiveSettings& good) {
  const auto refused = [&](const std::function<void(wlb::AdaptiveSettings&)>& change) {
    wlb::AdaptiveSettings settings = good;
    change(settings);
    require(refuses([&] { wlb::AdaptiveCore core(settings); }), "bad settings are refused");
  };
  for (int64_t bad : {int64_t{0}, int64_t{-1}, kLowest, kHighest}) {
    refused([&](auto& s) { s.num_micro_batches = bad; });
    refused([&](auto& s) { s.max_tokens = bad; });
    refused([&](auto& s) { s.context_length = bad; });
    refused([&](auto& s) { s.max_delay_steps = bad; });
  }
  using Ratio = double wlb::AdaptiveSettings::*;
  for (double bad : {-1.0, 1e300, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    for (Ratio ratio : {&wlb::AdaptiveSettings::tolerance, &wlb::AdaptiveSettings::age_tolerance,
                        &wlb::AdaptiveSettings::ratio_limit, &wlb::AdaptiveSettings::token_band,
                        &wlb::AdaptiveSettings::token_repay, &wlb::AdaptiveSettings::imbalance_price,
                        &wlb::AdaptiveSettings::token_price})
      refused([&](auto& s) { s.*ratio = bad; });
}

class AdaptiveRound {
 public:
  AdaptiveRound(Choices& choose, const wlb::AdaptiveSettings& settings)
      : choose_(choose), s_(settings), core_(settings), wild_(choose.one_in(4)) {
    // From 12 steps on, what is forced while a forced document waits was known when that became forced: at most two
    // global batches and a window. Forced steps are half full at least, so seven of them run it all.
    bounded_ = !wild_ && s_.max_delay_steps >= 2 * kForcedSteps;
  }

  void run() {
    int64_t step = wild_ ? choose_.between(0, int64_t{1} << 61) : choose_.between(0, 50);
    for (int64_t k = choose_.between(1, 30); k > 0 && !choose_.over(); --k, ++step) {
      fill(step);
      if (choose_.one_in(6)) check_refused(step);
      take(step);
    }
    for (int64_t k = 0; bounded_ && !model_.empty(); ++k, ++step) {
      require(k <= s_.max_delay_steps, "at the end of the data all run within the bound");
      take(step);
    }
  }

 private:
  // Documents until two global batches wait, as the policy draws them, or some.
  void fill(int64_t step) {
    const int64_t room = 2 * s_.num_micro_batches * s_.context_length - tokens_of(model_);
    const int64_t count = choose_.between(0, 250);
    auto rows = documents(choose_, count, wild_ ? s_.max_tokens : s_.context_length, next_, step);
    int64_t sum = 0, work = 0, known = 0;
    size_t kept = 0;
    while (kept < rows.size() && (wild_ || sum < room)) sum += rows[kept++].length;
    rows.resize(kept);
    next_ += static_cast<int64_t>(kept);
    for (Document& d : rows)
      if (wild_) d.arrival = choose_.between(0, int64_t{1} << 62);
    for (const auto& [index, d] : model_) known += d.work;
    bool fits = true;
    for (const Document& d : rows) {
      fits = fits && d.work <= kMaxWaitingWork - known - work;
      if (fits) work += d.work;
    }
    require(refuses([&] { core_.add(rows); }) != fits, "documents are refused only if their work may not fit 64 bits");
    if (fits)
      for (const Document& d : rows) model_[d.index] = d;
    check_waiting(core_.waiting(), model_);
  }

  void check_refused(int64_t step) {
    std::vector<Document> rows = documents(choose_, choose_.between(1, 20), s_.context_length, next_, step);
    for (Document& d : rows) d.work = d.length;
    std::vector<std::vector<Document>> bad(4, rows);
    spoil(choose_, bad[0], s_.max_tokens);
    bad[1].push_back(rows.front());
    bad[2].back().arrival = choose_.of<int64_t>({-1, kLowest, kHighest});
    if (!model_.empty()) bad[3].front().index = model_.rbegin()->first;
    else bad[3].front().arrival = -1;
    const auto before = indices(core_.waiting());
    for (const auto& refused : bad) require(refuses([&] { core_.add(refused); }), "add refuses a bad document");
    for (int64_t bad_step : {int64_t{-1}, kLowest, kHighest})
      require(refuses([&] { core_.step(bad_step, 0); }), "a bad step is refused");
    require(indices(core_.waiting()) == before, "a refused call changes nothing");
  }

  void take(int64_t step) {
    const Model before = model_;
    const int64_t credit = choose_.one_in(3) ? choose_.of<int64_t>({0, 1, -1, kLowest, kHighest})
                                             : choose_.between(-s_.context_length, s_.context_length);
    const wlb::Packed packed = core_.step(step, credit);
    check_packed(packed, s_.num_micro_batches, s_.max_tokens, model_);
    check_waiting(core_.waiting(), model_);
    const auto waiting = indices(core_.waiting());
    require(std::is_sorted(waiting.begin(), waiting.end()), "documents wait in order");
    for (size_t i = 0; i + 1 < packed.bounds.size(); ++i)
      require(std::is_sorted(packed.order.begin() + packed.bounds[i], packed.order.begin() + packed.bounds[i + 1]),
              "documents of a micro-batch are in order");
    if (!bounded_) return;
    for (const auto& [index, d] : model_)
      require(step - d.arrival < s_.max_delay_steps, "no document waits beyond the bound on its delay");
  }

  Choices& choose_;
  wlb::AdaptiveSettings s_;
  wlb::AdaptiveCore core_;
  bool wild_, bounded_;  // wild: any arrival, length and number of documents
  Model model_;
  int64_t next_ = 0;
};

void stress_adaptive(Choices& choose) {
  const wlb::AdaptiveSettings settings = adaptive_settings(choose);
  check_settings_refused(settings);
  AdaptiveRound(choose, settings).run();
}

void stress_original(Choices& choose) {
  const int64_t n = choose.of<int64_t>({1, 2, 3, 9, 33}), window = choose.of<int64_t>({1, 2, 7, 1000, kMaxTokens});
  for (int64_t bad : {int64_t{0}, int64_t{-1}, kLowest, kHighest}) {
    require(refuses([&] { wlb::OriginalCore(bad, window); }), "a bad N is refused");
    require(refuses([&] { wlb::OriginalCore(n, bad); }), "a bad window is refused");
  }
  const wlb::OriginalCore core(n, window);
  const int64_t longest = choose.of<int64_t>({1, window, std::min(kMaxTokens, 5 * window), kMaxTokens});
  std::vector<Document> rows = documents(choose, choose.between(0, 60), longest, 0, 0);
  const wlb::Cut cut = core.cut(rows);
  require(cut.bounds.size() == static_cast<size_t>(n) + 1 && cut.bounds.front() == 0, "N + 1 bounds from 0");
  size_t k = 0, begun = 1;  // pieces, and windows that began
  int64_t start = 0;
  for (const Document& d : rows) {
    for (int64_t offset = 0; offset < d.length; ++k) {
      require(k < cut.row.size() && cut.row[k] == d.index && cut.offset[k] == offset, "pieces make up the documents");
      for (; begun < cut.bounds.size() && cut.bounds[begun] == static_cast<int64_t>(k); ++begun)
        require(start == static_cast<int64_t>(begun) * window, "micro-batches begin at windows");
      require(cut.length[k] >= 1 && cut.length[k] <= d.length - offset, "pieces are parts of their documents");
      require(begun == cut.bounds.size() || start + cut.length[k] <= static_cast<int64_t>(begun) * window,
              "no piece leaves its window");
      offset += cut.length[k];
      start += cut.length[k];
    }
  }
  require(k == cut.row.size() && k == cut.offset.size() && k == cut.length.size(), "nothing but the documents");
  for (; begun < cut.bounds.size(); ++begun)
    require(cut.bounds[begun] == static_cast<int64_t>(k) && start <= static_cast<int64_t>(begun) * window,
            "what is not begun is empty");
  if (rows.empty()) return;
  spoil(choose, rows, kMaxTokens);
  require(refuses([&] { core.cut(rows); }), "cut refuses a bad document");
}

void stress_fixed(Choices& choose) {
  const int64_t windows = choose.of<int64_t>({1, 2, 3, 9, 33, 100});
  const int64_t window = choose.of<int64_t>({1, 2, 7, 1000, kMaxTokens});
  const int64_t crossover = choose.of<int64_t>({0, 1, 50'000, int64_t{1} << 35});
  for (int64_t bad : {int64_t{-1}, kLowest, kHighest}) {
    require(refuses([&] { wlb::FixedCore(bad, crossover); }), "a bad window is refused");
    require(refuses([&] { wlb::FixedCore(window, bad); }), "a bad crossover is refused");
    require(refuses([&] { wlb::FixedCore(window, crossover).place({}, bad); }), "a bad number of windows is refused");
  }
  const wlb::FixedCore core(window, crossover);
  std::vector<Document> rows = documents(choose, choose.between(0, 250), std::min(kMaxTokens, 3 * window), 0, 0);
  int64_t room = windows * window;
  size_t kept = 0;
  for (; kept < rows.size() && room > 0; ++kept) {
    rows[kept].length = std::min(rows[kept].length, room);  // the last may fill the windows to the last token
    rows[kept].work = 0;
    room -= rows[kept].length;
  }
  rows.resize(kept);
  const wlb::Pieces pieces = core.place(rows, windows);
  require(pieces.row.size() == pieces.length.size() && pieces.row.size() == pieces.window.size(), "columns are alike");
  std::vector<int64_t> left, used(static_cast<size_t>(windows)), work(used.size());
  for (const Document& d : rows) left.push_back(d.length);
  for (size_t k = 0; k < pieces.row.size(); ++k) {
    const int64_t length = pieces.length[k];
    require(length >= 1 && pieces.window[k] >= 0 && pieces.window[k] < windows, "pieces are in windows");
    left.at(static_cast<size_t>(pieces.row[k])) -= length;
    used[static_cast<size_t>(pieces.window[k])] += length;
    work[static_cast<size_t>(pieces.window[k])] += length * (length + crossover);
  }
  require(std::all_of(left.begin(), left.end(), [](int64_t tokens) { return tokens == 0; }), "every token is placed");
  require(std::all_of(used.begin(), used.end(), [&](int64_t tokens) { return tokens <= window; }), "windows hold C");
  require(std::is_sorted(work.rbegin(), work.rend()), "the heaviest window is the first");
  rows.push_back({static_cast<int64_t>(rows.size()), std::min(kMaxTokens, room + 1)});
  require(room >= kMaxTokens || refuses([&] { core.place(rows, windows); }), "more than fits is refused");
  spoil(choose, rows, kMaxTokens);
  require(refuses([&] { core.place(rows, windows); }), "place refuses a bad document");
}

// As Planner in plan/step.py: a core is made here and stepped in another thread, a bounded number of steps ahead.
void stress_planner(Choices& choose) {
  constexpr int64_t kWindow = 64, kMicroBatches = 4;
  wlb::WlbCore core(kMicroBatches, kWindow, {kWindow / 4, kWindow / 2});
  std::vector<std::vector<Document>> arriving(static_cast<size_t>(choose.between(1, 20)));
  Model model;
  for (auto& rows : arriving) {
    rows = documents(choose, choose.between(0, 30), kWindow, static_cast<int64_t>(model.size()), 0);
    for (const Document& d : rows) model[d.index] = d;
  }
  const size_t ahead = static_cast<size_t>(choose.between(0, 3));
  std::mutex mutex;
  std::condition_variable changed;
  std::map<size_t, wlb::Packed> plans;
  size_t next = 0, wanted = 0;
  std::thread planner([&] {
    for (const auto& rows : arriving) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return next <= wanted + ahead; });
      }
      wlb::Packed packed = core.step(rows);
      const std::lock_guard lock(mutex);
      plans[next++] = std::move(packed);
      changed.notify_all();
    }
  });
  for (size_t step = 0; step < arriving.size(); ++step) {
    std::unique_lock lock(mutex);
    wanted = step;
    changed.notify_all();
    changed.wait(lock, [&] { return next > step; });
    require(next <= step + ahead + 1, "the planner is ahead by so many steps at most");
    const wlb::Packed packed = std::move(plans[step]);
    plans.erase(step);
    lock.unlock();
    check_packed(packed, kMicroBatches, kWindow, model);
  }
  planner.join();
  check_waiting(waiting_of(core), model);
}

void stress_sharding(Choices& choose) {
  const int64_t cp_size = choose.of<int64_t>({1, 2, 3, 4, 16}), longest = choose.of<int64_t>({1, 40, 3000, 1 << 20});
  const int64_t tile = choose.of<int64_t>({1, 2, 128, 1 << 16});
  const wlb::Kernel kernel{tile, 3.0, choose.of<double>({0.0, 1.0}), 0.5, choose.between(1, 64), 0.25};
  std::vector<int64_t> lengths;
  int64_t tokens = 0;
  for (int64_t left = choose.between(1, 40); left > 0; --left) {
    lengths.push_back(choose.between(1, longest));
    tokens += lengths.back();
  }
  if (tokens % (2 * cp_size)) {
    require(refuses([&] { wlb::shard(lengths, cp_size, {"per-document"}, {}, kernel); }), "a remainder is refused");
    lengths.push_back(2 * cp_size - tokens % (2 * cp_size));
    tokens += lengths.back();
  }
  const std::vector<std::string> all{"per-sequence", "per-document", "hybrid"};
  for (const auto& tried : {all, {all[0]}, {all[1]}, {all[1], all[2]}}) {
    const wlb::Sharding plan = wlb::shard(lengths, cp_size, tried, {0, 1, 2, 5, 62}, kernel);
    require(plan.calls.size() == 2 * static_cast<size_t>(cp_size), "two calls a rank");
    std::map<int64_t, std::map<int64_t, int64_t>> pieces;  // of each document: start -> stop
    for (size_t rank = 0; rank < static_cast<size_t>(cp_size); ++rank) {
      int64_t held = 0;
      for (size_t c : {2 * rank, 2 * rank + 1}) {
        int64_t last = -1;
        for (const wlb::Segment& s : plan.calls[c]) {
          require(s.document > last && s.start >= 0 && s.stop > s.start, "a call has each document once, in order");
          require(pieces[s.document].emplace(s.start, s.stop).second, "no row is held twice");
          last = s.document;
          held += s.stop - s.start;
        }
      }
      require(held == tokens / cp_size, "ranks hold equally many tokens");
    }
    for (size_t d = 0; d < lengths.size(); ++d) {
      int64_t at = 0;
      for (const auto& [start, stop] : pieces[static_cast<int64_t>(d)]) {
        require(start == at, "pieces follow each other");
        at = stop;
      }
      require(at == lengths[d], "documents are whole");
    }
  }
  lengths[0] = choose.of<int64_t>({0, -1, kMaxTokens + 1, kLowest, kHighest});
  require(refuses([&] { wlb::shard(lengths, cp_size, all, {1}, kernel); }), "a bad length is refused");
}

// Work of so many micro-batches, up to what the predicted times allow.
void stress_pipeline(Choices& choose) {
  const int64_t pp = choose.between(1, 6), vpp = choose.between(1, 3), dp = choose.between(1, 9);
  const int64_t rounds = choose.between(1, 20), total = dp * rounds, limit = kHighest / (vpp * total + pp);
  const int64_t most = choose.of<int64_t>({0, 1, 5, 1'000'000, limit});
  std::vector<int64_t> work;
  while (work.size() < static_cast<size_t>(total)) work.push_back(choose.one_in(20) ? limit : choose.between(0, most));
  std::vector<int64_t> rows = wlb::place(work, static_cast<size_t>(dp), pp, vpp);
  for (auto row = rows.begin(); row != rows.end(); row += rounds)
    require(std::is_sorted(row, row + rounds), "a rank's micro-batches ascend");
  std::sort(rows.begin(), rows.end());
  for (size_t i = 0; i < rows.size(); ++i) require(rows[i] == static_cast<int64_t>(i), "a micro-batch is on one rank");
  for (size_t bad : {size_t{0}, work.size() + 1})
    require(refuses([&] { wlb::place(work, bad, pp, vpp); }), "a bad number of ranks is refused");

  // A chain of passes ends after all of them.
  const auto width = static_cast<size_t>(choose.between(1, 40)), count = static_cast<size_t>(choose.between(1, 40));
  std::vector<int32_t> slot(width), before(width, static_cast<int32_t>(width));
  std::iota(slot.begin(), slot.end(), 0);
  std::copy(slot.begin(), slot.end() - 1, before.begin() + 1);
  const wlb::PassGraph chain{before.data(), before.data(), slot.data(), slot.data(), width, width + 1};
  std::vector<int64_t> times(count * width);
  for (int64_t& time : times) time = choose.between(0, 1 << 20);
  const std::vector<int64_t> ends = wlb::makespans(chain, times.data(), count, width);
  const std::vector<double> doubles(times.begin(), times.end());
  const std::vector<double> same = wlb::makespans(chain, doubles.data(), count, width);
  for (size_t k = 0; k < count; ++k) {
    const auto row = times.begin() + static_cast<std::ptrdiff_t>(k * width);
    require(ends[k] == std::accumulate(row, row + static_cast<std::ptrdiff_t>(width), int64_t{0}), "a chain adds up");
    require(static_cast<double>(ends[k]) == same[k], "doubles are exact");
  }
}

void stress(Choices& choose) {
  const auto policy = choose.of<void (*)(Choices&)>(
      {stress_wlb, stress_wlb, stress_adaptive, stress_adaptive, stress_original, stress_fixed, stress_planner,
       stress_sharding, stress_pipeline});
  policy(choose);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Choices choose(data, size);
  stress(choose);
  return 0;
}

#ifndef WLB_FUZZ
namespace {

void run(uint64_t seed, uint64_t rounds, bool bytes) {
  for (uint64_t r = 0; r < rounds; ++r) {
    round_name = "seed " + std::to_string(seed + r);
    Choices choose(seed + r);
    if (!bytes) {
      stress(choose);
      continue;
    }
    std::vector<uint8_t> input(static_cast<size_t>(choose.between(0, 2000)));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(choose.between(0, 255));
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  if (given.size() > 1 && given[0] == "files") {
    for (size_t i = 1; i < given.size(); ++i) {
      round_name = given[i];
      std::ifstream file(given[i], std::ios::binary);
      const std::vector<char> input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    }
    std::printf("stress: ok\n");
    return 0;
  }
  const std::string mode = given.size() == 3 ? given[2] : "";
  if (given.size() < 2 || given.size() > 3 || (given.size() == 3 && mode != "threads" && mode != "bytes")) {
    std::fprintf(stderr, "usage: stress SEED ROUNDS [threads|bytes]\n       stress files FILE...\n");
    return 2;
  }
  const uint64_t seed = std::stoull(given[0]), rounds = std::stoull(given[1]);
  if (mode == "threads") {
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) threads.emplace_back(run, seed + t * rounds, rounds, false);
    for (std::thread& thread : threads) thread.join();
  } else {
    run(seed, rounds, mode == "bytes");
  }
  std::printf("stress: ok\n");
}
#endif
