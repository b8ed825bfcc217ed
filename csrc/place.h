// Placement of a step's documents in micro-batches, for the least cost of the costliest rank. docs/packing.md says why;
// tests/reference/place.py says the same in Python, to the bit: values are doubles computed in the same order in both,
// without fused multiply-add.
#pragma once

#include <cstdint>
#include <vector>

#include "bins.h"
#include "document.h"

namespace wlb {

struct Packed {
  std::vector<int64_t> rows;    // of documents, by micro-batch
  std::vector<int64_t> bounds;  // micro-batch i is rows[bounds[i], bounds[i + 1])
};

// Throws std::invalid_argument on values whose sums or casts might not fit 64 bits.
void check_documents(const std::vector<Document>& documents, const Sizes& sizes);

// Longest first, ties in the order given.
std::vector<Document> by_length(const std::vector<Document>& documents);

// Documents in this order to where there is room; then some are exchanged. Those that fit nowhere are left out.
Packed place_documents(const std::vector<Document>& documents, const Sizes& sizes);

}  // namespace wlb
