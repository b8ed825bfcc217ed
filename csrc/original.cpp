#include "original.h"

#include <algorithm>

namespace wlb {

OriginalCore::OriginalCore(int64_t num_micro_batches, int64_t context_length)
    : num_micro_batches_(static_cast<size_t>(num_micro_batches)), context_length_(context_length) {
  check_range("num_micro_batches", num_micro_batches, 1, kMaxMicroBatches);
  check_range("context_length", context_length, 1, kMaxTokens);
}

Cut OriginalCore::cut(const std::vector<Document>& documents) const {
  check_documents(documents, kMaxTokens);
  Cut result;
  result.bounds = {0};
  int64_t room = context_length_;  // of the window that is being filled
  for (const Document& document : documents) {
    for (int64_t offset = 0; offset < document.length;) {
      const bool windows_left = result.bounds.size() <= num_micro_batches_;
      const int64_t left = document.length - offset, length = windows_left ? std::min(left, room) : left;
      result.row.push_back(document.index);
      result.offset.push_back(offset);
      result.length.push_back(length);
      offset += length;
      if (!windows_left || (room -= length) > 0) continue;
      result.bounds.push_back(static_cast<int64_t>(result.row.size()));
      room = context_length_;
    }
  }
  result.bounds.resize(num_micro_batches_ + 1, static_cast<int64_t>(result.row.size()));
  return result;
}

}  // namespace wlb
