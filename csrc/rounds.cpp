#include "rounds.h"

#include <algorithm>
#include <stdexcept>

#include "document.h"

namespace wlb {
namespace {

using Times = std::vector<double>;  // of every rank
constexpr std::pair<double, double> kOwn{0, 0};

struct Shared {
  int64_t rank;  // tiles, or the set if that is given
  size_t document;
  const Piece *begin, *end;
};

// A round: shared documents [first, stop), those of low rank first.
struct Way {
  size_t first, stop;
  std::optional<std::pair<int64_t, int64_t>> heads = {};
  std::optional<std::pair<double, double>> keys = {};
};

// A piece of a document in parts: its rows, the keys that it sees of other ranks, and those before it of its own.
struct Row {
  size_t call;
  int64_t rows, others, before;
};

// What a round with an exchange takes.
struct Timed {
  Times forward, backward;
  double arrive, leave;
};

class Chooser {
 public:
  // With `sets` of documents, all documents count as shared.
  Chooser(const std::vector<Piece>& pieces, size_t cp_size, const RoundCosts& costs,
          const std::vector<int64_t>* sets = nullptr)
      : costs_(costs), cp_size_(cp_size), whole_(cp_size) {
    const Piece* const last = pieces.data() + pieces.size();
    int64_t rows = 0;
    for (const Piece& piece : pieces) rows += piece.segment.stop - piece.segment.start;
    ahead_ = costs.ahead * static_cast<double>(rows / static_cast<int64_t>(cp_size));
    for (const Piece *begin = pieces.data(), *end = begin; begin < last; begin = end) {
      for (end = begin + 1; end < last && end->segment.start > 0;) ++end;
      const auto document = static_cast<size_t>(begin->segment.document);
      if (sets) {
        shared_.push_back({(*sets)[document], document, begin, end});
      } else if (is_shared(begin, end)) {
        int64_t tiles = 0;
        for (const Piece* piece = begin; piece < end; ++piece) tiles += count(*piece).tiles;
        shared_.push_back({tiles, document, begin, end});
      } else {
        Load& rank = whole_[begin->rank()];
        rank.heads = 1;
        rank.counts += costs.forward.count(0, (end - 1)->segment.stop);
      }
    }
    std::sort(shared_.begin(), shared_.end(), [](const Shared& a, const Shared& b) {
      return a.rank < b.rank || (a.rank == b.rank && a.document < b.document);
    });
  }

  // What given rounds take.
  AttentionTimes play(const std::vector<Round>& given) {
    std::vector<Load> own(cp_size_);
    std::vector<Timed> rounds;
    for (const Round& round : given) {
      const auto in_set = [&](const Shared& document) { return document.rank == round.document_set; };
      const auto begin = std::find_if(shared_.begin(), shared_.end(), in_set);
      const auto end = std::find_if_not(begin, shared_.end(), in_set);
      const Way way{static_cast<size_t>(begin - shared_.begin()), static_cast<size_t>(end - shared_.begin()),
                    round.heads, round.keys};
      if (way.keys) find_rows(way.first, way.stop);
      if (way.keys == kOwn) {
        add_own(own);
      } else if (std::any_of(begin, end, [](const Shared& each) { return is_shared(each.begin, each.end); })) {
        rounds.push_back(timed(way));
      } else {
        const std::vector<Load> loads = between(way.first, way.stop);
        for (size_t r = 0; r < cp_size_; ++r) {
          own[r].heads += loads[r].calls();
          own[r].counts += loads[r].counts;
        }
      }
    }
    Timed whole = without_exchange(own);
    AttentionTimes times{{}, {}, run_forward(whole.forward, rounds), run_backward(whole.backward, rounds)};
    for (size_t r = 0; r < cp_size_; ++r) {
      double forward = 0, backward = 0;
      for (const Timed& round : rounds) forward += round.forward[r], backward += round.backward[r];
      times.forward.push_back(whole.forward[r] + forward);
      times.backward.push_back(whole.backward[r] + backward);
    }
    return times;
  }

  // Ways are tried in the order of the reference; of a tie the first wins.
  Rounds choose(size_t num_documents) {
    if (shared_.empty()) {
      attempt({});
    } else {
      try_sets();
      try_heads();
      try_parts();
    }
    Rounds chosen{best_time_, std::vector<int64_t>(num_documents), {}};
    if (shared_.size() < num_documents) chosen.rounds.push_back({0});
    std::vector<std::pair<size_t, size_t>> numbered;
    for (const Way& way : best_) {
      const std::pair bounds{way.first, way.stop};
      const auto found = std::find(numbered.begin(), numbered.end(), bounds);
      const int64_t number = 1 + (found - numbered.begin());
      if (found == numbered.end()) numbered.push_back(bounds);
      for (size_t i = way.first; i < way.stop; ++i) chosen.sets[shared_[i].document] = number;
      chosen.rounds.push_back({number, way.heads, way.keys});
    }
    return chosen;
  }

 private:
  static bool is_shared(const Piece* begin, const Piece* end) {
    return std::any_of(begin, end, [&](const Piece& piece) { return piece.rank() != begin->rank(); });
  }

  Counts count(const Piece& piece) const { return costs_.forward.count(piece.segment.start, piece.segment.stop); }

  void try_sets() {
    const size_t n = shared_.size();
    for (int64_t before : costs_.edges)
      for (int64_t after : costs_.edges) {
        const size_t first = static_cast<size_t>(before), rest = static_cast<size_t>(after);
        if (first + rest >= n && first + rest > 0) continue;
        std::vector<Way> ways;
        for (const Way& way : {Way{0, first}, Way{first, n - rest}, Way{n - rest, n}})
          if (way.first < way.stop) ways.push_back(way);
        attempt(ways);
      }
  }

  void try_heads() {
    const int64_t all = costs_.num_heads;
    for (int64_t some : {int64_t{1}, all / 2})
      for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0, some, all}, {0, some, all - some, all}}) {
        std::vector<Way> ways;
        for (size_t i = 1; i < bounds.size(); ++i)
          ways.push_back({0, shared_.size(), std::pair{bounds[i - 1], bounds[i]}});
        if (std::all_of(ways.begin(), ways.end(), [](const Way& way) { return way.heads->first < way.heads->second; }))
          attempt(ways);
      }
  }

  void try_parts() {
    const size_t n = shared_.size();
    for (size_t first = n - 1;; first = 0) {
      find_rows(first, n);
      for (const std::vector<double>& shares : costs_.shares) {
        std::vector<Way> ways{{first, n, {}, kOwn}};
        if (first > 0) ways.push_back({0, first});
        for (size_t i = 1; i < shares.size(); ++i) ways.push_back({first, n, {}, std::pair{shares[i - 1], shares[i]}});
        attempt(ways);
      }
      if (first == 0) break;
    }
  }

  // Rows of documents in parts, in the order of calls.
  void find_rows(size_t first, size_t stop) {
    rows_.clear();
    std::vector<Shared> parted(shared_.begin() + static_cast<std::ptrdiff_t>(first),
                               shared_.begin() + static_cast<std::ptrdiff_t>(stop));
    std::sort(parted.begin(), parted.end(), [](const Shared& a, const Shared& b) { return a.document < b.document; });
    std::vector<int64_t> held(cp_size_);
    for (const Shared& document : parted) {
      for (const Piece* piece = document.begin; piece < document.end; ++piece) {
        int64_t& before = held[piece->rank()];
        const int64_t rows = piece->segment.stop - piece->segment.start;
        rows_.push_back({piece->call, rows, piece->segment.start - before, before});
        before += rows;
      }
      for (const Piece* piece = document.begin; piece < document.end; ++piece) held[piece->rank()] = 0;
    }
  }

  void attempt(const std::vector<Way>& ways) {
    std::vector<Load> own = whole_;
    std::vector<Timed> rounds;
    for (const Way& way : ways) {
      if (way.keys == kOwn)
        add_own(own);
      else
        rounds.push_back(timed(way));
    }
    Timed whole = without_exchange(own);
    const double time = run_forward(std::move(whole.forward), rounds) + run_backward(whole.backward, rounds);
    if (best_.empty() || time < best_time_) best_time_ = time, best_ = ways;
  }

  // Kernels of what runs without an exchange; `heads` are calls here.
  Timed without_exchange(const std::vector<Load>& own) const {
    Timed timed{Times(cp_size_), Times(cp_size_), 0, 0};
    for (size_t r = 0; r < cp_size_; ++r) {
      timed.forward[r] = costs_.forward.time(own[r].heads, own[r].counts);
      timed.backward[r] = costs_.backward.time(own[r].heads, own[r].counts);
    }
    return timed;
  }

  // What those documents ask of the ranks.
  std::vector<Load> between(size_t first, size_t stop) const {
    std::vector<Load> loads(cp_size_);
    for (size_t i = first; i < stop; ++i) {
      for (const Piece* piece = shared_[i].begin; piece < shared_[i].end; ++piece)
        loads[piece->rank()].add(*piece, count(*piece));
      add_moved(shared_[i].begin, shared_[i].end, loads);
    }
    return loads;
  }

  // Of documents in parts, the share [low, high) of the keys of other ranks; with the first, each tail also sees what
  // its rank holds before it. Rows without keys interrupt a call; `heads` are calls here.
  std::vector<Load> in_parts(double low, double high) const {
    std::vector<Load> loads(cp_size_);
    std::vector<char> is_open(2 * cp_size_);
    for (const Row& row : rows_) {
      const auto visible = static_cast<int64_t>(static_cast<double>(row.others) * (high - low)) +
                           (low == 0 ? row.before : 0);
      Load& rank = loads[row.call / 2];
      rank.heads += !std::exchange(is_open[row.call], visible > 0) && visible > 0;
      if (visible > 0) rank.counts += {tiles(row.rows) * tiles(visible), tiles(row.rows)};
    }
    return loads;
  }

  int64_t tiles(int64_t rows) const { return (rows + costs_.forward.tile_rows - 1) >> costs_.forward.tile_bits; }

  // Of documents in parts, every piece with its own keys.
  void add_own(std::vector<Load>& own) const {
    std::vector<char> is_here(cp_size_);
    for (const Row& row : rows_) {
      Load& rank = own[row.call / 2];
      rank.heads += !std::exchange(is_here[row.call / 2], 1);
      rank.counts += costs_.forward.count(0, row.rows);
    }
  }

  Timed timed(const Way& way) const {
    const std::vector<Load> moved = between(way.first, way.stop);
    const std::vector<Load> loads = way.keys ? in_parts(way.keys->first, way.keys->second) : moved;
    const double heads = way.heads ? static_cast<double>(way.heads->second - way.heads->first) /
                                         static_cast<double>(costs_.num_heads)
                                   : 1;
    int64_t most = 0;
    for (const Load& load : moved) most = std::max({most, load.in, load.out});
    const double rows = (way.keys ? way.keys->second - way.keys->first : heads) * static_cast<double>(most);
    const auto time = [&](double each) { return rows > 0 ? costs_.latency + rows * each : 0; };
    Timed timed{Times(cp_size_), Times(cp_size_), time(costs_.arrive), time(costs_.leave)};
    for (size_t r = 0; r < cp_size_; ++r) {
      const int64_t calls = way.keys ? loads[r].heads : loads[r].calls();
      const double tiles = heads * static_cast<double>(loads[r].counts.tiles);
      const double query_tiles = heads * static_cast<double>(loads[r].counts.query_tiles);
      const double merging =
          way.keys ? static_cast<double>(costs_.forward.heads) * (costs_.merge * query_tiles) : 0.0;
      timed.forward[r] = costs_.forward.time(calls, tiles, query_tiles) + merging;
      timed.backward[r] = costs_.backward.time(calls, tiles, query_tiles) + merging;
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
    const auto again = [&](size_t i) { return costs_.kept || i == rounds.size() ? 0 : rounds[i].arrive; };
    Times free(own.size());
    double here = std::max(again(0) - ahead_, 0.0), channel = here, last = 0;
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
  double ahead_;
  std::vector<Row> rows_;       // of documents in parts
  std::vector<Load> whole_;     // `heads` are calls here
  std::vector<Shared> shared_;  // of low rank first
  std::vector<Way> best_;
  double best_time_ = 0;
};

}  // namespace

void check(const RoundCosts& costs) {
  if (costs.forward.tile_rows != costs.backward.tile_rows)
    throw std::invalid_argument("forward and backward have tiles of different sizes");
  check_range("num_heads", costs.num_heads, 1, 1 << 16);
  for (int64_t edge : costs.edges) check_range("an edge", edge, 0, 64);
  if (costs.edges.empty() || costs.edges[0]) throw std::invalid_argument("edges must begin with 0");
  for (const std::vector<double>& shares : costs.shares)
    if (shares.size() < 2 || std::any_of(shares.begin(), shares.end(), [](double s) { return !(0 <= s && s <= 1); }))
      throw std::invalid_argument("shares must be two or more from 0 to 1");
}

Rounds in_rounds(const std::vector<Piece>& pieces, size_t num_documents, size_t cp_size, const RoundCosts& costs) {
  return Chooser(pieces, cp_size, costs).choose(num_documents);
}

AttentionTimes attention_times(const std::vector<Piece>& pieces, const std::vector<int64_t>& sets, size_t cp_size,
                               const std::vector<Round>& rounds, const RoundCosts& costs) {
  check(costs);
  return Chooser(pieces, cp_size, costs, &sets).play(rounds);
}

}  // namespace wlb
