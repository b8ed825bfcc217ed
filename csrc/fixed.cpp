#include "fixed.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "ranking.h"

namespace wlb {

FixedCore::FixedCore(int64_t context_length, int64_t crossover_tokens)
    : context_length_(context_length), crossover_tokens_(crossover_tokens) {
  check_range("context_length", context_length, 1, kMaxTokens);
  check_range("crossover_tokens", crossover_tokens, 0, kMaxWorkPerToken - kMaxTokens);
}

Pieces FixedCore::place(const std::vector<Document>& documents, int64_t num_windows) const {
  check_range("num_windows", num_windows, 1, kMaxMicroBatches);
  check_documents(documents, kMaxTokens);
  const int64_t room = num_windows * context_length_;
  int64_t tokens = 0;
  for (const Document& document : documents) {
    tokens += document.length;
    if (tokens > room)
      throw std::invalid_argument("the documents have more than the " + std::to_string(room) + " tokens of " +
                                  std::to_string(num_windows) + " windows; give more windows");
  }

  const size_t size = static_cast<size_t>(num_windows);
  Pieces pieces;
  Ranking squares(size), used(size);
  std::vector<int64_t> work(size);
  for (size_t i : longest_first(documents)) {
    const Document& document = documents[i];
    for (int64_t left = document.length; left > 0;) {
      const size_t whole = squares.least_within(used, context_length_ - left);
      const size_t window = whole < size ? whole : used.least();
      const int64_t length = std::min(left, context_length_ - used[window]);
      pieces.row.push_back(document.index);
      pieces.length.push_back(length);
      pieces.window.push_back(static_cast<int64_t>(window));
      squares.add(window, length * length);
      used.add(window, length);
      work[window] += length * (length + crossover_tokens_);
      left -= length;
    }
  }

  std::vector<size_t> by_work(size);
  std::iota(by_work.begin(), by_work.end(), size_t{0});
  std::stable_sort(by_work.begin(), by_work.end(), [&](size_t a, size_t b) { return work[a] > work[b]; });
  std::vector<int64_t> number(size);
  for (size_t k = 0; k < size; ++k) number[by_work[k]] = static_cast<int64_t>(k);
  for (int64_t& window : pieces.window) window = number[static_cast<size_t>(window)];
  return pieces;
}

}  // namespace wlb
