// Sharding of a micro-batch over context-parallel ranks, and the choice between ways to do it.
// megatron_wlb/plan/sharding/ is the reference; both give the same plans to the bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wlb {

struct Segment {
  int64_t document, start, stop;
};

struct Kernel {
  int64_t tile_rows;  // a power of two
  double launch, tile, query_tile;
  int64_t heads, parts;
  double exchange;
};

struct Sharding {
  std::string strategy;
  double time;  // predicted, of the slowest rank
  std::vector<std::vector<Segment>> calls;  // heads and tails of rank r: calls 2 * r and 2 * r + 1
};

// The best by predicted time; hybrid is tried with every one of most_shares. Throws std::invalid_argument for what
// cannot be sharded.
Sharding shard(const std::vector<int64_t>& lengths, int64_t cp_size, const std::vector<std::string>& strategies,
               const std::vector<double>& most_shares, const Kernel& kernel);

}  // namespace wlb
