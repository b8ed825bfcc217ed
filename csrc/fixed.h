// Fixed-4D: longest first into windows of fixed length, by attention work.
// PythonFixedCore in megatron_wlb/plan/packing/fixed.py is the reference; both give the same pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "document.h"

namespace wlb {

// One entry per piece of a document, in the order of placement.
struct Pieces {
  std::vector<int64_t> row, length, window;
};

// Throws std::invalid_argument on values whose sums might not fit 64 bits, and on more tokens than room.
class FixedCore {
 public:
  FixedCore(int64_t context_length, int64_t crossover_tokens);

  // Rows are the documents' indices; windows are numbered by their work, the most first. Mostly O(n log windows) for n
  // documents.
  Pieces place(const std::vector<Document>& documents, int64_t num_windows) const;

 private:
  int64_t context_length_, crossover_tokens_;
};

}  // namespace wlb
