// A sharding in the making.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pieces.h"

namespace wlb {

// Pieces on ranks, and what the kernel model asks of them. Pieces of a document come one after the other.
class Draft {
 public:
  const std::string strategy;

  Draft(const std::string& name, const Kernel& kernel, size_t cp_size, size_t documents)
      : strategy(name), kernel_(kernel), ranks_(cp_size) {
    pieces_.reserve(2 * documents);
  }

  void add(size_t call, const Segment& segment) {
    if (segment.start == 0) end_document();
    pieces_.push_back({call, segment});
    ranks_[call / 2].add(pieces_.back(), kernel_.count(segment.start, segment.stop));
  }

  // To rank c, as its head, or 2 * cp_size - 1 - c, as its tail.
  void add_chunk(int64_t chunk, const Segment& segment) {
    const auto c = static_cast<size_t>(chunk);
    add(c < ranks_.size() ? 2 * c : 2 * (2 * ranks_.size() - 1 - c) + 1, segment);
  }

  // When all documents are added.
  void finish() {
    end_document();
    for (const Load& rank : ranks_)
      slowest_ = std::max(slowest_, kernel_.time(rank.calls() * launches(), rank.at_once()));
  }

  // Predicted, of the slowest rank, with the exchange.
  double time() const { return slowest_ + exchange(); }

  // Of the document that was added last, nothing yet.
  double exchange() const { return kernel_.exchange * static_cast<double>(moved_); }

  double work(size_t rank) const { return kernel_.time(0, ranks_[rank].counts); }

  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  int64_t launches() const { return moved_ > 0 ? kernel_.kv_chunks : 1; }  // of a call

  void end_document() {
    if (pieces_.size() - ended_ > 1) {
      const Piece *begin = pieces_.data() + ended_, *end = pieces_.data() + pieces_.size();
      add_moved(begin, end, ranks_);
      if (kernel_.hidden > 0 && is_shared(begin, end))
        for (const Piece* piece = begin; piece < end; ++piece) ranks_[piece->rank()].hide(*piece, kernel_);
      for (; begin < end; ++begin) moved_ = std::max({moved_, ranks_[begin->rank()].in, ranks_[begin->rank()].out});
    }
    ended_ = pieces_.size();
  }

  const Kernel& kernel_;
  std::vector<Load> ranks_;
  std::vector<Piece> pieces_;
  size_t ended_ = 0;  // pieces of documents before the last
  int64_t moved_ = 0;  // rows of K and V through the busiest rank
  double slowest_ = 0;
};

}  // namespace wlb
