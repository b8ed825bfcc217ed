// Plain-4D: documents one after the other, cut at every multiple of the context window.
// PythonOriginalCore in megatron_wlb/plan/packing/original.py is the reference; both give the same pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// One entry per piece of a document, in order.
struct Cut {
  std::vector<int64_t> row, offset, length;
  std::vector<int64_t> bounds;  // micro-batch i is pieces [bounds[i], bounds[i + 1]); the others are left over
};

// Throws std::invalid_argument on values whose sums might not fit 64 bits.
class OriginalCore {
 public:
  OriginalCore(int64_t num_micro_batches, int64_t context_length);

  // Rows are the documents' indices. O(n + N) for n documents.
  Cut cut(const std::vector<Document>& documents) const;

 private:
  size_t num_micro_batches_;
  int64_t context_length_;
};

}  // namespace wlb
