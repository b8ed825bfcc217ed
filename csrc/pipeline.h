// The parts of planning for pipelines that need speed: longest paths through 1F1B, and micro-batches over ranks.
// tests/reference/pipeline.py and tests/reference/placement.py are the same in Python, to the bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace wlb {

// `PassGraph` of pipeline/graph.py.
struct PassGraph {
  const int32_t *first, *second, *end, *time;
  size_t size, num_slots;
};

// When the last pass ends, for each of `count` rows of work of `width` micro-batches, forward taking as much and
// backward twice as much; in 64-bit integers, or doubles where they are exact.
template <typename Time>
std::vector<Time> makespans(const PassGraph& graph, const Time* work, size_t count, size_t width) {
  constexpr size_t kLanes = 16;  // rows at once
  std::vector<std::array<Time, kLanes>> needs(2 * width), ends(graph.num_slots);
  std::vector<Time> last(count);
  for (size_t row = 0; row < count; row += kLanes) {
    const size_t lanes = std::min(kLanes, count - row);
    for (size_t k = 0; k < lanes; ++k)
      for (size_t m = 0; m < width; ++m) needs[2 * m + 1][k] = 2 * (needs[2 * m][k] = work[(row + k) * width + m]);
    for (size_t i = 0; i < graph.size; ++i) {
      const auto &first = ends[graph.first[i]], &second = ends[graph.second[i]], &need = needs[graph.time[i]];
      std::array<Time, kLanes> end;
      for (size_t k = 0; k < kLanes; ++k) end[k] = std::max(first[k], second[k]) + need[k];
      ends[graph.end[i]] = end;
    }
    std::copy_n(ends[graph.end[graph.size - 1]].begin(), lanes, last.begin() + row);
  }
  return last;
}

// When the nodes of `Graph` of pipeline/graph.py end, after a zero for the beginning of the step.
std::vector<double> node_ends(const int64_t* first, const int64_t* second, const double* times, size_t size);

// Micro-batches by rank, ascending; throws std::invalid_argument where not each rank can have as many. Work is not
// negative, and (total_weight * its size + largest_weight) * the largest fits 64 bits.
std::vector<int64_t> place(const std::vector<int64_t>& work, size_t dp, int64_t total_weight, int64_t largest_weight);

}  // namespace wlb
