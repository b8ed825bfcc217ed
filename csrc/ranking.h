// Ranks by a sum (their cost, their tokens): the least at any time, ties to the smaller index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace wlb {

// A tournament. `add` takes O(log size).
class Ranking {
 public:
  explicit Ranking(size_t size) : size_(size) {
    while (leaves_ < size) leaves_ *= 2;
    sums_.resize(leaves_ + 1, std::numeric_limits<int64_t>::max());  // what is beyond the last never wins
    winners_.resize(2 * leaves_);
    for (size_t i = 0; i < leaves_; ++i) winners_[leaves_ + i] = i;
    for (size_t i = 0; i < size; ++i) sums_[i] = 0;
    for (size_t node = leaves_ - 1; node > 0; --node) play(node);
  }

  size_t least() const { return winners_[1]; }
  int64_t operator[](size_t i) const { return sums_[i]; }

  void add(size_t i, int64_t amount) {
    sums_[i] += amount;
    for (size_t node = (leaves_ + i) / 2; node > 0; node /= 2) play(node);
  }

  // The least of those whose sum in `other`, a ranking of as many, is at most `limit`; the size if there are none.
  // Mostly O(log size), at worst O(size).
  size_t least_within(const Ranking& other, int64_t limit) const { return least_within(other, limit, 1, size_); }

 private:
  void play(size_t node) {
    const size_t left = winners_[2 * node], right = winners_[2 * node + 1];
    winners_[node] = sums_[left] <= sums_[right] ? left : right;
  }

  // The same below `node`, unless `best` is less.
  size_t least_within(const Ranking& other, int64_t limit, size_t node, size_t best) const {
    const size_t winner = winners_[node];
    if (other[other.winners_[node]] > limit || sums_[winner] >= sums_[best]) return best;
    if (other[winner] <= limit) return winner;
    best = least_within(other, limit, 2 * node, best);
    return least_within(other, limit, 2 * node + 1, best);
  }

  size_t size_;
  std::vector<int64_t> sums_;
  std::vector<size_t> winners_;  // of every node; the root is 1, the leaves follow the nodes
  size_t leaves_ = 1;
};

}  // namespace wlb
