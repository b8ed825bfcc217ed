// Pieces of documents on context-parallel ranks, and what the kernel model says of them.
// `KernelModel` of megatron_wlb/hardware/profile.py and megatron_wlb/sharding/routing.py count the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace wlb {

struct Segment {
  int64_t document, start, stop;
};

struct Counts {
  int64_t tiles = 0, query_tiles = 0;

  void operator+=(const Counts& other) {
    tiles += other.tiles;
    query_tiles += other.query_tiles;
  }
};

// `KernelModel`.
struct Kernel {
  int64_t tile_rows;  // a power of two
  double launch, tile, query_tile;
  int64_t heads, parts;
  double exchange;  // price of a row that is moved
  int tile_bits = bits(tile_rows);

  // Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * tile_rows and sees ceil(that / tile_rows) key tiles.
  Counts count(int64_t start, int64_t stop) const {
    const int64_t mask = tile_rows - 1, rows = stop - start, full = rows >> tile_bits;
    const int64_t first = (start + tile_rows + mask) >> tile_bits;
    const bool partial = (rows & mask) > 0;
    return {full * first + full * (full - 1) / 2 + (partial ? (stop + mask) >> tile_bits : 0), full + partial};
  }

  double time(int64_t launches, double tiles, double query_tiles) const {
    return static_cast<double>(launches) * launch +
           static_cast<double>(heads) * (tile * tiles + query_tile * query_tiles);
  }

  double time(int64_t launches, const Counts& counts) const {
    return time(launches, static_cast<double>(counts.tiles), static_cast<double>(counts.query_tiles));
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
  Counts counts;
  int64_t heads = 0, tails = 0;  // pieces
  int64_t in = 0, out = 0;       // rows of K and V that arrive, and that leave, once for every rank that needs them
  bool seen = false;             // for `add_moved`

  int64_t calls() const { return (heads > 0) + (tails > 0); }

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
