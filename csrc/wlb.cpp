#include "wlb.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace wlb {
namespace {

// A micro-batch's work is at most kMaxTokens * kMaxWorkPerToken = 2^62.
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 26;
constexpr int64_t kMaxWorkPerToken = int64_t{1} << 36;

void check_range(const char* name, int64_t value, int64_t limit) {
  if (value < 1 || value > limit)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 1 to " +
                                std::to_string(limit));
}

// Micro-batches by a growing sum; the smallest index goes first among equals.
class Ranking {
 public:
  explicit Ranking(size_t size) : sums_(size) {
    for (size_t i = 0; i < size; ++i) order_.emplace_hint(order_.end(), 0, i);
  }

  size_t least() const { return order_.begin()->second; }
  int64_t operator[](size_t i) const { return sums_[i]; }

  void add(size_t i, int64_t amount) {
    auto node = order_.extract({sums_[i], i});
    node.value().first = sums_[i] += amount;
    order_.insert(std::move(node));
  }

 private:
  std::vector<int64_t> sums_;
  std::set<std::pair<int64_t, size_t>> order_;
};

}  // namespace

WlbCore::WlbCore(int64_t num_micro_batches, int64_t max_tokens, std::vector<int64_t> outlier_thresholds)
    : num_micro_batches_(static_cast<size_t>(num_micro_batches)),
      max_tokens_(max_tokens),
      thresholds_(std::move(outlier_thresholds)),
      queues_(thresholds_.size()) {
  check_range("num_micro_batches", num_micro_batches, kMaxMicroBatches);
  check_range("max_tokens", max_tokens, kMaxTokens);
}

Packed WlbCore::step(const std::vector<Document>& arrived) {
  check(arrived);
  std::vector<Document> documents = std::exchange(remained_, {});
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
  std::stable_sort(documents.begin(), documents.end(), [](const Document& a, const Document& b) {
    return a.length != b.length ? a.length > b.length : a.index < b.index;
  });
  return place(documents);
}

Packed WlbCore::place(const std::vector<Document>& documents) {
  std::vector<std::vector<int64_t>> packed(num_micro_batches_);
  Ranking tokens(num_micro_batches_), load(num_micro_batches_);
  for (const Document& document : documents) {
    const auto has_room = [&](size_t i) { return tokens[i] + document.length <= max_tokens_; };
    const size_t target = has_room(load.least()) ? load.least() : tokens.least();
    if (!has_room(target)) {
      remained_.push_back(document);
      continue;
    }
    packed[target].push_back(document.index);
    tokens.add(target, document.length);
    load.add(target, document.work);
  }
  Packed result;
  result.order.reserve(documents.size());
  result.bounds.push_back(0);
  for (const auto& micro_batch : packed) {
    result.order.insert(result.order.end(), micro_batch.begin(), micro_batch.end());
    result.bounds.push_back(static_cast<int64_t>(result.order.size()));
  }
  return result;
}

void WlbCore::load(const std::vector<Document>& waiting, const std::vector<bool>& remained) {
  check(waiting);
  queues_.assign(thresholds_.size(), {});
  remained_.clear();
  for (size_t i = 0; i < waiting.size(); ++i) {
    std::vector<Document>* queue = remained[i] ? nullptr : queue_of(waiting[i].length);
    (queue ? *queue : remained_).push_back(waiting[i]);
  }
}

void WlbCore::check(const std::vector<Document>& documents) const {
  int64_t longest = 0;
  for (const Document& document : documents) {
    if (document.length < 1)
      throw std::invalid_argument("a document of " + std::to_string(document.length) +
                                  " tokens; lengths must be at least 1");
    longest = std::max(longest, document.length);
  }
  if (longest > max_tokens_)
    throw std::invalid_argument("a document of " + std::to_string(longest) + " tokens exceeds max_tokens " +
                                std::to_string(max_tokens_) + "; raise it");
  for (const Document& document : documents) {
    const int64_t limit = document.length * kMaxWorkPerToken;
    if (document.work < 0 || document.work > limit)
      throw std::invalid_argument("work " + std::to_string(document.work) + " of a document of " +
                                  std::to_string(document.length) + " tokens; it must be 0 to " +
                                  std::to_string(limit));
  }
}

// Null for a document below every threshold.
std::vector<Document>* WlbCore::queue_of(int64_t length) {
  const auto level = std::count_if(thresholds_.begin(), thresholds_.end(), [&](int64_t t) { return length >= t; });
  return level ? &queues_[static_cast<size_t>(level - 1)] : nullptr;
}

}  // namespace wlb
