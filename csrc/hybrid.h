// Hybrid sharding: what ranks hold so far, and which of them the next document goes to.
// tests/reference/hybrid.py describes it, and is the same in Python, to the bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "draft.h"

namespace wlb {

// Those ranks first that would end with least work if what is left fills their room (with most, if sign is -1).
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

  // The least of ends_, which are kNone for ranks without room for so many tokens.
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

}  // namespace wlb
