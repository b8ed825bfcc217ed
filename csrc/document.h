// Documents as packing sees them, their order by length, and limits that keep sums of their work within 64 bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace wlb {

// A micro-batch's work is at most kMaxTokens * kMaxWorkPerToken = 2^62.
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 26;
constexpr int64_t kMaxWorkPerToken = int64_t{1} << 36;

// `row` is its place among those that wait, in the order of the stream; `arrival` the step in which it came.
struct Document {
  int64_t row, length, work, arrival;
};

// Limits are inclusive.
inline void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " +
                                std::to_string(least) + " to " + std::to_string(most));
}

// Positions of documents: longest first, ties in the order given. O(n).
inline std::vector<size_t> longest_first(const std::vector<int64_t>& lengths) {
  // Keys of (longest - length, position), sorted by as many digits of the length as there are, the least digit first.
  constexpr int kDigitBits = 9, kPositionBits = 37;
  constexpr size_t kDigit = (size_t{1} << kDigitBits) - 1, kPosition = (size_t{1} << kPositionBits) - 1;
  static_assert(sizeof(size_t) == 8 && kMaxTokens < int64_t{1} << (64 - kPositionBits));
  int64_t longest = 0;
  for (int64_t length : lengths) longest = std::max(longest, length);
  std::vector<size_t> keys(lengths.size()), sorted(lengths.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<size_t>(longest - lengths[i]) << kPositionBits | i;
  for (int shift = 0; longest >> shift; shift += kDigitBits) {
    const auto digit = [&](size_t key) { return key >> (kPositionBits + shift) & kDigit; };
    std::array<size_t, kDigit + 1> places{};
    for (size_t key : keys) ++places[digit(key)];
    std::exclusive_scan(places.begin(), places.end(), places.begin(), size_t{0});
    for (size_t key : keys) sorted[places[digit(key)]++] = key;
    keys.swap(sorted);
  }
  for (size_t& key : keys) key &= kPosition;
  return keys;
}

}  // namespace wlb
