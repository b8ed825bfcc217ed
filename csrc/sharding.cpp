#include "sharding.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "document.h"
#include "draft.h"
#include "hybrid.h"

namespace wlb {
namespace {

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

  // The first one wins a tie; there may be none.
  void enter(const Finished& draft) {
    for (size_t i = 0; draft && i < best_.size(); ++i)
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
      const int64_t length = lengths[order[i]];
      const Counts whole = kernel.count(0, length);
      left += whole;
      tokens_left += length;
      longest_first_[i] = {static_cast<int64_t>(order[i]), length, kernel.time(0, whole),
                           kernel.time(0, left) / static_cast<double>(tokens_left)};
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

  // These fill a draft, or return false where it is clear that it cannot win.
  bool whole(Draft& draft) const {
    for (size_t d = 0; d < lengths_.size(); ++d) draft.add(0, {static_cast<int64_t>(d), 0, lengths_[d]});
    return true;
  }

  bool per_sequence(int64_t num_mirrored, Draft& draft) const {
    const std::vector<int64_t> order = mirrored_order(num_mirrored);
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
    return true;
  }

  bool per_document(Draft& draft) const {
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
    return true;
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

  bool hybrid(const std::vector<int64_t>& shares, const Race& race, Draft& draft) const {
    Ranks ranks(draft, cp_size_, share_, kernel_.tile_rows);
    for (size_t i = 0; i < longest_first_.size(); ++i) {
      const Next& next = longest_first_[i];
      ranks.per_token = next.per_token;
      ranks.sign = next.work < next.per_token * static_cast<double>(next.length) ? -1 : 1;
      if (i < shares.size())
        ranks.spread(next.document, next.length, shares[i]);
      else
        ranks.fill(next.document, next.length);
      if (race.is_lost(ranks.most_work, draft.moved())) return false;
    }
    return true;
  }

 private:
  struct Next {
    int64_t document, length;
    double work, per_token;  // of the document, whole; mean of it and those after it
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
  if (choice.exchanges.empty() || (choice.exchanges.size() > 1 && !choice.costs))
    throw std::invalid_argument("there are " + std::to_string(choice.exchanges.size()) +
                                " prices of a moved row; give one, or several with rounds");
  if (!choice.costs) return;
  check(*choice.costs);
  if (choice.costs->forward.tile_rows != tile_rows)
    throw std::invalid_argument("rounds have tiles of another size");
}

// The fastest sharding at every price, and last per-sequence in mirrored order, if that is asked for.
std::vector<Finished> fastest(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice,
                              const Sharder& sharder) {
  Race race(choice.exchanges);
  const auto draft = [&](const std::string& strategy, auto&& fill) -> Finished {
    const auto made = std::make_shared<Draft>(strategy, choice.kernel, static_cast<size_t>(cp_size), lengths.size());
    if (!fill(*made)) return nullptr;
    made->finish();
    return made;
  };
  const auto per_sequence = [&](int64_t num_mirrored) {
    return draft("per-sequence", [&](Draft& made) { return sharder.per_sequence(num_mirrored, made); });
  };
  std::set<std::vector<int64_t>> tried;
  if (cp_size == 1) race.enter(draft("whole", [&](Draft& made) { return sharder.whole(made); }));
  for (const std::string& strategy : choice.strategies) {
    if (cp_size == 1) break;
    if (strategy == "per-sequence")
      race.enter(per_sequence(0));
    else if (strategy == "per-document")
      race.enter(draft(strategy, [&](Draft& made) { return sharder.per_document(made); }));
    else if (strategy == "hybrid")
      for (double most_share : choice.most_shares) {
        const std::vector<int64_t> shares = sharder.shares(most_share);
        if (tried.insert(shares).second)
          race.enter(draft(strategy, [&](Draft& made) { return sharder.hybrid(shares, race, made); }));
      }
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  std::vector<Finished> drafts = race.winners();
  if (!drafts[0]) throw std::invalid_argument("nothing is tried; give a strategy, and shares if that is hybrid");
  if (choice.num_mirrored > 0) drafts.push_back(per_sequence(choice.num_mirrored));
  return drafts;
}

// The calls of every rank: heads and tails; with sets first whole documents, then heads and tails of every set.
void arrange(const std::vector<Piece>& pieces, const std::vector<int64_t>& sets, size_t cp_size, Sharding& plan) {
  const bool in_rounds = !sets.empty();
  const size_t num_calls = in_rounds ? 1 + 2 * static_cast<size_t>(*std::max_element(sets.begin(), sets.end()))
                                  : std::min<size_t>(cp_size, 2);
  for (size_t i = 0; i < num_calls; ++i) plan.call_sets.push_back(in_rounds ? (static_cast<int64_t>(i) + 1) / 2 : 0);
  std::vector<size_t> first(plan.order.size());  // piece of each document
  for (size_t i = 0; i < pieces.size(); ++i)
    if (pieces[i].segment.start == 0) first[static_cast<size_t>(pieces[i].segment.document)] = i;
  const auto each = [&](auto&& take) {
    for (size_t d = 0; d < first.size(); ++d) {
      const size_t set = in_rounds ? static_cast<size_t>(sets[d]) : 1;
      size_t i = first[d], stop = i + 1;
      while (stop < pieces.size() && pieces[stop].segment.start > 0) ++stop;
      if (set == 0)
        take(pieces[i].rank() * num_calls, Segment{static_cast<int64_t>(d), 0, pieces[stop - 1].segment.stop});
      else
        for (; i < stop; ++i)
          take(pieces[i].rank() * num_calls + (in_rounds ? 2 * set - 1 : 0) + pieces[i].is_tail(), pieces[i].segment);
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
  Rounds rounds{};
  for (const Finished& draft : drafts) {
    Rounds now{draft->time(choice.exchanges[0]), {}, {{0}}};
    if (choice.costs) now = in_rounds(draft->pieces(), lengths.size(), ranks, *choice.costs);
    if (best && now.time >= rounds.time) continue;
    best = draft;
    rounds = std::move(now);
  }
  const bool is_mirrored = choice.num_mirrored > 0 && best == drafts.back();
  Sharding plan{best->strategy, rounds.time, sharder.mirrored_order(is_mirrored ? choice.num_mirrored : 0), {}, {}, {},
                std::move(rounds.rounds)};
  arrange(best->pieces(), rounds.sets, ranks, plan);
  return plan;
}

}  // namespace wlb
