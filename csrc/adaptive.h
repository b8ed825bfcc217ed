// Adaptive packing: which waiting documents run now, decided by whether the step that carries them stays balanced.
// PythonAdaptiveCore in megatron_wlb/plan/packing/adaptive_core.py is the reference; adaptive.py beside it explains the
// algorithm. Both give the same plans to the bit: ratios are doubles computed in the same order in both, without fused
// multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

struct AdaptiveSettings {
  int64_t num_micro_batches, max_tokens, context_length;
  bool constant_tokens;
  int64_t max_delay_steps;
  double tolerance, age_tolerance, ratio_limit, token_band, token_repay, imbalance_price, token_price;
};

// Throws std::invalid_argument, before anything changes, on values whose sums or casts might not fit 64 bits. An
// instance belongs to one thread at a time.
class AdaptiveCore {
 public:
  explicit AdaptiveCore(const AdaptiveSettings& settings);

  // Documents join those that wait; their indices ascend, above all of those.
  void add(const std::vector<Document>& documents);

  // One step. `credit` tokens are owed to earlier steps.
  Packed step(int64_t step, int64_t credit);

  const std::vector<Document>& waiting() const { return pool_; }

 private:
  struct Bins;
  struct Fluid;
  std::vector<char> release(const std::vector<Document>& solid, const Bins& forced, const Fluid& fluid,
                            int64_t step) const;
  Packed place(const std::vector<Document>& chosen, int64_t step);
  bool is_forced(const Document& document, int64_t step) const;

  AdaptiveSettings settings_;
  size_t n_;
  int64_t batch_tokens_;
  std::vector<Document> pool_;  // ordered by index
};

}  // namespace wlb
