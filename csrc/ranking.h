// Groups of sums, such as the work of each rank's micro-batches: the least of a group at any time, or of groups that
// are sums themselves. Ties go to the smaller index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace wlb {

// A tournament in each group, and one of the groups' least. `add` takes O(log size). Sums are numbered by `at`.
class Ranking {
 public:
  explicit Ranking(size_t groups, size_t each = 1) {
    while (groups_ < groups) groups_ *= 2;
    while (stride_ < each) stride_ *= 2;
    sums_.resize(leaves() + 1, std::numeric_limits<int64_t>::max());  // what is beyond the last never wins
    winners_.resize(2 * leaves());
    for (size_t i = 0; i < leaves(); ++i) winners_[leaves() + i] = i;
    for (size_t group = 0; group < groups; ++group)
      for (size_t i = 0; i < each; ++i) sums_[at(group, i)] = 0;
    for (size_t node = leaves() - 1; node > 0; --node) play(node);
  }

  size_t at(size_t group, size_t i) const { return group * stride_ + i; }
  size_t size() const { return leaves(); }
  int64_t operator[](size_t i) const { return sums_[i]; }

  size_t least() const { return winners_[1]; }
  size_t least_of(size_t group) const { return winners_[groups_ + group]; }

  void add(size_t i, int64_t amount) {
    sums_[i] += amount;
    for (size_t node = (leaves() + i) / 2; node > 0; node /= 2) play(node);
  }

  // The least of those whose sum in `other` is at most `limit`; `size` if there are none. A group of `other` counts by
  // its least if these are single sums. Mostly O(log size), at worst O(size).
  size_t least_within(const Ranking& other, int64_t limit) const { return least_within(other, limit, 1, size()); }
  size_t least_of_within(size_t group, const Ranking& other, int64_t limit) const {
    return least_within(other, limit, groups_ + group, size());
  }

 private:
  size_t leaves() const { return groups_ * stride_; }

  void play(size_t node) {
    const size_t left = winners_[2 * node], right = winners_[2 * node + 1];
    winners_[node] = sums_[left] <= sums_[right] ? left : right;
  }

  // The same below `node`, unless `best` is less.
  size_t least_within(const Ranking& other, int64_t limit, size_t node, size_t best) const {
    const size_t winner = winners_[node];
    if (other[other.winners_[node]] > limit || sums_[winner] >= sums_[best]) return best;
    if (other[other.winners_[leaves() + winner]] <= limit) return winner;
    best = least_within(other, limit, 2 * node, best);
    return least_within(other, limit, 2 * node + 1, best);
  }

  size_t groups_ = 1, stride_ = 1;  // powers of two
  std::vector<int64_t> sums_;
  std::vector<size_t> winners_;  // of every node; the root is 1, groups follow the nodes above them, leaves all nodes
};

}  // namespace wlb
