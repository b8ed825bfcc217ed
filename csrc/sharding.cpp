#include "sharding.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
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
    for (size_t i = 0; i < order_.size(); ++i) count({0, 0, lengths[order_[i]]}, whole_[i]);
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

  // What per-document sharding cannot be faster than: its chunks have at least a tile each, and somebody has the mean.
  double per_document_floor() const {
    Counts least;
    for (int64_t length : lengths_) least.tiles += std::min(length, chunks_);
    least.query_tiles = least.tiles /= cp_size_;
    return time(1, least);
  }

  // False, at any point, where the last long document is too short to level the ranks, or where it is clear that the
  // time will be over `limit`.
  template <typename Emit>
  bool hybrid(size_t num_long, double limit, Emit&& emit) const {
    std::vector<int64_t> room(ranks(), share_), sizes(static_cast<size_t>(chunks_));
    std::vector<Counts> counts(ranks());
    int64_t pointer = 0, placed = 0;
    for (size_t i = 0; i < num_long; ++i) {
      const int64_t length = lengths_[order_[i]];
      placed += length;
      if (i + 1 < num_long)
        tile(length, sizes, pointer);
      else if (!level(placed, room, sizes))
        return false;
      int64_t start = 0;
      for (int64_t c = 0; c < chunks_; ++c) {
        const Segment segment{static_cast<int64_t>(order_[i]), start, start + sizes[static_cast<size_t>(c)]};
        const auto rank = static_cast<size_t>(std::min(c, chunks_ - 1 - c));
        room[rank] -= segment.stop - start;
        count(segment, counts[rank]);
        if (segment.stop > start) emit(c, segment);
        start = segment.stop;
      }
    }
    Counts mean;
    for (const Counts& c : counts) mean += c;
    for (size_t i = num_long; i < whole_.size(); ++i) mean += whole_[i];
    mean.tiles /= cp_size_;
    mean.query_tiles /= cp_size_;
    if (time(1, mean) > limit) return false;
    place_short(num_long, room, counts, emit);
    return true;
  }

  // How many documents are long, for each of the shares.
  std::set<size_t> long_counts(const std::vector<int64_t>& shares) const {
    std::set<size_t> found;
    for (int64_t k : shares) {
      const int64_t least = std::max<int64_t>(1, share_ >> k);
      const auto is_long = [&](size_t d) { return lengths_[d] >= least; };
      const auto first_short = std::partition_point(order_.begin(), order_.end(), is_long);
      found.insert(static_cast<size_t>(first_short - order_.begin()));
    }
    return found;
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
  size_t ranks() const { return static_cast<size_t>(cp_size_); }

  // Chunks of whole tiles; the remainder is dealt out tile by tile, by a rotating pointer.
  void tile(int64_t length, std::vector<int64_t>& sizes, int64_t& pointer) const {
    const int64_t rows = kernel_.tile_rows, base = length / (chunks_ * rows) * rows, rest = length - chunks_ * base;
    std::fill(sizes.begin(), sizes.end(), base);
    for (int64_t left = rest; left > 0; left -= rows, pointer = (pointer + 1) % chunks_)
      sizes[static_cast<size_t>(pointer)] += std::min(left, rows);
  }

  // Chunks after which all ranks hold equally many of the `placed` tokens, but for one more on the first ones.
  bool level(int64_t placed, const std::vector<int64_t>& room, std::vector<int64_t>& sizes) const {
    for (int64_t r = 0; r < cp_size_; ++r) {
      const int64_t held = share_ - room[static_cast<size_t>(r)];
      const int64_t missing = placed / cp_size_ + (r < placed % cp_size_) - held;
      if (missing < 0) return false;
      const int64_t head = missing / 2 / kernel_.tile_rows * kernel_.tile_rows;
      sizes[static_cast<size_t>(r)] = head;
      sizes[static_cast<size_t>(chunks_ - 1 - r)] = missing - head;
    }
    return true;
  }

  // Whole on a rank where it fits; what fits nowhere, or has been cut, fills ranks up. The rank is the one that will
  // end with least work if what is left to place fills its room (with most, if this document has less work a token).
  template <typename Emit>
  void place_short(size_t num_long, const std::vector<int64_t>& left_over, std::vector<Counts>& counts,
                   Emit&& emit) const {
    // As doubles, which hold them exactly, and in loops without a branch, which compilers make vectors of.
    constexpr double kNone = std::numeric_limits<double>::infinity();
    std::vector<double> room(left_over.begin(), left_over.end()), work, ends((ranks() + 3) / 4 * 4, kNone);
    for (const Counts& c : counts) work.push_back(time(0, c));
    double per_token = 0, sign = 1;
    const auto choose = [&](int64_t least) {
      for (size_t r = 0; r < ranks(); ++r) {
        const double end = sign * (work[r] + per_token * room[r]);
        ends[r] = room[r] >= static_cast<double>(least) ? end : kNone;
      }
      double lanes[] = {kNone, kNone, kNone, kNone};
      for (size_t r = 0; r < ends.size(); r += 4)
        for (size_t lane = 0; lane < 4; ++lane) lanes[lane] = std::min(lanes[lane], ends[r + lane]);
      const double best = *std::min_element(lanes, lanes + 4);
      return best == kNone ? ranks() : static_cast<size_t>(std::find(ends.begin(), ends.end(), best) - ends.begin());
    };
    Counts left;
    int64_t tokens_left = 0;
    for (size_t i = num_long; i < order_.size(); ++i) {
      left += whole_[i];
      tokens_left += lengths_[order_[i]];
    }
    for (size_t i = num_long; i < order_.size(); ++i) {
      const int64_t length = lengths_[order_[i]];
      const Counts& own = whole_[i];
      per_token = time(0, left) / static_cast<double>(tokens_left);
      sign = time(0, own) < per_token * static_cast<double>(length) ? -1 : 1;
      left.tiles -= own.tiles;
      left.query_tiles -= own.query_tiles;
      tokens_left -= length;
      for (int64_t start = 0; start < length;) {
        size_t rank = start == 0 ? choose(length) : ranks();
        if (rank == ranks()) rank = choose(1);
        const Segment segment{static_cast<int64_t>(order_[i]), start, std::min(length, start + static_cast<int64_t>(room[rank]))};
        emit(static_cast<int64_t>(rank), segment);
        count(segment, counts[rank]);
        work[rank] = time(0, counts[rank]);
        room[rank] -= static_cast<double>(segment.stop - start);
        start = segment.stop;
      }
    }
  }

  const std::vector<int64_t>& lengths_;
  int64_t cp_size_, chunks_;
  Kernel kernel_;
  int64_t share_;
  int tile_bits_ = 0;
  std::vector<size_t> order_;  // documents, longest first
  std::vector<Counts> whole_;  // and their tiles
};

// Adds up what the kernel model asks for.
class Tally {
 public:
  Tally(const Sharder& sharder, size_t ranks) : sharder_(sharder), ranks_(ranks) {}

  void operator()(int64_t chunk, const Segment& segment) {
    const auto c = static_cast<size_t>(chunk), rank = std::min(c, 2 * ranks_.size() - 1 - c);
    if (segment.document != document_) {
      end_document();
      document_ = segment.document;
      home_ = rank;
    }
    alone_ &= rank == home_;
    rows_ += segment.stop - segment.start;
    Rank& held = ranks_[rank];
    held.sent += segment.stop - segment.start;
    held.calls |= c < ranks_.size() ? 1 : 2;
    sharder_.count(segment, held.counts);
  }

  // Of the slowest rank, with the rows that all ranks exchange: as many as the one that sends most.
  double predicted(const Kernel& kernel) {
    end_document();
    double slowest = 0;
    int64_t sent = 0;
    for (const Rank& rank : ranks_) sent = std::max(sent, rank.sent);
    const int64_t launches = sent > 0 ? kernel.parts : 1;  // of a call
    for (const Rank& rank : ranks_)
      slowest = std::max(slowest, sharder_.time((rank.calls % 2 + rank.calls / 2) * launches, rank.counts));
    return slowest + kernel.exchange * static_cast<double>(sent * static_cast<int64_t>(ranks_.size()));
  }

 private:
  struct Rank {
    Counts counts;
    int64_t calls = 0, sent = 0;  // a bit for heads, one for tails; rows
  };

  void end_document() {
    if (alone_) ranks_[home_].sent -= rows_;
    alone_ = true;
    rows_ = 0;
  }

  const Sharder& sharder_;
  std::vector<Rank> ranks_;
  // Of the document that is being emitted: the rank of its first segment, and whether it has all of them.
  int64_t document_ = -1, rows_ = 0;
  size_t home_ = 0;
  bool alone_ = true;
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
               const std::vector<int64_t>& long_shares, const Kernel& kernel) {
  check(lengths, cp_size, kernel);
  const Sharder sharder(lengths, cp_size, kernel);
  const auto ranks = static_cast<size_t>(cp_size);
  struct Way {
    std::string strategy;
    size_t num_long;
  };
  const auto run = [&](const Way& way, double limit, auto&& emit) {
    if (way.strategy == "hybrid") return sharder.hybrid(way.num_long, limit, emit);
    if (way.strategy == "per-document" && sharder.per_document_floor() > limit) return false;
    way.strategy == "per-sequence" ? sharder.per_sequence(emit) : sharder.per_document(emit);
    return true;
  };
  std::vector<Way> ways;
  for (const std::string& strategy : strategies) {
    if (strategy == "hybrid")
      for (size_t num_long : sharder.long_counts(long_shares)) ways.push_back({strategy, num_long});
    else if (strategy == "per-sequence" || strategy == "per-document")
      ways.push_back({strategy, 0});
    else
      throw std::invalid_argument("unknown sharding " + strategy + "; choose per-sequence, per-document or hybrid");
  }
  const Way* best = nullptr;
  double best_time = std::numeric_limits<double>::infinity();
  struct Piece {
    int64_t chunk;
    Segment segment;
  };
  std::vector<Piece> pieces, best_pieces;
  const auto race = [&](const Way& way) {
    Tally tally(sharder, ranks);
    pieces.clear();
    const auto emit = [&](int64_t chunk, const Segment& segment) {
      tally(chunk, segment);
      pieces.push_back({chunk, segment});
    };
    if (!run(way, best_time, emit)) return;
    const double time = tally.predicted(kernel);
    if (!best || time < best_time || (time == best_time && &way < best)) {
      best = &way, best_time = time;
      pieces.swap(best_pieces);
    }
  };
  // The likely winners first, since they spare the others; the first of `ways` wins a tie all the same.
  for (const Way& way : ways)
    if (way.strategy == "hybrid") race(way);
  for (const Way& way : ways)
    if (way.strategy != "hybrid") race(way);
  if (!best)
    throw std::invalid_argument("none of the " + std::to_string(strategies.size()) +
                                " strategies can shard this micro-batch; add per-sequence");

  Sharding plan{best->strategy, best_time, std::vector<std::vector<Segment>>(2 * ranks)};
  for (const Piece& piece : best_pieces) {
    const auto c = static_cast<size_t>(piece.chunk);
    plan.calls[c < ranks ? 2 * c : 2 * (2 * ranks - 1 - c) + 1].push_back(piece.segment);
  }
  if (best->strategy == "hybrid")
    for (auto& call : plan.calls)
      std::sort(call.begin(), call.end(), [](auto& a, auto& b) { return a.document < b.document; });
  return plan;
}

}  // namespace wlb
