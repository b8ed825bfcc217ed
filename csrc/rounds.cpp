#include "rounds.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace wlb {
namespace {

using Times = std::vector<double>;  // of every rank

// A piece of a document on several ranks: its rows, the keys that it sees of other ranks, and those before it of its
// own.
struct Row {
  size_t call;
  int64_t rows, others, before;
};

// What a rank computes in a round.
struct Kernels {
  int64_t calls = 0;
  Counts counts = {};
};

// What a round with an exchange takes.
struct Timed {
  Times forward, backward;
  double arrive, leave;
};

class Player {
 public:
  Player(const std::vector<Piece>& pieces, size_t cp_size, const RoundCosts& costs, std::optional<int64_t> moved = {})
      : costs_(costs), cp_size_(cp_size), whole_(cp_size), shared_(cp_size) {
    const Piece* const last = pieces.data() + pieces.size();
    int64_t tokens = 0;
    std::vector<std::pair<const Piece*, const Piece*>> shared;
    for (const Piece *begin = pieces.data(), *end = begin; begin < last; begin = end) {
      for (end = begin + 1; end < last && end->segment.start > 0;) ++end;
      const int64_t length = (end - 1)->segment.stop;
      tokens += length;
      if (is_shared(begin, end)) {
        shared.push_back({begin, end});
      } else {
        Kernels& rank = whole_[begin->rank()];
        rank.calls = 1;
        rank.counts += costs.forward.count(0, length);
      }
    }
    prefetch_ = costs.prefetch * static_cast<double>(tokens / static_cast<int64_t>(cp_size));
    std::sort(shared.begin(), shared.end(), [](const auto& a, const auto& b) {
      return a.first->segment.document < b.first->segment.document;
    });
    for (const auto& [begin, end] : shared) add(begin, end);
    for (const Load& load : shared_) moved_ = std::max({moved_, load.in, load.out});
    moved_ = moved.value_or(moved_);
  }

  AttentionTimes play(const std::vector<double>& key_bounds) const {
    std::vector<Kernels> own = whole_;
    std::vector<Timed> rounds;
    if (key_bounds.empty()) {
      rounds.push_back(together());
    } else {
      add_own(own);
      for (size_t i = 1; i < key_bounds.size(); ++i) rounds.push_back(part(key_bounds[i - 1], key_bounds[i]));
    }
    AttentionTimes times{Times(cp_size_), Times(cp_size_), 0, 0};
    for (size_t r = 0; r < cp_size_; ++r) {
      times.forward[r] = costs_.forward.time(own[r].calls, own[r].counts);
      times.backward[r] = costs_.backward.time(own[r].calls, own[r].counts);
    }
    times.forward_end = run_forward(times.forward, rounds);
    times.backward_end = run_backward(times.backward, rounds);
    for (size_t r = 0; r < cp_size_; ++r) {
      double forward = 0, backward = 0;
      for (const Timed& round : rounds) forward += round.forward[r], backward += round.backward[r];
      times.forward[r] += forward;
      times.backward[r] += backward;
    }
    return times;
  }

  // Of a tie the first wins.
  Rounds choose() const {
    const auto time = [&](const std::vector<double>& key_bounds) {
      const AttentionTimes times = play(key_bounds);
      return times.forward_end + times.backward_end;
    };
    Rounds best{time({}), {}};
    if (rows_.empty()) return best;
    for (const std::vector<double>& key_bounds : costs_.key_bounds)
      if (const double now = time(key_bounds); now < best.time) best = {now, key_bounds};
    return best;
  }

 private:
  // A document on several ranks; documents come in the order of calls.
  void add(const Piece* begin, const Piece* end) {
    std::vector<int64_t> held(cp_size_);
    for (const Piece* piece = begin; piece < end; ++piece) {
      shared_[piece->rank()].add(*piece, costs_.forward.count(piece->segment.start, piece->segment.stop));
      shared_[piece->rank()].hide(*piece, costs_.forward);
      int64_t& before = held[piece->rank()];
      const int64_t rows = piece->segment.stop - piece->segment.start;
      rows_.push_back({piece->call, rows, piece->segment.start - before, before});
      before += rows;
    }
    add_moved(begin, end, shared_);
  }

  // Of documents in shares, every piece with its own keys.
  void add_own(std::vector<Kernels>& own) const {
    std::vector<char> is_here(cp_size_);
    for (const Row& row : rows_) {
      Kernels& rank = own[row.call / 2];
      rank.calls += !std::exchange(is_here[row.call / 2], 1);
      rank.counts += costs_.forward.count(0, row.rows);
    }
  }

  // The documents on several ranks, with all their keys.
  Timed together() const {
    std::vector<Kernels> kernels;
    for (const Load& load : shared_) kernels.push_back({load.calls(), load.at_once()});
    return timed(kernels, 1, 0);
  }

  // Of documents in shares, the share [low, high) of the keys of other ranks; with the first, each tail also sees what
  // its rank holds before it. Rows without keys interrupt a call.
  Timed part(double low, double high) const {
    std::vector<Kernels> kernels(cp_size_);
    std::vector<char> is_open(2 * cp_size_);
    for (const Row& row : rows_) {
      const auto visible = static_cast<int64_t>(static_cast<double>(row.others) * (high - low)) +
                           (low == 0 ? row.before : 0);
      Kernels& rank = kernels[row.call / 2];
      rank.calls += !std::exchange(is_open[row.call], visible > 0) && visible > 0;
      if (visible > 0) rank.counts += {tiles(row.rows) * tiles(visible), tiles(row.rows)};
    }
    return timed(kernels, high - low, costs_.merge);
  }

  int64_t tiles(int64_t rows) const { return (rows + costs_.forward.tile_rows - 1) >> costs_.forward.tile_bits; }

  // `share`: of the rows that travel; `merge`: time to add a query tile to what other rounds have.
  Timed timed(const std::vector<Kernels>& kernels, double share, double merge) const {
    const double rows = share * static_cast<double>(moved_);
    const auto time = [&](double each) { return rows > 0 ? costs_.latency + rows * each : 0; };
    Timed timed{Times(cp_size_), Times(cp_size_), time(costs_.arrive), time(costs_.leave)};
    for (size_t r = 0; r < cp_size_; ++r) {
      const auto& [calls, counts] = kernels[r];
      const double merging =
          static_cast<double>(costs_.forward.heads) * (merge * static_cast<double>(counts.query_tiles));
      timed.forward[r] = costs_.forward.time(calls, counts) + merging;
      timed.backward[r] = costs_.backward.time(calls, counts) + merging;
    }
    return timed;
  }

  // `round_times` of tests/reference/rounds.py.
  static double run_forward(Times free, const std::vector<Timed>& rounds) {
    double here = 0;
    for (size_t i = 0; i < rounds.size(); ++i) {
      here += rounds[i].arrive;
      double all_began = here;
      for (size_t r = 0; r < free.size(); ++r) {
        const double begin = std::max(free[r], here);
        all_began = std::max(all_began, begin);
        free[r] = begin + rounds[i].forward[r];
      }
      here = all_began;
    }
    return *std::max_element(free.begin(), free.end());
  }

  double run_backward(const Times& own, const std::vector<Timed>& rounds) const {
    const auto again = [&](size_t i) { return i == rounds.size() ? 0 : rounds[i].arrive; };
    Times free(own.size());
    double here = std::max(again(0) - prefetch_, 0.0), channel = here, last = 0;
    for (size_t i = 0; i < rounds.size(); ++i) {
      double all_began = 0, all_free = 0;
      for (size_t r = 0; r < free.size(); ++r) {
        const double begin = std::max(free[r], here);
        all_began = std::max(all_began, begin);
        free[r] = std::max(begin + rounds[i].backward[r], rounds[i].leave > 0 ? last : 0);
        all_free = std::max(all_free, free[r]);
      }
      if (again(i + 1) > 0) here = channel = std::max(channel, all_began) + again(i + 1);
      last = channel = std::max(channel, all_free) + rounds[i].leave;
    }
    double end = channel;
    for (size_t r = 0; r < free.size(); ++r) end = std::max(end, free[r] + own[r]);
    return end;
  }

  const RoundCosts& costs_;
  size_t cp_size_;
  double prefetch_ = 0;
  int64_t moved_ = 0;           // rows of K and V through the busiest rank
  std::vector<Kernels> whole_;  // of documents that are whole on a rank
  std::vector<Load> shared_;    // of the others
  std::vector<Row> rows_;       // of the others, in the order of calls
};

}  // namespace

void check(const RoundCosts& costs) {
  if (costs.forward.tile_rows != costs.backward.tile_rows)
    throw std::invalid_argument("forward and backward have tiles of different sizes");
  for (const std::vector<double>& key_bounds : costs.key_bounds)
    if (key_bounds.size() < 2 || std::any_of(key_bounds.begin(), key_bounds.end(), [](double s) { return !(0 <= s && s <= 1); }))
      throw std::invalid_argument("key bounds must be two or more from 0 to 1");
}

Rounds in_rounds(const std::vector<Piece>& pieces, size_t cp_size, const RoundCosts& costs) {
  return Player(pieces, cp_size, costs).choose();
}

AttentionTimes attention_times(const std::vector<Piece>& pieces, size_t cp_size, const std::vector<double>& key_bounds,
                               const RoundCosts& costs, std::optional<int64_t> moved) {
  check(costs);
  return Player(pieces, cp_size, costs, moved).play(key_bounds);
}

}  // namespace wlb
