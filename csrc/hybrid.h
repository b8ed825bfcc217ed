// Hybrid sharding: what ranks hold so far, and which of them the next document goes to.
// tests/reference/hybrid.py describes it, and is the same in Python, to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft.h"

namespace wlb {

// Those ranks first that would end with least work if what is left to place fills their room (with most, if sign is -1).
class Ranks {
 public:
  double per_token = 0, sign = 1;  // mean work of a token that is left
  double most_work = 0;

  Ranks(Draft& draft, int64_t cp_size, int64_t tokens, int64_t tile_rows);

  // Whole on one rank, or cut where none has the room.
  void fill(int64_t document, int64_t length);

  // As heads and tails on `share` ranks, or on more where too few have the room.
  void spread(int64_t document, int64_t length, int64_t share);

 private:
  int64_t room(size_t rank) const { return static_cast<int64_t>(room_[rank]); }
  double find_ends(int64_t least);
  size_t first_with_room(int64_t least);
  bool choose(int64_t least, int64_t count);
  void put(size_t rank, size_t call, const Segment& segment);

  Draft& draft_;
  size_t size_;
  int64_t tile_;
  // In doubles, which hold tokens exactly, for loops that compilers make vectors of; padded with ranks without room.
  std::vector<double> room_, work_, ends_;
  std::vector<size_t> chosen_;
  std::vector<int64_t> sizes_, heads_;
};

}  // namespace wlb
