// Drives the planning cores with random and hostile input and aborts where an invariant breaks.
//
//   stress SEED ROUNDS [threads|bytes]    round r repeats alone as `stress SEED+r 1` (or `stress SEED+r 1 bytes`)
//   stress files FILE...                  inputs of the fuzzer, one after the other
//
// With `threads`, four threads call them at once, as planner threads do. With `bytes`, choices come from random
// bytes through the entry point of libFuzzer, which takes the place of main where this is built with -DWLB_FUZZ.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../adaptive.h"
#include "../pipeline.h"
#include "../sharding.h"
#include "../wlb.h"

namespace {

using wlb::Document;
using wlb::kMaxTokens;
using wlb::kMaxWorkPerToken;

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min(), kHighest = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxCost = int64_t{1} << 62;
constexpr int64_t kForcedSteps = 10;

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
std::vector<Document> documents(Choices& choose, int64_t count, int64_t longest, int64_t arrival) {
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
    rows.push_back({k, length, work, arrival});
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

void stress_wlb(Choices& choose) {
  const int64_t n = choose.of<int64_t>({1, 2, 3, 4, 9, 33});
  const int64_t max_tokens = choose.of<int64_t>({1, 2, 7, 64, 1000, int64_t{1} << 17, int64_t{1} << 26});
  for (int64_t bad : {int64_t{0}, int64_t{-1}, kLowest, kHighest}) {
    require(refuses([&] { wlb::place_wlb({}, bad, max_tokens); }), "a bad N is refused");
    require(refuses([&] { wlb::place_wlb({}, n, bad); }), "a bad S_max is refused");
  }
  std::vector<Document> rows = documents(choose, choose.between(0, 200), max_tokens, 0);
  const std::vector<int64_t> placed = wlb::place_wlb(rows, n, max_tokens);
  require(placed.size() == rows.size(), "every document has its micro-batch");
  std::vector<int64_t> tokens(static_cast<size_t>(n) + 1);
  for (size_t k = 0; k < rows.size(); ++k) {
    require(placed[k] >= 0 && placed[k] <= n, "there are N micro-batches");
    int64_t& sum = tokens[static_cast<size_t>(placed[k])];
    const auto shortest = std::min_element(tokens.begin(), tokens.end() - 1);
    if (placed[k] == n) require(*shortest + rows[k].length > max_tokens, "what is left over fits nowhere");
    else require((sum += rows[k].length) <= max_tokens, "a micro-batch holds at most S_max");
  }
  if (rows.empty()) return;
  spoil(choose, rows, max_tokens);
  require(refuses([&] { wlb::place_wlb(rows, n, max_tokens); }), "a bad document is refused");
}

class AdaptiveRound {
 public:
  explicit AdaptiveRound(Choices& choose) : choose_(choose), wild_(choose.one_in(4)) {
    const int64_t window = choose.of<int64_t>({1, 2, 8, 64, 200, 512, int64_t{1} << 25});
    const int64_t n = choose.of<int64_t>({1, 2, 3, 4, 9, 33});
    const int64_t ranks = choose.of<int64_t>({1, n, n % 3 ? 1 : n / 3}), windows = choose.of<int64_t>({n, 1, 2 * n});
    window_ = window;
    sizes_ = {n,
              ranks,
              choose.between(1, 24),
              choose.of<int64_t>({0, 1, 6, 40}),
              choose.between(1, 24),
              window * choose.of<int64_t>({100, 110, 125, 200}) / 100 * std::max<int64_t>(1, windows / n),
              windows * window,
              choose.of<int64_t>({1, 50, int64_t{1} << 35}),
              choose.between(kForcedSteps + 1, 35)};
    sizes_.max_tokens = std::min(sizes_.max_tokens, wlb::kMaxTokens);
    // From twice as many on, what is forced while a forced document waits was known when that became forced: at most
    // four global batches and a window. Forced steps are half full at least, so so many of them run it all.
    bounded_ = !wild_ && sizes_.max_delay_steps >= 2 * kForcedSteps;
  }

  void run() {
    int64_t step = wild_ ? choose_.between(0, int64_t{1} << 61) : choose_.between(0, 50);
    for (int64_t k = choose_.between(1, 30); k > 0 && !choose_.over(); --k, ++step) {
      fill(step);
      if (choose_.one_in(6)) check_refused(step);
      take(step);
    }
    for (int64_t k = 0; bounded_ && !pool_.empty(); ++k, ++step) {
      require(k <= sizes_.max_delay_steps, "at the end of the data all run within the bound");
      take(step);
    }
  }

 private:
  // Documents until four global batches wait, as the policy draws them, or some.
  void fill(int64_t step) {
    const auto sum = [&](int64_t Document::*member) {
      return std::accumulate(pool_.begin(), pool_.end(), int64_t{0},
                             [&](int64_t total, const Document& d) { return total + d.*member; });
    };
    int64_t room = 4 * sizes_.batch_tokens - sum(&Document::length);
    int64_t work_left = kMaxCost / (sizes_.total_weight + sizes_.largest_weight) - sum(&Document::work);
    for (Document d : documents(choose_, choose_.between(0, 250), wild_ ? sizes_.max_tokens : window_, step)) {
      if ((!wild_ && room <= 0) || d.work > work_left) break;
      if (wild_) d.arrival = choose_.between(0, int64_t{1} << 62);
      room -= d.length;
      work_left -= d.work;
      pool_.push_back(d);
    }
    number();
  }

  void number() {
    for (size_t k = 0; k < pool_.size(); ++k) pool_[k].row = static_cast<int64_t>(k);
  }

  void check_refused(int64_t step) {
    const auto refused = [&](const std::vector<Document>& pool, int64_t at, const wlb::Sizes& sizes) {
      return refuses([&] { wlb::choose_adaptive(pool, at, 0, sizes); });
    };
    for (int64_t bad : {int64_t{-1}, kLowest, kHighest}) {
      require(refused(pool_, bad, sizes_), "a bad step is refused");
      for (int64_t wlb::Sizes::*size :
           {&wlb::Sizes::num_micro_batches, &wlb::Sizes::ranks, &wlb::Sizes::total_weight, &wlb::Sizes::largest_weight,
            &wlb::Sizes::unit_weight, &wlb::Sizes::max_tokens, &wlb::Sizes::batch_tokens, &wlb::Sizes::max_delay_steps}) {
        wlb::Sizes changed = sizes_;
        changed.*size = bad;
        require(refused(pool_, step, changed), "a bad size is refused");
      }
    }
    if (pool_.empty()) return;
    std::vector<Document> bad = pool_;
    spoil(choose_, bad, sizes_.max_tokens);
    require(refused(bad, step, sizes_), "a bad document is refused");
    bad = pool_;
    bad.back().arrival = choose_.of<int64_t>({-1, kLowest, kHighest});
    require(refused(bad, step, sizes_), "a bad arrival is refused");
  }

  void take(int64_t step) {
    const int64_t credit = choose_.one_in(3) ? choose_.of<int64_t>({0, 1, -1, kLowest, kHighest})
                                             : choose_.between(-window_, window_);
    const wlb::Packed packed = wlb::choose_adaptive(pool_, step, credit, sizes_);
    require(packed.bounds.size() == static_cast<size_t>(sizes_.num_micro_batches) + 1, "N + 1 bounds");
    require(packed.bounds.front() == 0, "bounds begin at 0");
    require(packed.bounds.back() == static_cast<int64_t>(packed.rows.size()), "bounds end with the documents");
    std::vector<char> ran(pool_.size());
    for (size_t i = 0; i + 1 < packed.bounds.size(); ++i) {
      int64_t sum = 0, last = -1;
      require(packed.bounds[i] <= packed.bounds[i + 1], "bounds are monotone");
      for (int64_t k = packed.bounds[i]; k < packed.bounds[i + 1]; ++k) {
        const int64_t row = packed.rows[static_cast<size_t>(k)];
        require(row > last && row < static_cast<int64_t>(pool_.size()), "documents of a micro-batch are in order");
        require(!std::exchange(ran[static_cast<size_t>(row)], true), "a document is packed once");
        sum += pool_[static_cast<size_t>(last = row)].length;
      }
      require(sum <= sizes_.max_tokens, "a micro-batch holds at most S_max");
    }
    std::vector<Document> waiting;
    for (const Document& d : pool_)
      if (!ran[static_cast<size_t>(d.row)]) waiting.push_back(d);
    pool_ = std::move(waiting);
    number();
    for (const Document& d : pool_)
      require(!bounded_ || step - d.arrival < sizes_.max_delay_steps, "no document waits beyond the bound on its delay");
  }

  Choices& choose_;
  bool wild_, bounded_;  // wild: any arrival, length and number of documents
  int64_t window_;
  wlb::Sizes sizes_;
  std::vector<Document> pool_;
};

void stress_adaptive(Choices& choose) { AdaptiveRound(choose).run(); }

// Every document once on its ranks, which hold equally many tokens; with stages, each in the calls of its own set.
void check_sharding(const wlb::Sharding& plan, std::vector<int64_t> lengths, size_t cp_size, bool is_staged) {
  const size_t num_calls = plan.call_sets.size(), num_documents = lengths.size();
  require(plan.bounds.size() == cp_size * num_calls + 1, "every rank has as many calls");
  require(plan.bounds.back() == static_cast<int64_t>(plan.segments.size()), "calls have all segments");
  std::vector<int64_t> reordered;
  for (int64_t document : plan.order) reordered.push_back(std::exchange(lengths[static_cast<size_t>(document)], 0));
  const int64_t tokens = std::accumulate(reordered.begin(), reordered.end(), int64_t{0});
  std::vector<std::map<int64_t, int64_t>> pieces(num_documents);  // start -> stop
  std::vector<std::set<int64_t>> sets(num_documents);
  for (size_t rank = 0; rank < cp_size; ++rank) {
    int64_t held = 0;
    for (size_t call = 0; call < num_calls; ++call) {
      int64_t last = -1;
      for (int64_t i = plan.bounds[rank * num_calls + call]; i < plan.bounds[rank * num_calls + call + 1]; ++i) {
        const wlb::Segment& s = plan.segments[static_cast<size_t>(i)];
        require(s.document > last && s.start >= 0 && s.stop > s.start, "a call has each document once, in order");
        const auto document = static_cast<size_t>(last = s.document);
        require(pieces.at(document).emplace(s.start, s.stop).second, "no row is held twice");
        sets[document].insert(plan.call_sets[call]);
        held += s.stop - s.start;
        if (is_staged && plan.call_sets[call] == 0)
          require(s.start == 0 && s.stop == reordered[document], "what needs no exchange is whole");
      }
    }
    require(held == tokens / static_cast<int64_t>(cp_size), "ranks hold equally many tokens");
  }
  std::set<int64_t> all;
  for (size_t d = 0; d < num_documents; ++d) {
    int64_t at = 0;
    for (const auto& [start, stop] : pieces[d]) {
      require(start == at, "pieces follow each other");
      at = stop;
    }
    require(at == reordered[d], "documents are whole");
    require(sets[d].size() == 1, "a document is in one set");
    all.insert(*sets[d].begin());
  }
  std::map<int64_t, int64_t> heads;
  std::map<int64_t, double> keys;
  for (const wlb::Stage& stage : plan.stages) {
    require(all.count(stage.document_set) == 1, "a stage has documents");
    if (stage.heads) require(stage.heads->first == heads[stage.document_set], "key heads follow each other");
    if (stage.heads) heads[stage.document_set] = stage.heads->second;
    if (stage.keys) require(stage.keys->first == keys[stage.document_set], "shares of keys follow each other");
    if (stage.keys) keys[stage.document_set] = stage.keys->second;
    if (!is_staged || (!stage.heads && !stage.keys)) require(all.erase(stage.document_set) == 1, "a set runs once");
  }
  for (int64_t set : all) require(heads.count(set) + keys.count(set) == 1, "every set runs");
}

void stress_sharding(Choices& choose) {
  const int64_t cp_size = choose.of<int64_t>({1, 2, 3, 4, 16}), longest = choose.of<int64_t>({1, 40, 3000, 1 << 20});
  const int64_t tile = choose.of<int64_t>({1, 2, 128, 1 << 16}), heads = choose.between(1, 64);
  const wlb::Kernel kernel{tile, 3.0, choose.of<double>({0.0, 1.0}), 0.5, heads, choose.between(1, 4)};
  std::vector<int64_t> lengths;
  int64_t tokens = 0;
  for (int64_t left = choose.between(1, 40); left > 0; --left) {
    lengths.push_back(choose.between(1, longest));
    tokens += lengths.back();
  }
  const int64_t unit = cp_size > 1 ? 2 * cp_size : 1, movable = cp_size > 1 ? static_cast<int64_t>(lengths.size()) : 0;
  const std::vector<double> most_shares{choose.of<double>({0.0, 0.3, 1.0, 4.0}), 0.125, std::nan(""), -1.0};
  wlb::Choice choice{{"per-document"}, most_shares, kernel, {0.25}, choose.between(0, movable), {}};
  const auto refused = [&](const wlb::Choice& bad) {
    return refuses([&] { wlb::choose_sharding(lengths, cp_size, bad); });
  };
  if (tokens % unit) {
    require(refused(choice), "a remainder is refused");
    lengths.push_back(unit - tokens % unit);
  }
  const std::vector<std::string> all{"per-sequence", "per-document", "hybrid"};
  for (const auto& tried : {all, {all[0]}, {all[1]}, {all[1], all[2]}}) {
    choice.strategies = tried;
    choice.exchanges = {0.25};
    choice.staging = {};
    const auto size = static_cast<size_t>(cp_size);
    check_sharding(wlb::choose_sharding(lengths, cp_size, choice), lengths, size, false);
    choice.exchanges = {0.0, 0.01, 5.0};
    choice.staging = wlb::Staging{kernel,
                                  {tile, 2.0, 2.5, choose.of<double>({0.0, 1.0}), heads, 1},
                                  choose.of<double>({0.0, 20.0}),
                                  choose.of<double>({0.0, 0.01, 3.0}),
                                  choose.of<double>({0.0, 0.02, 6.0}),
                                  choose.of<double>({0.0, 0.5}),
                                  choose.of<double>({0.0, 0.1}),
                                  choose.one_in(2),
                                  choose.of<int64_t>({1, 2, 7, 8}),
                                  choose.of<std::vector<int64_t>>({{0}, {0, 1, 2}, {0, 64}}),
                                  {{0, 1}, {0, 0.25, 1}, {0, 0.125, 0.875, 1}}};
    if (choose.one_in(3)) choice.staging->shares.clear();
    check_sharding(wlb::choose_sharding(lengths, cp_size, choice), lengths, size, true);
  }
  for (double bad : {-0.5, 1.5, std::nan("")}) {
    wlb::Choice changed = choice;
    changed.staging->shares = {{0, bad}};
    require(refused(changed), "a bad share is refused");
  }
  for (int64_t bad : {int64_t{-1}, kLowest, kHighest}) {
    wlb::Choice changed = choice;
    changed.num_mirrored = bad;
    require(refused(changed), "a bad number of mirrored documents is refused");
    changed = choice;
    changed.staging->edges.push_back(bad);
    require(refused(changed), "a bad edge is refused");
    changed = choice;
    changed.staging->num_heads = bad;
    require(refused(changed), "a bad number of heads is refused");
  }
  lengths[0] = choose.of<int64_t>({0, -1, kMaxTokens + 1, kLowest, kHighest});
  require(refused(choice), "a bad length is refused");
}

// Work of so many micro-batches, up to what the predicted times allow.
void stress_pipeline(Choices& choose) {
  const int64_t all = choose.between(1, 20), largest = choose.between(0, 60), dp = choose.between(1, 9);
  const int64_t rounds = choose.between(1, 20), total = dp * rounds, limit = kHighest / (all * total + largest);
  const int64_t most = choose.of<int64_t>({0, 1, 5, 1'000'000, limit});
  std::vector<int64_t> work;
  while (work.size() < static_cast<size_t>(total)) work.push_back(choose.one_in(20) ? limit : choose.between(0, most));
  std::vector<int64_t> rows = wlb::place(work, static_cast<size_t>(dp), all, largest);
  for (auto row = rows.begin(); row != rows.end(); row += rounds)
    require(std::is_sorted(row, row + rounds), "a rank's micro-batches ascend");
  std::sort(rows.begin(), rows.end());
  for (size_t i = 0; i < rows.size(); ++i) require(rows[i] == static_cast<int64_t>(i), "a micro-batch is on one rank");
  for (size_t bad : {size_t{0}, work.size() + 1})
    require(refuses([&] { wlb::place(work, bad, all, largest); }), "a bad number of ranks is refused");

  // A chain of passes ends after all of them.
  const auto width = static_cast<size_t>(choose.between(1, 40)), count = static_cast<size_t>(choose.between(1, 40));
  std::vector<int32_t> slot(2 * width), before(2 * width, static_cast<int32_t>(2 * width));
  std::iota(slot.begin(), slot.end(), 0);
  std::copy(slot.begin(), slot.end() - 1, before.begin() + 1);
  const wlb::PassGraph chain{before.data(), before.data(), slot.data(), slot.data(), 2 * width, 2 * width + 1};
  work.resize(count * width);
  for (int64_t& each : work) each = choose.between(0, 1 << 20);
  const std::vector<int64_t> ends = wlb::makespans(chain, work.data(), count, width);
  const std::vector<double> doubles(work.begin(), work.end());
  const std::vector<double> same = wlb::makespans(chain, doubles.data(), count, width);
  for (size_t k = 0; k < count; ++k) {
    const auto row = work.begin() + static_cast<std::ptrdiff_t>(k * width);
    require(ends[k] == 3 * std::accumulate(row, row + static_cast<std::ptrdiff_t>(width), int64_t{0}), "chains add up");
    require(static_cast<double>(ends[k]) == same[k], "doubles are exact");
  }

  // So does a chain whose passes leave parts to one stage, whatever they hold, and every part runs.
  const int64_t passes = choose.between(1, 40);
  std::vector<int64_t> nodes(passes), earlier(passes), bounds{0};
  std::iota(nodes.begin(), nodes.end(), 0);
  std::iota(earlier.begin(), earlier.end(), 0);
  for (int64_t k = 0; k < passes; ++k) bounds.push_back(bounds.back() + choose.between(0, 3));
  const auto numbers = [&](int64_t size, int64_t least) {
    std::vector<double> drawn;
    while (drawn.size() < static_cast<size_t>(size)) drawn.push_back(static_cast<double>(choose.between(least, 100)));
    return drawn;
  };
  const auto times = numbers(passes, 0), part = numbers(bounds.back(), 0), held = numbers(bounds.back(), 0),
             needs = numbers(passes, 0), steps = numbers(passes, -100), limit_of = numbers(1, 0);
  const auto played = wlb::play({nodes.data(), earlier.data(), earlier.data(), times.data(), nodes.size(), nodes.size(),
                                 1, static_cast<size_t>(passes)},
                                {bounds.data(), part.data(), held.data(), needs.data(), steps.data(), limit_of.data(),
                                 choose.between(0, passes)});
  require(played.end.back() + played.left[0] == std::accumulate(times.begin(), times.end(), 0.0) +
                                                    std::accumulate(part.begin(), part.end(), 0.0),
          "passes and parts follow each other");
  require(std::is_sorted(played.before.begin(), played.before.end()), "parts run in order");
}

void stress(Choices& choose) {
  const auto policy = choose.of<void (*)(Choices&)>(
      {stress_wlb, stress_adaptive, stress_adaptive, stress_sharding, stress_pipeline});
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
