#include "sharding.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "document.h"

namespace wlb {
namespace {

struct Counts {
  int64_t tiles = 0, query_tiles = 0;

  void operator+=(const Counts& other) {
    tiles += other.tiles;
    query_tiles += other.query_tiles;
  }
};

struct Model : Kernel {
  explicit Model(const Kernel& kernel) : Kernel(kernel) {
    for (int64_t rows = tile_rows; rows > 1; rows /= 2) ++tile_bits;
  }

  // Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * tile_rows and sees ceil(that / tile_rows) key tiles.
  void count(const Segment& s, Counts& counts) const {
    const int64_t mask = tile_rows - 1, rows = s.stop - s.start, full = rows >> tile_bits;
    const int64_t first = (s.start + tile_rows + mask) >> tile_bits;
    const bool partial = (rows & mask) > 0;
    counts.tiles += full * first + full * (full - 1) / 2 + (partial ? (s.stop + mask) >> tile_bits : 0);
    counts.query_tiles += full + partial;
  }

  double time(int64_t launches, const Counts& counts) const {
    return static_cast<double>(launches) * launch +
           static_cast<double>(heads) * (tile * static_cast<double>(counts.tiles) +
                                         query_tile * static_cast<double>(counts.query_tiles));
  }

  int tile_bits = 0;
};

struct Piece {
  size_t call;  // 2 * rank for heads, one more for tails
  Segment segment;
};

// A sharding in the making, and what the kernel model asks of it. Pieces of a document come one after the other.
class Draft {
 public:
  Draft(const Model& model, int64_t cp_size, size_t documents) : model_(model), ranks_(static_cast<size_t>(cp_size)) {
    pieces_.reserve(2 * documents);
  }

  void add(size_t call, const Segment& segment) {
    if (segment.start == 0) end_document();
    pieces_.push_back({call, segment});
    Rank& rank = ranks_[call / 2];
    rank.calls |= call % 2 ? 2 : 1;
    model_.count(segment, rank.counts);
  }

  // To rank c, as its head, or 2 * cp_size - 1 - c, as its tail.
  void add_chunk(int64_t chunk, const Segment& segment) {
    const auto c = static_cast<size_t>(chunk);
    add(c < ranks_.size() ? 2 * c : 2 * (2 * ranks_.size() - 1 - c) + 1, segment);
  }

  double work(size_t rank) const { return model_.time(0, ranks_[rank].counts); }

  // The exchange, by the rows of K and V through the busiest rank; of the document that was added last, nothing yet.
  double exchange() const { return model_.exchange * static_cast<double>(moved_); }

  // Of the slowest rank, with the exchange.
  double predicted() {
    end_document();
    const int64_t launches = moved_ > 0 ? model_.parts : 1;  // of a call
    double slowest = 0;
    for (const Rank& rank : ranks_)
      slowest = std::max(slowest, model_.time((rank.calls % 2 + rank.calls / 2) * launches, rank.counts));
    return slowest + exchange();
  }

  std::vector<Piece> take_pieces() { return std::move(pieces_); }

 private:
  struct Rank {
    Counts counts;
    int64_t calls = 0, in = 0, out = 0;  // a bit for heads, one for tails; rows
    bool seen = false;
  };

  // From the last piece on: a rank sees what lies before the end of its last one.
  void end_document() {
    if (pieces_.size() - ended_ > 1) {
      int64_t seeing = 0;
      for (size_t i = pieces_.size(); i-- > ended_;) {
        Rank& rank = ranks_[pieces_[i].call / 2];
        const Segment& segment = pieces_[i].segment;
        const int64_t rows = segment.stop - segment.start;
        if (!rank.seen) {
          rank.seen = true;
          rank.in += segment.stop;
          ++seeing;
        }
        rank.in -= rows;
        rank.out += rows * (seeing - 1);
      }
      for (size_t i = ended_; i < pieces_.size(); ++i) {
        Rank& rank = ranks_[pieces_[i].call / 2];
        rank.seen = false;
        moved_ = std::max({moved_, rank.in, rank.out});
      }
    }
    ended_ = pieces_.size();
  }

  const Model& model_;
  std::vector<Rank> ranks_;
  std::vector<Piece> pieces_;
  size_t ended_ = 0;  // pieces of documents before the last
  int64_t moved_ = 0;
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
  static constexpr double kNone = std::numeric_limits<double>::infinity();

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
  Sharder(const std::vector<int64_t>& lengths, int64_t cp_size, const Model& model)
      : lengths_(lengths),
        cp_size_(cp_size),
        chunks_(2 * cp_size),
        model_(model),
        share_(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) / cp_size),
        longest_first_(lengths.size()) {
    std::vector<uint64_t> keys(lengths.size());  // lengths have 26 bits
    for (size_t d = 0; d < keys.size(); ++d) keys[d] = static_cast<uint64_t>(kMaxTokens - lengths[d]) << 32 | d;
    std::sort(keys.begin(), keys.end());
    Counts left;
    int64_t tokens_left = 0;
    for (size_t i = keys.size(); i-- > 0;) {
      Next& next = longest_first_[i];
      next.document = static_cast<int64_t>(keys[i] & 0xffffffff);
      next.length = lengths[static_cast<size_t>(next.document)];
      Counts whole;
      model.count({next.document, 0, next.length}, whole);
      left += whole;
      tokens_left += next.length;
      next.work = model.time(0, whole);
      next.per_token = model.time(0, left) / static_cast<double>(tokens_left);
    }
    work_ = model.time(0, left);
  }

  void per_sequence(Draft& draft) const {
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

  // Every document on as few ranks as leave none with more of its work than `most_share` times the mean of the ranks.
  // False, at any point, where it is clear that the time will be over `limit`.
  bool hybrid(double most_share, double limit, Draft& draft) const {
    const double most_work = most_share * work_;
    Ranks ranks(draft, cp_size_, share_, model_.tile_rows);
    for (const Next& next : longest_first_) {
      ranks.per_token = next.per_token;
      ranks.sign = next.work < next.per_token * static_cast<double>(next.length) ? -1 : 1;
      int64_t share = 1;
      while (share < cp_size_ && next.work * static_cast<double>(cp_size_) > most_work * static_cast<double>(share))
        share = std::min(2 * share, cp_size_);
      if (share > 1)
        ranks.spread(next.document, next.length, share);
      else
        ranks.fill(next.document, next.length);
      if (ranks.most_work + draft.exchange() > limit) return false;
    }
    return true;
  }

 private:
  struct Next {
    int64_t document, length;
    double work, per_token;  // whole; mean of this document and those after it
  };

  const std::vector<int64_t>& lengths_;
  int64_t cp_size_, chunks_;
  const Model& model_;
  int64_t share_;
  std::vector<Next> longest_first_;
  double work_ = 0;  // of all documents
};

void check(const std::vector<int64_t>& lengths, int64_t cp_size, const Kernel& kernel) {
  check_range("cp_size", cp_size, 1, 1 << 16);
  check_range("tile_rows", kernel.tile_rows, 1, 1 << 16);
  if (kernel.tile_rows & (kernel.tile_rows - 1))
    throw std::invalid_argument("tile_rows is " + std::to_string(kernel.tile_rows) + "; it must be a power of two");
  int64_t tokens = 0;
  for (int64_t length : lengths) {
    check_range("a document's length", length, 1, kMaxTokens);
    tokens = std::min(tokens + length, kMaxTokens + 1);
  }
  check_range("the micro-batch", tokens, 1, kMaxTokens);
  if (tokens % (2 * cp_size))
    throw std::invalid_argument("the micro-batch has " + std::to_string(tokens) + " tokens; it must be a multiple of " +
                                std::to_string(2 * cp_size));
}

}  // namespace

Sharding shard(const std::vector<int64_t>& lengths, int64_t cp_size, const std::vector<std::string>& strategies,
               const std::vector<double>& most_shares, const Kernel& kernel) {
  check(lengths, cp_size, kernel);
  const Model model(kernel);
  const Sharder sharder(lengths, cp_size, model);
  Sharding plan{"", std::numeric_limits<double>::infinity(), {}};
  std::vector<Piece> pieces;
  // `make` fills a draft, or returns false if it would be slower than the best so far. The first one wins a tie.
  const auto race = [&](const std::string& strategy, auto&& make) {
    Draft draft(model, cp_size, lengths.size());
    if (!make(draft)) return;
    const double time = draft.predicted();
    if (!plan.strategy.empty() && time >= plan.time) return;
    plan.strategy = strategy;
    plan.time = time;
    pieces = draft.take_pieces();
  };
  for (const std::string& strategy : strategies) {
    if (strategy == "hybrid")
      for (double most_share : most_shares)
        race(strategy, [&](Draft& draft) { return sharder.hybrid(most_share, plan.time, draft); });
    else if (strategy == "per-sequence")
      race(strategy, [&](Draft& draft) { return sharder.per_sequence(draft), true; });
    else if (strategy == "per-document")
      race(strategy, [&](Draft& draft) { return sharder.per_document(draft), true; });
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  if (plan.strategy.empty())
    throw std::invalid_argument("nothing is tried; give a strategy, and shares if that is hybrid");
  plan.calls.resize(2 * static_cast<size_t>(cp_size));
  for (const Piece& piece : pieces) plan.calls[piece.call].push_back(piece.segment);
  for (auto& call : plan.calls)
    std::sort(call.begin(), call.end(), [](auto& a, auto& b) { return a.document < b.document; });
  return plan;
}

}  // namespace wlb
