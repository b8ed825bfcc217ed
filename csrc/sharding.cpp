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

  // These fill a draft, or return false where it is clear that it cannot win.
  bool whole(Draft& draft) const {
    for (size_t d = 0; d < lengths_.size(); ++d) draft.add(0, {static_cast<int64_t>(d), 0, lengths_[d]});
    return true;
  }

  bool per_sequence(Draft& draft) const {
    const int64_t chunk = share_ / 2;
    int64_t begin = 0, c = 0;
    for (size_t d = 0; d < lengths_.size(); ++d) {
      const int64_t end = begin + lengths_[d];
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

  bool hybrid(const std::vector<int64_t>& shares, const Draft* best, Draft& draft) const {
    Ranks ranks(draft, cp_size_, share_, kernel_.tile_rows);
    for (size_t i = 0; i < longest_first_.size(); ++i) {
      const Next& next = longest_first_[i];
      ranks.per_token = next.per_token;
      ranks.sign = next.work < next.per_token * static_cast<double>(next.length) ? -1 : 1;
      if (i < shares.size())
        ranks.spread(next.document, next.length, shares[i]);
      else
        ranks.fill(next.document, next.length);
      if (best && ranks.most_work + draft.exchange() > best->time()) return false;
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
  if (!choice.costs) return;
  check(*choice.costs);
  if (choice.costs->forward.tile_rows != tile_rows)
    throw std::invalid_argument("rounds have tiles of another size");
}

// Of a tie the first wins.
Draft fastest(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice, const Sharder& sharder) {
  std::unique_ptr<Draft> best;
  const auto attempt = [&](const std::string& strategy, auto&& fill) {
    auto made = std::make_unique<Draft>(strategy, choice.kernel, static_cast<size_t>(cp_size), lengths.size());
    if (!fill(*made)) return;
    made->finish();
    if (!best || made->time() < best->time()) best = std::move(made);
  };
  std::set<std::vector<int64_t>> tried;
  if (cp_size == 1) attempt("whole", [&](Draft& made) { return sharder.whole(made); });
  for (const std::string& strategy : choice.strategies) {
    if (cp_size == 1) break;
    if (strategy == "per-sequence")
      attempt(strategy, [&](Draft& made) { return sharder.per_sequence(made); });
    else if (strategy == "per-document")
      attempt(strategy, [&](Draft& made) { return sharder.per_document(made); });
    else if (strategy == "hybrid")
      for (double most_share : choice.most_shares) {
        const std::vector<int64_t> shares = sharder.shares(most_share);
        if (tried.insert(shares).second)
          attempt(strategy, [&](Draft& made) { return sharder.hybrid(shares, best.get(), made); });
      }
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  if (!best) throw std::invalid_argument("nothing is tried; give a strategy, and shares if that is hybrid");
  return std::move(*best);
}

// The calls of every rank: heads and tails; perhaps whole documents before these.
void arrange(const std::vector<Piece>& pieces, size_t num_documents, size_t cp_size, bool whole_apart, Sharding& plan) {
  const size_t num_calls = whole_apart ? 3 : std::min<size_t>(cp_size, 2);
  std::vector<const Piece*> first(num_documents);
  for (const Piece& piece : pieces)
    if (piece.segment.start == 0) first[static_cast<size_t>(piece.segment.document)] = &piece;
  const Piece* const last = pieces.data() + pieces.size();
  const auto each = [&](auto&& take) {
    for (const Piece* begin : first) {
      const Piece* end = begin + 1;
      while (end < last && end->segment.start > 0) ++end;
      if (whole_apart && !is_shared(begin, end))
        take(begin->rank() * num_calls, Segment{begin->segment.document, 0, (end - 1)->segment.stop});
      else
        for (; begin < end; ++begin) take(begin->rank() * num_calls + whole_apart + begin->is_tail(), begin->segment);
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
  const Draft best = fastest(lengths, cp_size, choice, Sharder(lengths, cp_size, choice.kernel));
  const auto ranks = static_cast<size_t>(cp_size);
  const bool runs_in_rounds = choice.costs.has_value();
  Rounds rounds{best.time(), {}};
  if (runs_in_rounds) rounds = in_rounds(best.pieces(), ranks, *choice.costs);
  Sharding plan{best.strategy, rounds.time, {}, {}, std::move(rounds.key_bounds)};
  // Among others, they would have a mask that hides tiles.
  const bool whole_apart = runs_in_rounds || (cp_size > 1 && choice.kernel.hidden > 0);
  arrange(best.pieces(), lengths.size(), ranks, whole_apart, plan);
  return plan;
}

}  // namespace wlb
