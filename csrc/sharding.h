// Sharding of a micro-batch over context-parallel ranks, and the choice between ways to do it.
// tests/reference/sharding.py is the same in Python, to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pieces.h"
#include "rounds.h"

namespace wlb {

struct Choice {
  std::vector<std::string> strategies;
  std::vector<double> most_shares;  // with each of which hybrid is tried
  Kernel kernel;
  std::optional<RoundCosts> costs;  // of the rounds in which attention is to run
};

struct Sharding {
  std::string strategy;
  double time;                    // predicted, of the slowest rank
  std::vector<Segment> segments;  // of all calls, rank by rank
  std::vector<int64_t> bounds;    // where each call begins
  std::vector<double> key_bounds;     // of `Rounds`
};

// A single rank holds all in one piece. Throws std::invalid_argument for what cannot be sharded.
Sharding choose_sharding(const std::vector<int64_t>& lengths, int64_t cp_size, const Choice& choice);

}  // namespace wlb
