#include "document.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace wlb {
namespace {

// A micro-batch's work is at most kMaxTokens * kMaxWorkPerToken = 2^62.
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 26;
constexpr int64_t kMaxWorkPerToken = int64_t{1} << 36;

}  // namespace

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " +
                                std::to_string(least) + " to " + std::to_string(most));
}

void check_sizes(int64_t num_micro_batches, int64_t max_tokens) {
  check_range("num_micro_batches", num_micro_batches, 1, kMaxMicroBatches);
  check_range("max_tokens", max_tokens, 1, kMaxTokens);
}

void check_documents(const std::vector<Document>& documents, int64_t max_tokens) {
  int64_t longest = 0;
  for (const Document& document : documents) {
    if (document.length < 1)
      throw std::invalid_argument("a document of " + std::to_string(document.length) +
                                  " tokens; lengths must be at least 1");
    longest = std::max(longest, document.length);
  }
  if (longest > max_tokens)
    throw std::invalid_argument("a document of " + std::to_string(longest) + " tokens exceeds max_tokens " +
                                std::to_string(max_tokens) + "; raise it");
  for (const Document& document : documents) {
    const int64_t limit = document.length * kMaxWorkPerToken;
    if (document.work < 0 || document.work > limit)
      throw std::invalid_argument("work " + std::to_string(document.work) + " of a document of " +
                                  std::to_string(document.length) + " tokens; it must be 0 to " +
                                  std::to_string(limit));
  }
}

Packed packed(const std::vector<std::vector<int64_t>>& micro_batches) {
  Packed result;
  result.bounds.push_back(0);
  for (const auto& micro_batch : micro_batches) {
    result.order.insert(result.order.end(), micro_batch.begin(), micro_batch.end());
    result.bounds.push_back(static_cast<int64_t>(result.order.size()));
  }
  return result;
}

}  // namespace wlb
