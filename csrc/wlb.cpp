#include "wlb.h"

#include "ranking.h"

namespace wlb {

std::vector<int64_t> place_wlb(const std::vector<Document>& documents, int64_t num_micro_batches, int64_t max_tokens) {
  check_sizes(num_micro_batches, max_tokens);
  check_documents(documents, max_tokens);
  const size_t n = static_cast<size_t>(num_micro_batches);
  Ranking tokens(n), load(n);
  std::vector<int64_t> placed;
  placed.reserve(documents.size());
  for (const Document& document : documents) {
    const int64_t limit = max_tokens - document.length;
    const size_t target = tokens[load.least()] <= limit ? load.least() : tokens.least();
    if (tokens[target] > limit) {
      placed.push_back(num_micro_batches);
      continue;
    }
    placed.push_back(static_cast<int64_t>(target));
    tokens.add(target, document.length);
    load.add(target, document.work);
  }
  return placed;
}

}  // namespace wlb
