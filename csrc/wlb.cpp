#include "wlb.h"

#include <algorithm>
#include <utility>

namespace wlb {
namespace {

// Micro-batches by a growing sum, in a tournament: the smallest wins, the smallest index among equals.
class Ranking {
 public:
  explicit Ranking(size_t size) : sums_(size) {
    while (leaves_ < size) leaves_ *= 2;
    winners_.resize(2 * leaves_);
    for (size_t i = 0; i < leaves_; ++i) winners_[leaves_ + i] = i;
    for (size_t node = leaves_ - 1; node > 0; --node) play(node);
  }

  size_t least() const { return winners_[1]; }
  int64_t operator[](size_t i) const { return sums_[i]; }

  void add(size_t i, int64_t amount) {
    sums_[i] += amount;
    for (size_t node = (leaves_ + i) / 2; node > 0; node /= 2) play(node);
  }

 private:
  void play(size_t node) {
    const size_t left = winners_[2 * node], right = winners_[2 * node + 1];
    winners_[node] = right >= sums_.size() || sums_[left] <= sums_[right] ? left : right;
  }

  std::vector<int64_t> sums_;
  std::vector<size_t> winners_;  // of every node; the root is 1, the leaves follow the nodes
  size_t leaves_ = 1;
};

}  // namespace

WlbCore::WlbCore(int64_t num_micro_batches, int64_t max_tokens, std::vector<int64_t> outlier_thresholds)
    : num_micro_batches_(static_cast<size_t>(num_micro_batches)),
      max_tokens_(max_tokens),
      thresholds_(std::move(outlier_thresholds)),
      queues_(thresholds_.size()) {
  check_sizes(num_micro_batches, max_tokens);
}

Packed WlbCore::step(const std::vector<Document>& arrived) {
  check_documents(arrived, max_tokens_);
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
  std::sort(documents.begin(), documents.end(), [](const Document& a, const Document& b) {
    return a.length != b.length ? a.length > b.length : a.index < b.index;
  });
  return place(documents);
}

Packed WlbCore::place(const std::vector<Document>& documents) {
  std::vector<std::vector<int64_t>> micro_batches(num_micro_batches_);
  Ranking tokens(num_micro_batches_), load(num_micro_batches_);
  for (const Document& document : documents) {
    const auto has_room = [&](size_t i) { return tokens[i] + document.length <= max_tokens_; };
    const size_t target = has_room(load.least()) ? load.least() : tokens.least();
    if (!has_room(target)) {
      remained_.push_back(document);
      continue;
    }
    micro_batches[target].push_back(document.index);
    tokens.add(target, document.length);
    load.add(target, document.work);
  }
  return packed(micro_batches);
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
