// Algorithm 1 of WLB-LLM (section 4.3): variable-length greedy packing with multi-level outlier queues.
// PythonWlbCore in megatron_wlb/plan/packing/wlb.py is the reference; both give the same plans to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// Throws std::invalid_argument, before anything changes, on values whose sums might not fit 64 bits. An instance
// belongs to one thread at a time.
class WlbCore {
 public:
  WlbCore(int64_t num_micro_batches, int64_t max_tokens, std::vector<int64_t> outlier_thresholds);

  // One pass of the algorithm's loop over the documents of one global batch, in O(n log N). What remained of an index
  // below `late_before` is placed first.
  Packed step(const std::vector<Document>& arrived, int64_t late_before = 0);

  // Replaces all waiting documents; those with `remained` and those below every threshold run next.
  void load(const std::vector<Document>& waiting, const std::vector<bool>& remained);

  const std::vector<std::vector<Document>>& queues() const { return queues_; }
  const std::vector<Document>& remained() const { return remained_; }

 private:
  std::vector<Document>* queue_of(int64_t length);

  size_t num_micro_batches_;
  int64_t max_tokens_;
  std::vector<int64_t> thresholds_;
  std::vector<std::vector<Document>> queues_;
  std::vector<Document> remained_;
};

}  // namespace wlb
