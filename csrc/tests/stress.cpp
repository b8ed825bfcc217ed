// Drives the planning cores with random and hostile input and aborts where an invariant breaks.
//
//   stress SEED ROUNDS [threads|bytes]    round r repeats alone as `stress SEED+r 1` (or `stress SEED+r 1 bytes`)
//   stress files FILE...                  inputs of the fuzzer, one after the other
//
// With `threads`, four threads call them at once, as planner threads do. With `bytes`, choices come from random
// bytes through the entry point of libFuzzer, which takes the place of main where this is built with -DWLB_FUZZ.
// Whether plans are right is for the tests in Python, which compare them with tests/reference/.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../delay.h"
#include "../pipeline.h"
#include "../sharding.h"

namespace {

using Int64s = std::vector<int64_t>;

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min(), kHighest = std::numeric_limits<int64_t>::max();

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

  int64_t between(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(bits() % (static_cast<uint64_t>(most - least) + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == n; }

  template <typename T>
  T of(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, static_cast<int64_t>(values.size()) - 1))];
  }

  std::vector<double> numbers(int64_t size, int64_t least, int64_t most) {
    std::vector<double> drawn;
    for (; size > 0; --size) drawn.push_back(static_cast<double>(between(least, most)));
    return drawn;
  }

  // One of these numbers becomes another, for a call of which nothing but std::invalid_argument may come.
  template <typename Call>
  void spoil(const std::vector<int64_t*>& numbers, Call&& call) {
    int64_t& number = *of(numbers);
    const int64_t before = std::exchange(number, of<int64_t>({0, -1, kLowest, kHighest, int64_t{1} << 62}));
    try {
      call();
    } catch (const std::invalid_argument&) {
    }
    number = before;
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

// Steps with a delay, as the policy takes them, or of any documents and steps (wild).
void stress_delay(Choices& choose) {
  const bool wild = choose.one_in(4);
  const int64_t window = choose.of<int64_t>({1, 2, 8, 64, 200, 512, int64_t{1} << 25});
  const int64_t n = choose.of<int64_t>({1, 2, 3, 4, 9, 33}), windows = choose.of<int64_t>({n, 1, 2 * n});
  const int64_t room = window * choose.of<int64_t>({100, 110, 125, 200}) / 100 * std::max<int64_t>(1, windows / n);
  const int64_t ranks = choose.of<int64_t>({1, n, n % 3 ? 1 : n / 3}), largest = choose.of<int64_t>({0, 1, 6, 40});
  const int64_t crossover = choose.of<int64_t>({1, 50, int64_t{1} << 35}), delay = choose.between(11, 35);
  wlb::Sizes sizes{n, ranks, choose.between(1, 24), largest, std::min(room, wlb::kMaxTokens)};
  wlb::Limits limits{choose.between(1, 24), windows * window, crossover, delay};
  // From twice as many on, what is forced while a forced document waits was known when that became forced: at most
  // four global batches and a window. Forced steps are half full at least, so so many of them run it all.
  const bool bounded = !wild && limits.max_delay_steps >= 2 * wlb::kForcedSteps;
  std::vector<wlb::Document> pool;
  const auto fill = [&](int64_t step) {
    int64_t tokens_left = 4 * limits.batch_tokens;
    int64_t work_left = wlb::kMaxCost / (sizes.total_weight + sizes.largest_weight);
    for (const wlb::Document& d : pool) tokens_left -= d.length, work_left -= d.work;
    const int64_t longest = wild ? sizes.max_tokens : window, half = (longest + 1) / 2;
    const auto [least, most] = choose.of<std::pair<int64_t, int64_t>>(
        {{1, longest}, {longest, longest}, {1, 1}, {1, (longest + 15) / 16}, {half, std::min(longest, half + 1)}});
    const int64_t per_token = choose.of<int64_t>({-1, -1, 0, wlb::kMaxWorkPerToken});
    for (int64_t k = choose.between(0, 250); k > 0; --k) {
      const int64_t length = choose.one_in(20) ? longest : choose.between(least, most);
      const int64_t work = length * (per_token < 0 ? length + limits.crossover_tokens : per_token);
      if ((!wild && tokens_left <= 0) || work > work_left) break;
      tokens_left -= length, work_left -= work;
      pool.push_back({static_cast<int64_t>(pool.size()), length, work, wild ? choose.between(0, wlb::kMaxCost) : step});
    }
  };
  int64_t step = choose.between(0, wild ? int64_t{1} << 61 : 50), data_ends = step + choose.between(1, 30);
  for (; step < data_ends || (bounded && !pool.empty()); ++step) {
    require(step <= data_ends + limits.max_delay_steps, "at the end of the data all run within the bound");
    if (step < data_ends) fill(step);
    int64_t credit = choose.of<int64_t>({0, 1, -1, kLowest, kHighest, choose.between(-window, window)});
    const auto call = [&] { return wlb::release_documents(pool, step, credit, sizes, limits); };
    std::vector<int64_t*> numbers{&step, &credit, &sizes.num_micro_batches, &sizes.ranks, &sizes.total_weight,
                                  &sizes.largest_weight, &sizes.max_tokens, &limits.unit_weight, &limits.batch_tokens,
                                  &limits.crossover_tokens, &limits.max_delay_steps};
    if (!pool.empty()) numbers.insert(numbers.end(), {&pool[0].length, &pool[0].work, &pool.back().arrival});
    if (choose.one_in(6)) choose.spoil(numbers, call);
    const wlb::Packed packed = call();
    std::vector<char> ran(pool.size());
    for (int64_t i = 0; i < n; ++i) {
      int64_t tokens = 0;
      for (auto k = packed.bounds.at(static_cast<size_t>(i)); k < packed.bounds.at(static_cast<size_t>(i) + 1); ++k) {
        const auto row = static_cast<size_t>(packed.rows.at(static_cast<size_t>(k)));
        require(!std::exchange(ran.at(row), true), "a document is packed once");
        tokens += pool[row].length;
      }
      require(tokens <= sizes.max_tokens, "a micro-batch holds at most S_max");
    }
    for (wlb::Document& d : std::exchange(pool, {})) {
      if (ran[static_cast<size_t>(d.row)]) continue;
      require(!bounded || step - d.arrival < limits.max_delay_steps, "no document waits beyond the bound on its delay");
      d.row = static_cast<int64_t>(pool.size());
      pool.push_back(d);
    }
  }
}

void stress_sharding(Choices& choose) {
  int64_t cp_size = choose.of<int64_t>({1, 2, 3, 4, 16});
  const int64_t longest = choose.of<int64_t>({1, 40, 3000, 1 << 20}), heads = choose.between(1, 64);
  const wlb::Kernel kernel{choose.of<int64_t>({1, 2, 128, 1 << 16}),
                           3.0,
                           choose.of<double>({0.0, 1.0}),
                           0.5,
                           choose.of<double>({0.0, 1.0}),
                           heads,
                           choose.between(1, 4),
                           choose.of<double>({0.0, 0.25, 5.0})};
  Int64s lengths;
  for (int64_t left = choose.between(1, 40); left > 0; --left) lengths.push_back(choose.between(1, longest));
  int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  if (tokens % (2 * cp_size)) lengths.push_back(2 * cp_size - tokens % (2 * cp_size));
  tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const std::vector<std::string> all{"per-sequence", "per-document", "hybrid"};
  const std::vector<double> most_shares{choose.of<double>({0.0, 0.3, 1.0, 4.0}), 0.125, std::nan(""), -1.0};
  wlb::Choice choice{choose.of<std::vector<std::string>>({all, {all[0]}, {all[1]}, {all[1], all[2]}}),
                     most_shares, kernel, {}};
  if (choose.one_in(2)) {
    const auto time = [&](double most) { return choose.of<double>({0.0, most / 300, most}); };
    const auto key_bounds = choose.of<std::vector<std::vector<double>>>({{}, {{0, 1}, {0, 0.125, 0.875, 1}}});
    const wlb::Kernel backward{kernel.tile_rows, 2.0, 2.5, time(1), time(2.5), heads, 1, 0.0};
    choice.costs = wlb::RoundCosts{kernel,  backward,  time(20),  time(3),
                                   time(6), time(0.5), time(0.1), key_bounds};
  }
  const wlb::Sharding plan = wlb::choose_sharding(lengths, cp_size, choice);
  Int64s held(static_cast<size_t>(cp_size)), left = lengths;
  for (size_t call = 0; call + 1 < plan.bounds.size(); ++call)
    for (int64_t i = plan.bounds[call]; i < plan.bounds[call + 1]; ++i) {
      const wlb::Segment& s = plan.segments.at(static_cast<size_t>(i));
      require(s.start >= 0 && s.stop > s.start, "a segment has rows");
      held.at(call * held.size() / (plan.bounds.size() - 1)) += s.stop - s.start;
      left.at(static_cast<size_t>(s.document)) -= s.stop - s.start;
    }
  for (int64_t each : held) require(each == tokens / cp_size, "ranks hold equally many tokens");
  for (int64_t each : left) require(each == 0, "documents are whole");
  std::vector<int64_t*> numbers{&cp_size, &lengths[0], &choice.kernel.tile_rows};
  choose.spoil(numbers, [&] { wlb::choose_sharding(lengths, cp_size, choice); });
}

void stress_pipeline(Choices& choose) {
  // Work of so many micro-batches, up to what the predicted times allow.
  const int64_t all = choose.between(1, 20), largest = choose.between(0, 60), dp = choose.between(1, 9);
  const int64_t total = dp * choose.between(1, 20), limit = kHighest / (all * total + largest);
  const int64_t most = choose.of<int64_t>({0, 1, 5, 1'000'000, limit});
  Int64s placed;
  for (int64_t k = 0; k < total; ++k) placed.push_back(choose.one_in(20) ? limit : choose.between(0, most));
  placed = wlb::place(placed, static_cast<size_t>(dp), all, largest);
  std::sort(placed.begin(), placed.end());
  for (int64_t i = 0; i < total; ++i) require(placed.at(static_cast<size_t>(i)) == i, "a micro-batch is on one rank");

  // A chain of passes ends after all of them.
  const auto width = static_cast<size_t>(choose.between(1, 40)), count = static_cast<size_t>(choose.between(1, 40));
  std::vector<int32_t> slot(2 * width), before(2 * width, static_cast<int32_t>(2 * width));
  std::iota(slot.begin(), slot.end(), 0);
  std::copy(slot.begin(), slot.end() - 1, before.begin() + 1);
  const wlb::PassGraph chain{before.data(), before.data(), slot.data(), slot.data(), 2 * width, 2 * width + 1};
  const std::vector<double> work = choose.numbers(static_cast<int64_t>(count * width), 0, 1 << 20);
  const Int64s exact(work.begin(), work.end()), ends = wlb::makespans(chain, exact.data(), count, width);
  const std::vector<double> same = wlb::makespans(chain, work.data(), count, width);
  for (size_t k = 0; k < count; ++k) {
    require(ends[k] == 3 * std::accumulate(&exact[k * width], &exact[k * width] + width, int64_t{0}), "chains add up");
    require(static_cast<double>(ends[k]) == same[k], "doubles are exact");
  }

  Int64s nodes(static_cast<size_t>(choose.between(1, 40)));
  std::iota(nodes.begin(), nodes.end(), 0);
  const auto times = choose.numbers(static_cast<int64_t>(nodes.size()), 0, 100);
  require(wlb::node_ends(nodes.data(), nodes.data(), times.data(), nodes.size()).back() ==
              std::accumulate(times.begin(), times.end(), 0.0),
          "nodes follow each other");
}

void stress(Choices& choose) {
  const int64_t which = choose.between(0, 3);
  (which == 0 ? stress_pipeline : which == 1 ? stress_sharding : stress_delay)(choose);
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
  for (uint64_t r = seed; r < seed + rounds; ++r) {
    round_name = "seed " + std::to_string(r);
    Choices choose(r);
    if (bytes) {
      const std::vector<double> drawn = choose.numbers(choose.between(0, 2000), 0, 255);
      const std::vector<uint8_t> input(drawn.begin(), drawn.end());
      LLVMFuzzerTestOneInput(input.data(), input.size());
    } else {
      stress(choose);
    }
  }
}

void run_file(const std::string& name) {
  round_name = name;
  std::ifstream file(name, std::ios::binary);
  const std::vector<uint8_t> input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const std::string mode = given.size() > 2 ? given[2] : "";
  if (given.at(0) == "files") {
    std::for_each(given.begin() + 1, given.end(), run_file);
  } else {
    const uint64_t seed = std::stoull(given[0]), rounds = std::stoull(given.at(1));
    std::vector<std::thread> threads;
    for (uint64_t t = 0; mode == "threads" && t < 4; ++t) threads.emplace_back(run, seed + t * rounds, rounds, false);
    for (std::thread& thread : threads) thread.join();
    if (threads.empty()) run(seed, rounds, mode == "bytes");
  }
  std::printf("stress: ok\n");
}
#endif
