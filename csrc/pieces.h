// Pieces of documents on context-parallel ranks, and what the kernel model says of them.
// `KernelModel` of megatron_wlb/hardware/profile.py and megatron_wlb/sharding/routing.py count the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace wlb {

struct Segment {
  int64_t document, start, stop;
};

struct Counts {
  int64_t tiles = 0, query_tiles = 0;
  int64_t hidden = 0;  // tiles that a mask aligned to the bottom right hides

  void operator+=(const Counts& other) {
    tiles += other.tiles;
    query_tiles += other.query_tiles;
    hidden += other.hidden;
  }
};

// `KernelModel`.
struct Kernel {
  int64_t tile_rows;  // a power of two
  double launch, tile, query_tile, hidden;
  int64_t heads, kv_chunks;
  double exchange;  // price of a row that is moved
  std::optional<int64_t> window = {};  // keys that a query sees before its own
  int tile_bits = bits(tile_rows);

  // Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * tile_rows and sees ceil(that / tile_rows) key tiles.
  Counts count(int64_t start, int64_t stop) const {
    const int64_t mask = tile_rows - 1, rows = stop - start, full = rows >> tile_bits;
    const int64_t first = (start + tile_rows + mask) >> tile_bits;
    const bool partial = (rows & mask) > 0;
    Counts counts{full * first + full * (full - 1) / 2 + (partial ? (stop + mask) >> tile_bits : 0), full + partial};
    if (!window) return counts;
    // It does not see the tiles before the first key of its first query: skipped + j of them, where that is over 0.
    const int64_t skipped = (start - *window) >> tile_bits;
    const int64_t tiles = std::max<int64_t>(0, counts.query_tiles + std::min<int64_t>(0, skipped));
    counts.tiles -= tiles * std::max<int64_t>(0, skipped) + tiles * (tiles - 1) / 2;
    return counts;
  }

  int64_t hidden_tiles(int64_t start, int64_t stop) const {
    const Counts counts = count(start, stop);
    return counts.query_tiles * ((stop + tile_rows - 1) >> tile_bits) - counts.tiles;
  }

  double time(int64_t launches, const Counts& counts) const {
    const double tile_times = tile * static_cast<double>(counts.tiles) +
                              query_tile * static_cast<double>(counts.query_tiles) +
                              hidden * static_cast<double>(counts.hidden);
    return static_cast<double>(launches) * launch + static_cast<double>(heads) * tile_times;
  }

 private:
  static int bits(int64_t rows) { return rows > 1 ? 1 + bits(rows / 2) : 0; }
};

struct Piece {
  size_t call;  // 2 * rank for heads, one more for tails
  Segment segment;

  size_t rank() const { return call / 2; }
  bool is_tail() const { return call % 2; }
};

// A document's pieces are on several ranks.
inline bool is_shared(const Piece* begin, const Piece* end) {
  return std::any_of(begin, end, [&](const Piece& piece) { return piece.rank() != begin->rank(); });
}

// What documents ask of a rank.
struct Load {
  Counts counts;                       // without what is hidden:
  std::array<int64_t, 2> hidden = {};  // in heads and in tails, but only
  std::array<bool, 2> is_late = {};    // where these do not all begin their documents
  int64_t heads = 0, tails = 0;  // pieces
  int64_t in = 0, out = 0;       // rows of K and V that arrive, and that leave, once for every rank that needs them
  bool seen = false;             // for `add_moved`

  int64_t calls() const { return (heads > 0) + (tails > 0); }

  // With all keys of a call at once.
  Counts at_once() const {
    Counts all = counts;
    for (size_t call = 0; call < 2; ++call) all.hidden += is_late[call] ? hidden[call] : 0;
    return all;
  }

  // A piece of a document on several ranks.
  void hide(const Piece& piece, const Kernel& kernel) {
    hidden[piece.is_tail()] += kernel.hidden_tiles(piece.segment.start, piece.segment.stop);
    is_late[piece.is_tail()] |= piece.segment.start > 0;
  }

  void add(const Piece& piece, const Counts& its) {
    ++(piece.is_tail() ? tails : heads);
    counts += its;
  }
};

// Adds the rows that a document moves to the loads of ranks, given all its pieces, in the order of their rows: a rank
// needs what lies before the end of its last one.
inline void add_moved(const Piece* begin, const Piece* end, std::vector<Load>& ranks) {
  int64_t needing = 0;
  for (const Piece* piece = end; piece-- > begin;) {
    Load& rank = ranks[piece->rank()];
    const int64_t rows = piece->segment.stop - piece->segment.start;
    if (!rank.seen) {
      rank.seen = true;
      rank.in += piece->segment.stop;
      ++needing;
    }
    rank.in -= rows;
    rank.out += rows * (needing - 1);
  }
  for (const Piece* piece = begin; piece < end; ++piece) ranks[piece->rank()].seen = false;
}

}  // namespace wlb
