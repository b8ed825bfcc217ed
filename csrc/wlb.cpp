#include "wlb.h"

#include <algorithm>
#include <utility>

#include "ranking.h"

namespace wlb {

WlbCore::WlbCore(int64_t num_micro_batches, int64_t max_tokens, std::vector<int64_t> outlier_thresholds)
    : num_micro_batches_(static_cast<size_t>(num_micro_batches)),
      max_tokens_(max_tokens),
      thresholds_(std::move(outlier_thresholds)),
      queues_(thresholds_.size()) {
  check_sizes(num_micro_batches, max_tokens);
}

Packed WlbCore::step(const std::vector<Document>& arrived, int64_t late_before) {
  check_documents(arrived, max_tokens_);
  std::vector<Document> late = std::exchange(remained_, {});
  const auto others = std::partition(late.begin(), late.end(), [&](const Document& d) { return d.index < late_before; });
  std::vector<Document> documents(others, late.end());
  late.erase(others, late.end());
  documents.reserve(documents.size() + arrived.size());
  for (const Document& document : arrived) {
    std::vector<Document>* queue = queue_of(document.length);
    if (!queue) {
      documents.push_back(document);
      continue;
    }
    queue->push_back(document);
    if (queue->size() >= num_micro_batches_) {
      const auto popped = queue->begin() + static_cast<std::ptrdiff_t>(num_micro_batches_);
      documents.insert(documents.end(), queue->begin(), popped);
      queue->erase(queue->begin(), popped);
    }
  }

  std::vector<Placed> placed;
  placed.reserve(late.size() + documents.size());
  Ranking tokens(num_micro_batches_), load(num_micro_batches_);
  const auto place = [&](const Document& document) {
    const int64_t limit = max_tokens_ - document.length;
    const size_t target = tokens[load.least()] <= limit ? load.least() : tokens.least();
    if (tokens[target] > limit) {
      remained_.push_back(document);
      return;
    }
    placed.push_back({document.index, target});
    tokens.add(target, document.length);
    load.add(target, document.work);
  };
  for (size_t i : longest_first(late)) place(late[i]);
  for (size_t i : longest_first(documents)) place(documents[i]);
  return packed(placed, num_micro_batches_);
}

void WlbCore::load(const std::vector<Document>& waiting, const std::vector<bool>& remained) {
  check_documents(waiting, max_tokens_);
  queues_.assign(thresholds_.size(), {});
  remained_.clear();
  for (size_t i = 0; i < waiting.size(); ++i) {
    std::vector<Document>* queue = remained[i] ? nullptr : queue_of(waiting[i].length);
    (queue ? *queue : remained_).push_back(waiting[i]);
  }
}

// Null for a document below every threshold.
std::vector<Document>* WlbCore::queue_of(int64_t length) {
  const auto level = std::count_if(thresholds_.begin(), thresholds_.end(), [&](int64_t t) { return length >= t; });
  return level ? &queues_[static_cast<size_t>(level - 1)] : nullptr;
}

}  // namespace wlb
