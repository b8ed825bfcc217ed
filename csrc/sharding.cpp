#include "sharding.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "document.h"

namespace wlb {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

// A sharding in the making, and what the kernel model asks of it. Pieces of a document come one after the other.
class Draft {
 public:
  const std::string strategy;

  Draft(const std::string& name, const Kernel& kernel, size_t cp_size, size_t documents)
      : strategy(name), kernel_(kernel), ranks_(cp_size) {
    pieces_.reserve(2 * documents);
  }

  void add(size_t call, const Segment& segment) {
    if (segment.start == 0) end_document();
    pieces_.push_back({call, segment});
    ranks_[call / 2].add(pieces_.back(), kernel_.count(segment.start, segment.stop));
  }

  // To rank c, as its head, or 2 * cp_size - 1 - c, as its tail.
  void add_chunk(int64_t chunk, const Segment& segment) {
    const auto c = static_cast<size_t>(chunk);
    add(c < ranks_.size() ? 2 * c : 2 * (2 * ranks_.size() - 1 - c) + 1, segment);
  }

  // When all documents are added.
  void finish() {
    end_document();
    for (const Load& rank : ranks_) slowest_ = std::max(slowest_, kernel_.time(rank.calls() * launches(), rank.counts));
  }

  // Predicted, of the slowest rank, with the exchange at a price of a moved row.
  double time(double exchange) const { return slowest_ + exchange * static_cast<double>(moved_); }

  double work(size_t rank) const { return kernel_.time(0, ranks_[rank].counts); }

  // Rows of K and V through the busiest rank; of the document that was added last, nothing yet.
  int64_t moved() const { return moved_; }

  // What the slowest rank takes at least, with counts that are left, of whole documents: the mean, less what rounding
  // may do. Documents in pieces have more tiles, and every rank will have a call.
  double least(Counts left) const {
    int64_t calls = 0;
    for (const Load& rank : ranks_) {
      calls += std::max<int64_t>(1, rank.calls());
      left += rank.counts;
    }
    return kernel_.time(calls * launches(), left) / static_cast<double>(ranks_.size()) * (1 - 1e-9);
  }

  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  int64_t launches() const { return moved_ > 0 ? kernel_.parts : 1; }  // of a call

  void end_document() {
    if (pieces_.size() - ended_ > 1) {
      const Piece *begin = pieces_.data() + ended_, *end = pieces_.data() + pieces_.size();
      add_moved(begin, end, ranks_);
      for (; begin < end; ++begin) moved_ = std::max({moved_, ranks_[begin->rank()].in, ranks_[begin->rank()].out});
    }
    ended_ = pieces_.size();
  }

  const Kernel& kernel_;
  std::vector<Load> ranks_;
  std::vector<Piece> pieces_;
  size_t ended_ = 0;  // pieces of documents before the last
  int64_t moved_ = 0;
  double slowest_ = 0;
};

using Finished = std::shared_ptr<const Draft>;

// Between drafts, for the least time at every price of a moved row.
class Race {
 public:
  explicit Race(const std::vector<double>& exchanges) : exchanges_(exchanges), best_(exchanges.size()) {}

  // Whether a draft with so much work of a rank and so many moved rows is slower than the best, at all prices.
  bool is_lost(double work, int64_t moved) const {
    const auto rows = static_cast<double>(moved);
    for (size_t i = 0; i < best_.size(); ++i)
      if (!best_[i] || !(work + exchanges_[i] * rows > best_[i]->time(exchanges_[i]))) return false;
    return true;
  }

  // The first one wins a tie.
  void enter(const Finished& draft) {
    for (size_t i = 0; i < best_.size(); ++i)
      if (!best_[i] || draft->time(exchanges_[i]) < best_[i]->time(exchanges_[i])) best_[i] = draft;
  }

  // The winners, a draft that wins at neighbouring prices once.
  std::vector<Finished> winners() const {
    std::vector<Finished> each = best_;
    each.erase(std::unique(each.begin(), each.end()), each.end());
    return each;
  }

 private:
  const std::vector<double>& exchanges_;
  std::vector<Finished> best_;
};

// What the ranks hold so far, and which of them the next document goes to: those first that would end with least work
// if what is left to place fills their room (with most, if sign is -1).
class Ranks {
 public:
  double per_token = 0, sign = 1;  // mean work of a token that is left
  double most_work = 0;

  Ranks(Draft& draft, int64_t cp_size, int64_t tokens, int64_t tile_rows)
      : draft_(draft),
        size_(static_cast<size_t>(cp_size)),
        tile_(tile_rows),
        room_((size_ + 3) / 4 * 4, -1),
        work_(room_.size()),
        ends_(room_.size()) {
    std::fill(room_.begin(), room_.begin() + cp_size, static_cast<double>(tokens));
  }

  // Whole on one rank, or cut where none has the room.
  void fill(int64_t document, int64_t length) {
    size_t rank = first_with_room(length);
    for (int64_t start = 0; start < length; rank = size_) {
      if (rank == size_) rank = first_with_room(1);
      const Segment segment{document, start, std::min(length, start + room(rank))};
      put(rank, 2 * rank, segment);
      start = segment.stop;
    }
  }

  // As heads and tails on `share` ranks, or on more where too few have the room.
  void spread(int64_t document, int64_t length, int64_t share) {
    const auto cp_size = static_cast<int64_t>(size_);
    while (!choose(share < cp_size ? (length + share - 1) / share : 0, share)) share = std::min(2 * share, cp_size);
    // Whole tiles as evenly as they go, the first ranks having more; but so that the rest fits the ranks after.
    int64_t left = length, room_after = 0, start = 0;
    for (size_t rank : chosen_) room_after += room(rank);
    heads_.clear();
    sizes_.clear();
    for (size_t rank : chosen_) {
      room_after -= room(rank);
      const int64_t even = (left + share * tile_ - 1) / (share * tile_) * tile_;
      sizes_.push_back(std::min(room(rank), std::max(std::min(even, left), left - room_after)));
      heads_.push_back(sizes_.back() / 2 / tile_ * tile_);
      left -= sizes_.back();
      --share;
    }
    const auto next = [&](size_t i, int64_t rows, bool is_tail) {
      if (rows > 0) put(chosen_[i], 2 * chosen_[i] + is_tail, {document, start, start + rows});
      start += rows;
    };
    for (size_t i = 0; i < chosen_.size(); ++i) next(i, heads_[i], false);
    for (size_t i = chosen_.size(); i-- > 0;) next(i, sizes_[i] - heads_[i], heads_[i] > 0);
  }

 private:
  int64_t room(size_t rank) const { return static_cast<int64_t>(room_[rank]); }

  // Returns the least of ends_, which are kNone for ranks without room for so many tokens.
  double find_ends(int64_t least) {
    const double s = sign, each = per_token, tokens = static_cast<double>(least);  // which no store to ends_ changes
    double lanes[] = {kNone, kNone, kNone, kNone};
    for (size_t r = 0; r < ends_.size(); r += 4)
      for (size_t lane = 0; lane < 4; ++lane) {
        const double room = room_[r + lane], end = s * (work_[r + lane] + each * room);
        ends_[r + lane] = room >= tokens ? end : kNone;
        lanes[lane] = std::min(lanes[lane], ends_[r + lane]);
      }
    return *std::min_element(lanes, lanes + 4);
  }

  // The number of ranks if none has room for so many tokens.
  size_t first_with_room(int64_t least) {
    const double best = find_ends(least);
    return best == kNone ? size_ : static_cast<size_t>(std::find(ends_.begin(), ends_.end(), best) - ends_.begin());
  }

  // So many ranks with room for so many tokens each; false if there are fewer.
  bool choose(int64_t least, int64_t count) {
    find_ends(least);
    chosen_.clear();
    for (size_t r = 0; r < size_; ++r)
      if (ends_[r] != kNone) chosen_.push_back(r);
    if (chosen_.size() < static_cast<size_t>(count)) return false;
    std::partial_sort(chosen_.begin(), chosen_.begin() + count, chosen_.end(),
                      [&](size_t a, size_t b) { return ends_[a] < ends_[b] || (ends_[a] == ends_[b] && a < b); });
    chosen_.resize(static_cast<size_t>(count));
    return true;
  }

  void put(size_t rank, size_t call, const Segment& segment) {
    draft_.add(call, segment);
    work_[rank] = draft_.work(rank);
    most_work = std::max(most_work, work_[rank]);
    room_[rank] -= static_cast<double>(segment.stop - segment.start);
  }

  Draft& draft_;
  size_t size_;
  int64_t tile_;
  // In doubles, which hold tokens exactly, for loops that compilers make vectors of; padded with ranks without room.
  std::vector<double> room_, work_, ends_;
  std::vector<size_t> chosen_;
  std::vector<int64_t> sizes_, heads_;
};

class Sharder {
 public:
  Sharder(const std::vector<int64_t>& lengths, int64_t cp_size, const Kernel& kernel)
      : lengths_(lengths),
        cp_size_(cp_size),
        chunks_(2 * cp_size),
        kernel_(kernel),
        share_(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) / cp_size),
        longest_first_(lengths.size()) {
    const std::vector<size_t> order = longest_first(lengths);
    Counts left;
    int64_t tokens_left = 0;
    for (size_t i = order.size(); i-- > 0;) {
      Next& next = longest_first_[i];
      next.document = static_cast<int64_t>(order[i]);
      next.length = lengths[order[i]];
      const Counts whole = kernel.count(0, next.length);
      left += whole;
      tokens_left += next.length;
      next.left = left;
      next.work = kernel.time(0, whole);
      next.per_token = kernel.time(0, left) / static_cast<double>(tokens_left);
    }
    work_ = kernel.time(0, left);
  }

  // The longest in the middle, of the first `count` documents; the others stay where they are.
  std::vector<int64_t> mirrored_order(int64_t count) const {
    std::vector<int64_t> order(lengths_.size());
    std::iota(order.begin(), order.end(), int64_t{0});
    int64_t k = 0;
    const int64_t half = count / 2;
    for (const Next& next : longest_first_)
      if (next.document < count) {
        order[static_cast<size_t>(k % 2 ? half - 1 - k / 2 : half + k / 2)] = next.document;
        ++k;
      }
    return order;
  }

  void whole(Draft& draft) const {
    for (size_t d = 0; d < lengths_.size(); ++d) draft.add(0, {static_cast<int64_t>(d), 0, lengths_[d]});
  }

  // With documents in the order given.
  void per_sequence(const std::vector<int64_t>& order, Draft& draft) const {
    const int64_t chunk = share_ / 2;
    int64_t begin = 0, c = 0;
    for (size_t d = 0; d < order.size(); ++d) {
      const int64_t end = begin + lengths_[static_cast<size_t>(order[d])];
      for (int64_t at = begin; at < end;) {
        const int64_t stop = std::min(end, (c + 1) * chunk);
        draft.add_chunk(c, {static_cast<int64_t>(d), at - begin, stop - begin});
        at = stop;
        c += stop == (c + 1) * chunk;
      }
      begin = end;
    }
  }

  void per_document(Draft& draft) const {
    int64_t pointer = 0;
    for (size_t d = 0; d < lengths_.size(); ++d) {
      const int64_t base = lengths_[d] / chunks_, remainder = lengths_[d] % chunks_;
      int64_t start = 0;
      for (int64_t c = 0; c < chunks_; ++c) {
        const int64_t turn = c >= pointer ? c - pointer : c - pointer + chunks_;
        const int64_t stop = start + base + (turn < remainder);
        if (stop > start) draft.add_chunk(c, {static_cast<int64_t>(d), start, stop});
        start = stop;
      }
      pointer = (pointer + remainder) % chunks_;
    }
  }

  // On how many ranks the longest documents are to be, up to the first one that needs one only.
  std::vector<int64_t> shares(double most_share) const {
    const double most_work = most_share * work_;
    std::vector<int64_t> shares;
    for (const Next& next : longest_first_) {
      int64_t share = 1;
      while (share < cp_size_ && next.work * static_cast<double>(cp_size_) > most_work * static_cast<double>(share))
        share = std::min(2 * share, cp_size_);
      if (share == 1) break;
      shares.push_back(share);
    }
    return shares;
  }

  // False, at any point, where it is clear that this cannot win the race.
  bool hybrid(const std::vector<int64_t>& shares, const Race& race, Draft& draft) const {
    Ranks ranks(draft, cp_size_, share_, kernel_.tile_rows);
    for (size_t i = 0; i < longest_first_.size(); ++i) {
      const Next& next = longest_first_[i];
      ranks.per_token = next.per_token;
      ranks.sign = next.work < next.per_token * static_cast<double>(next.length) ? -1 : 1;
      if (i < shares.size()) {
        ranks.spread(next.document, next.length, shares[i]);
      } else {
        if (i == shares.size() && race.is_lost(draft.least(next.left), draft.moved())) return false;
        ranks.fill(next.document, next.length);
      }
      if (race.is_lost(ranks.most_work, draft.moved())) return false;
    }
    return true;
  }

 private:
  struct Next {
    int64_t document, length;
    Counts left;             // of this document and those after it, whole
    double work, per_token;  // of the document, whole; mean of what is left
  };

  const std::vector<int64_t>& lengths_;
  int64_t cp_size_, chunks_;
  const Kernel& kernel_;
  int64_t share_;
  std::vector<Next> longest_first_;
  double work_ = 0;  // of all documents
};

void check(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice) {
  const int64_t tile_rows = choice.kernel.tile_rows;
  check_range("cp_size", cp_size, 1, 1 << 16);
  check_range("tile_rows", tile_rows, 1, 1 << 16);
  if (tile_rows & (tile_rows - 1))
    throw std::invalid_argument("tile_rows is " + std::to_string(tile_rows) + "; it must be a power of two");
  int64_t tokens = 0;
  for (int64_t length : lengths) {
    check_range("a document's length", length, 1, kMaxTokens);
    tokens = std::min(tokens + length, kMaxTokens + 1);
  }
  check_range("the micro-batch", tokens, 1, kMaxTokens);
  if (cp_size > 1 && tokens % (2 * cp_size))
    throw std::invalid_argument("the micro-batch has " + std::to_string(tokens) + " tokens; it must be a multiple of " +
                                std::to_string(2 * cp_size));
  check_range("num_mirrored", choice.num_mirrored, 0, cp_size > 1 ? static_cast<int64_t>(lengths.size()) : 0);
  if (choice.exchanges.empty() || (choice.exchanges.size() > 1 && !choice.staging))
    throw std::invalid_argument("there are " + std::to_string(choice.exchanges.size()) +
                                " prices of a moved row; give one, or several with stages");
  if (!choice.staging) return;
  check(*choice.staging);
  if (choice.staging->forward.tile_rows != tile_rows)
    throw std::invalid_argument("stages have tiles of another size");
}

// The fastest sharding at every price, and last per-sequence in mirrored order, if that is asked for.
std::vector<Finished> fastest(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice,
                              const Sharder& sharder) {
  Race race(choice.exchanges);
  // `make` fills a draft, or returns false if it cannot win.
  const auto draft = [&](const std::string& strategy, auto&& make) -> Finished {
    const auto made = std::make_shared<Draft>(strategy, choice.kernel, static_cast<size_t>(cp_size), lengths.size());
    if (!make(*made)) return nullptr;
    made->finish();
    return made;
  };
  const auto enter = [&](const std::string& strategy, auto&& make) {
    if (const Finished made = draft(strategy, make)) race.enter(made);
  };
  const auto per_sequence = [&](int64_t num_mirrored) {
    return [&sharder, order = sharder.mirrored_order(num_mirrored)](Draft& made) {
      return sharder.per_sequence(order, made), true;
    };
  };
  std::set<std::vector<int64_t>> tried;
  if (cp_size == 1) enter("whole", [&](Draft& made) { return sharder.whole(made), true; });
  for (const std::string& strategy : choice.strategies) {
    if (cp_size == 1) break;
    if (strategy == "hybrid")
      for (double most_share : choice.most_shares) {
        const std::vector<int64_t> shares = sharder.shares(most_share);
        if (tried.insert(shares).second)
          enter(strategy, [&](Draft& made) { return sharder.hybrid(shares, race, made); });
      }
    else if (strategy == "per-sequence")
      enter(strategy, per_sequence(0));
    else if (strategy == "per-document")
      enter(strategy, [&](Draft& made) { return sharder.per_document(made), true; });
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  std::vector<Finished> drafts = race.winners();
  if (!drafts[0]) throw std::invalid_argument("nothing is tried; give a strategy, and shares if that is hybrid");
  if (choice.num_mirrored > 0) drafts.push_back(draft("per-sequence", per_sequence(choice.num_mirrored)));
  return drafts;
}

// The calls of every rank: heads and tails; with sets first whole documents, then heads and tails of every set.
void arrange(const std::vector<Piece>& pieces, const std::vector<int64_t>& sets, size_t cp_size, Sharding& plan) {
  const bool staged = !sets.empty();
  const size_t num_calls = staged ? 1 + 2 * static_cast<size_t>(*std::max_element(sets.begin(), sets.end()))
                                  : std::min<size_t>(cp_size, 2);
  for (size_t i = 0; i < num_calls; ++i) plan.call_sets.push_back(staged ? (static_cast<int64_t>(i) + 1) / 2 : 0);
  std::vector<size_t> first(plan.order.size());  // piece of each document
  for (size_t i = 0; i < pieces.size(); ++i)
    if (pieces[i].segment.start == 0) first[static_cast<size_t>(pieces[i].segment.document)] = i;
  const auto each = [&](auto&& take) {
    for (size_t d = 0; d < first.size(); ++d) {
      const size_t set = staged ? static_cast<size_t>(sets[d]) : 1;
      size_t i = first[d], stop = i + 1;
      while (stop < pieces.size() && pieces[stop].segment.start > 0) ++stop;
      if (set == 0)
        take(pieces[i].rank() * num_calls, Segment{static_cast<int64_t>(d), 0, pieces[stop - 1].segment.stop});
      else
        for (; i < stop; ++i)
          take(pieces[i].rank() * num_calls + (staged ? 2 * set - 1 : 0) + pieces[i].is_tail(), pieces[i].segment);
    }
  };
  plan.bounds.assign(cp_size * num_calls + 1, 0);
  each([&](size_t call, const Segment&) { ++plan.bounds[call + 1]; });
  std::partial_sum(plan.bounds.begin(), plan.bounds.end(), plan.bounds.begin());
  plan.segments.resize(static_cast<size_t>(plan.bounds.back()));
  std::vector<int64_t> place = plan.bounds;
  each([&](size_t call, const Segment& segment) { plan.segments[static_cast<size_t>(place[call]++)] = segment; });
}

}  // namespace

Sharding choose_sharding(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice) {
  check(lengths, cp_size, choice);
  const Sharder sharder(lengths, cp_size, choice.kernel);
  const std::vector<Finished> drafts = fastest(lengths, cp_size, choice, sharder);
  const auto ranks = static_cast<size_t>(cp_size);
  Finished best;
  Staged staged{};
  for (const Finished& draft : drafts) {
    Staged now{draft->time(choice.exchanges[0]), {}, {{0}}};
    if (choice.staging) now = stage(draft->pieces(), lengths.size(), ranks, *choice.staging);
    if (best && now.time >= staged.time) continue;
    best = draft;
    staged = std::move(now);
  }
  const bool is_mirrored = choice.num_mirrored > 0 && best == drafts.back();
  Sharding plan{best->strategy, staged.time, sharder.mirrored_order(is_mirrored ? choice.num_mirrored : 0), {}, {}, {},
                std::move(staged.stages)};
  arrange(best->pieces(), staged.sets, ranks, plan);
  return plan;
}

}  // namespace wlb
