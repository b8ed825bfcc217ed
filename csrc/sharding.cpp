#include "sharding.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

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

// Each way to shard emits (chunk, segment), all of a document one after the other. Rank r holds chunk r, its head, and
// chunk 2 * cp_size - 1 - r, its tail.
class Sharder {
 public:
  Sharder(const std::vector<int64_t>& lengths, int64_t cp_size, const Kernel& kernel)
      : lengths_(lengths),
        cp_size_(cp_size),
        chunks_(2 * cp_size),
        kernel_(kernel),
        share_(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) / cp_size),
        order_(lengths.size()) {
    for (int64_t rows = kernel.tile_rows; rows > 1; rows /= 2) ++tile_bits_;
    std::vector<uint64_t> keys(lengths.size());  // lengths have 26 bits
    for (size_t d = 0; d < keys.size(); ++d) keys[d] = static_cast<uint64_t>(kMaxTokens - lengths[d]) << 32 | d;
    std::sort(keys.begin(), keys.end());
    std::transform(keys.begin(), keys.end(), order_.begin(), [](uint64_t key) { return key & 0xffffffff; });
    whole_.resize(lengths.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      count({0, 0, lengths[order_[i]]}, whole_[i]);
      all_ += whole_[i];
    }
  }

  template <typename Emit>
  void per_sequence(Emit&& emit) const {
    const int64_t chunk = share_ / 2;
    int64_t begin = 0, c = 0;
    for (size_t d = 0; d < lengths_.size(); ++d) {
      const int64_t end = begin + lengths_[d];
      for (int64_t at = begin; at < end;) {
        const int64_t stop = std::min(end, (c + 1) * chunk);
        emit(c, Segment{static_cast<int64_t>(d), at - begin, stop - begin});
        at = stop;
        c += stop == (c + 1) * chunk;
      }
      begin = end;
    }
  }

  template <typename Emit>
  void per_document(Emit&& emit) const {
    int64_t pointer = 0;
    for (size_t d = 0; d < lengths_.size(); ++d) {
      const int64_t base = lengths_[d] / chunks_, remainder = lengths_[d] % chunks_;
      int64_t start = 0;
      for (int64_t c = 0; c < chunks_; ++c) {
        const int64_t turn = c >= pointer ? c - pointer : c - pointer + chunks_;
        const int64_t stop = start + base + (turn < remainder);
        if (stop > start) emit(c, Segment{static_cast<int64_t>(d), start, stop});
        start = stop;
      }
      pointer = (pointer + remainder) % chunks_;
    }
  }

  // Every document on as few ranks as leave none with more of its work than `most_share` times the mean of the ranks.
  // False, at any point, where it is clear that the time will be over `limit`.
  template <typename Emit>
  bool hybrid(double most_share, double limit, Emit&& emit) const {
    const double most_work = most_share * time(0, all_);
    Ranks ranks(*this);
    Counts left = all_;
    int64_t tokens_left = share_ * cp_size_;
    for (size_t i = 0; i < order_.size(); ++i) {
      const auto document = static_cast<int64_t>(order_[i]), length = lengths_[order_[i]];
      const double work = time(0, whole_[i]);
      ranks.per_token = time(0, left) / static_cast<double>(tokens_left);
      ranks.sign = work < ranks.per_token * static_cast<double>(length) ? -1 : 1;
      left.tiles -= whole_[i].tiles;
      left.query_tiles -= whole_[i].query_tiles;
      tokens_left -= length;
      int64_t share = 1;
      while (share < cp_size_ && work * static_cast<double>(cp_size_) > most_work * static_cast<double>(share))
        share = std::min(2 * share, cp_size_);
      if (share > 1)
        ranks.spread(document, length, share, emit);
      else
        ranks.fill(document, length, emit);
      if (ranks.most_work > limit) return false;
    }
    return true;
  }

  // Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * tile_rows and sees ceil(that / tile_rows) key tiles.
  void count(const Segment& s, Counts& counts) const {
    const int64_t mask = kernel_.tile_rows - 1, rows = s.stop - s.start, full = rows >> tile_bits_;
    const int64_t first = (s.start + kernel_.tile_rows + mask) >> tile_bits_;
    const bool partial = (rows & mask) > 0;
    counts.tiles += full * first + full * (full - 1) / 2 + (partial ? (s.stop + mask) >> tile_bits_ : 0);
    counts.query_tiles += full + partial;
  }

  double time(int64_t launches, const Counts& counts) const {
    return static_cast<double>(launches) * kernel_.launch +
           static_cast<double>(kernel_.heads) * (kernel_.tile * static_cast<double>(counts.tiles) +
                                                 kernel_.query_tile * static_cast<double>(counts.query_tiles));
  }

 private:
  // What the ranks hold so far, and which of them the next document goes to: those first that would end with least work
  // if what is left to place fills their room (with most, if sign is -1).
  class Ranks {
   public:
    double per_token = 0, sign = 1;  // mean work of a token that is left
    double most_work = 0;

    explicit Ranks(const Sharder& sharder)
        : sharder_(sharder),
          size_(static_cast<size_t>(sharder.cp_size_)),
          counts_(size_),
          room_(size_, static_cast<double>(sharder.share_)),
          work_(size_),
          ends_((size_ + 3) / 4 * 4, kNone) {}

    // Whole on one rank, or cut where none has the room.
    template <typename Emit>
    void fill(int64_t document, int64_t length, Emit&& emit) {
      size_t rank = first_with_room(length);
      for (int64_t start = 0; start < length; rank = size_) {
        if (rank == size_) rank = first_with_room(1);
        const Segment segment{document, start, std::min(length, start + room(rank))};
        put(rank, static_cast<int64_t>(rank), segment, emit);
        start = segment.stop;
      }
    }

    // As heads and tails on `share` ranks, or on more where too few have the room.
    template <typename Emit>
    void spread(int64_t document, int64_t length, int64_t share, Emit&& emit) {
      const int64_t cp_size = sharder_.cp_size_, tile = sharder_.kernel_.tile_rows;
      while (!choose(share < cp_size ? (length + share - 1) / share : 0, share)) share = std::min(2 * share, cp_size);
      // Whole tiles as evenly as they go, the first ranks having more; but so that the rest fits the ranks after.
      int64_t left = length, room_after = 0, start = 0;
      for (size_t rank : chosen_) room_after += room(rank);
      heads_.clear();
      sizes_.clear();
      for (size_t rank : chosen_) {
        room_after -= room(rank);
        const int64_t even = (left + share * tile - 1) / (share * tile) * tile;
        sizes_.push_back(std::min(room(rank), std::max(std::min(even, left), left - room_after)));
        heads_.push_back(sizes_.back() / 2 / tile * tile);
        left -= sizes_.back();
        --share;
      }
      const auto next = [&](size_t i, int64_t rows, bool is_tail) {
        const auto rank = static_cast<int64_t>(chosen_[i]);
        if (rows > 0) put(chosen_[i], is_tail ? sharder_.chunks_ - 1 - rank : rank, {document, start, start + rows}, emit);
        start += rows;
      };
      for (size_t i = 0; i < chosen_.size(); ++i) next(i, heads_[i], false);
      for (size_t i = chosen_.size(); i-- > 0;) next(i, sizes_[i] - heads_[i], heads_[i] > 0);
    }

   private:
    static constexpr double kNone = std::numeric_limits<double>::infinity();

    int64_t room(size_t rank) const { return static_cast<int64_t>(room_[rank]); }

    void find_ends(int64_t least) {
      for (size_t r = 0; r < size_; ++r) {
        const double end = sign * (work_[r] + per_token * room_[r]);
        ends_[r] = room_[r] >= static_cast<double>(least) ? end : kNone;
      }
    }

    // The number of ranks if none has room for so many tokens.
    size_t first_with_room(int64_t least) {
      find_ends(least);
      double lanes[] = {kNone, kNone, kNone, kNone};
      for (size_t r = 0; r < ends_.size(); r += 4)
        for (size_t lane = 0; lane < 4; ++lane) lanes[lane] = std::min(lanes[lane], ends_[r + lane]);
      const double best = *std::min_element(lanes, lanes + 4);
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

    template <typename Emit>
    void put(size_t rank, int64_t chunk, const Segment& segment, Emit&& emit) {
      emit(chunk, segment);
      sharder_.count(segment, counts_[rank]);
      work_[rank] = sharder_.time(0, counts_[rank]);
      most_work = std::max(most_work, work_[rank]);
      room_[rank] -= static_cast<double>(segment.stop - segment.start);
    }

    const Sharder& sharder_;
    size_t size_;
    std::vector<Counts> counts_;
    // Tokens as doubles, which hold them exactly, and in loops without a branch, which compilers make vectors of.
    std::vector<double> room_, work_, ends_;
    std::vector<size_t> chosen_;
    std::vector<int64_t> sizes_, heads_;
  };

  const std::vector<int64_t>& lengths_;
  int64_t cp_size_, chunks_;
  Kernel kernel_;
  int64_t share_;
  int tile_bits_ = 0;
  std::vector<size_t> order_;  // documents, longest first
  std::vector<Counts> whole_;  // and their tiles
  Counts all_;
};

// Adds up what the kernel model asks for.
class Tally {
 public:
  Tally(const Sharder& sharder, size_t ranks) : sharder_(sharder), ranks_(ranks) {}

  void operator()(int64_t chunk, const Segment& segment) {
    const auto c = static_cast<size_t>(chunk), rank = std::min(c, 2 * ranks_.size() - 1 - c);
    if (!pieces_.empty() && segment.start == 0) end_document();
    pieces_.push_back({rank, segment});
    ranks_[rank].calls |= c < ranks_.size() ? 1 : 2;
    sharder_.count(segment, ranks_[rank].counts);
  }

  // Of the slowest rank, with the rows of K and V through the busiest one.
  double predicted(const Kernel& kernel) {
    end_document();
    double slowest = 0;
    int64_t moved = 0;
    for (const Rank& rank : ranks_) moved = std::max({moved, rank.in, rank.out});
    const int64_t launches = moved > 0 ? kernel.parts : 1;  // of a call
    for (const Rank& rank : ranks_)
      slowest = std::max(slowest, sharder_.time((rank.calls % 2 + rank.calls / 2) * launches, rank.counts));
    return slowest + kernel.exchange * static_cast<double>(moved);
  }

 private:
  struct Rank {
    Counts counts;
    int64_t calls = 0, in = 0, out = 0;  // a bit for heads, one for tails; rows
    bool seen = false;
  };
  struct Piece {
    size_t rank;
    Segment segment;
  };

  // From the last piece on: a rank sees what lies before the end of its last one.
  void end_document() {
    int64_t seeing = 0;
    for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece) {
      Rank& rank = ranks_[piece->rank];
      const int64_t rows = piece->segment.stop - piece->segment.start;
      if (!rank.seen) {
        rank.seen = true;
        rank.in += piece->segment.stop;
        ++seeing;
      }
      rank.in -= rows;
      rank.out += rows * (seeing - 1);
    }
    for (const Piece& piece : pieces_) ranks_[piece.rank].seen = false;
    pieces_.clear();
  }

  const Sharder& sharder_;
  std::vector<Rank> ranks_;
  std::vector<Piece> pieces_;  // of the document that is being emitted, ascending
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
  const Sharder sharder(lengths, cp_size, kernel);
  const auto ranks = static_cast<size_t>(cp_size);
  struct Piece {
    int64_t chunk;
    Segment segment;
  };
  std::vector<Piece> pieces, best_pieces;
  std::string best;
  double best_time = std::numeric_limits<double>::infinity();
  // `make` emits a sharding, or returns false if it would be slower than the best so far. The first one wins a tie.
  const auto race = [&](const std::string& strategy, auto&& make) {
    Tally tally(sharder, ranks);
    pieces.clear();
    const auto emit = [&](int64_t chunk, const Segment& segment) {
      tally(chunk, segment);
      pieces.push_back({chunk, segment});
    };
    if (!make(emit)) return;
    const double time = tally.predicted(kernel);
    if (!best.empty() && time >= best_time) return;
    best = strategy;
    best_time = time;
    pieces.swap(best_pieces);
  };
  for (const std::string& strategy : strategies) {
    if (strategy == "hybrid")
      for (double most_share : most_shares)
        race(strategy, [&](auto&& emit) { return sharder.hybrid(most_share, best_time, emit); });
    else if (strategy == "per-sequence")
      race(strategy, [&](auto&& emit) { return sharder.per_sequence(emit), true; });
    else if (strategy == "per-document")
      race(strategy, [&](auto&& emit) { return sharder.per_document(emit), true; });
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  if (best.empty()) throw std::invalid_argument("nothing is tried; give a strategy, and shares if that is hybrid");
  Sharding plan{best, best_time, std::vector<std::vector<Segment>>(2 * ranks)};
  for (const Piece& piece : best_pieces) {
    const auto c = static_cast<size_t>(piece.chunk);
    plan.calls[c < ranks ? 2 * c : 2 * (2 * ranks - 1 - c) + 1].push_back(piece.segment);
  }
  if (best == "hybrid")
    for (auto& call : plan.calls)
      std::sort(call.begin(), call.end(), [](auto& a, auto& b) { return a.document < b.document; });
  return plan;
}

}  // namespace wlb
