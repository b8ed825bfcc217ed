#include "place.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace wlb {
namespace {

// Exchanges of a step at most, and micro-batches that each is tried with.
constexpr int64_t kExchanges = 200, kLightest = 4;

// Exchanges documents of the heaviest micro-batch of the costliest rank for less, while that lowers the cost: with
// the lightest micro-batches of that rank, if it waits for its largest, and of the cheapest other ranks.
void refine(std::vector<std::vector<Document>>& held, Bins& bins, int64_t max_tokens) {
  const double least = bins.even_cost(real(bins.total_work));
  using Amounts = std::vector<std::pair<int64_t, size_t>>;
  const auto lightest_of = [](Amounts all) {
    const auto few = std::min(all.size(), static_cast<size_t>(kLightest));
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(few), all.end());
    all.resize(few);
    return all;
  };
  for (int64_t k = 0; k < kExchanges; ++k) {
    size_t worst = 0;
    for (size_t r = 1; r < bins.ranks.size(); ++r)
      if (bins.cost[r] > bins.cost[worst]) worst = r;
    if (real(bins.cost[worst]) <= 1.0002 * least) return;
    const size_t begin = bins.at(worst, 0), end = bins.at(worst, bins.each);
    size_t here = begin;
    for (size_t i = begin; i < end; ++i)
      if (bins.work[i] > bins.work[here]) here = i;
    Amounts ranks, inside;
    for (size_t r = 0; r < bins.ranks.size(); ++r)
      if (r != worst) ranks.push_back({bins.cost[r], r});
    for (size_t i = begin; i < end && bins.per_largest; ++i) inside.push_back({bins.work[i], i});
    std::vector<size_t> lightest;
    for (const auto& [cost, r] : lightest_of(ranks)) lightest.push_back(bins.work.least_of(r));
    for (const auto& [work, i] : lightest_of(inside))
      if (i != here) lightest.push_back(i);

    int64_t best = bins.cost[worst];
    std::optional<size_t> other;
    size_t best_a = 0, best_b = 0;  // which goes, and which comes back, counted from 1; 0: none
    for (const size_t there : lightest) {
      const size_t rank = bins.rank_of(there);
      const bool same = rank == worst;
      const int64_t rest = bins.largest_without(worst, here, there);
      const int64_t rest_there = bins.largest_without(rank, there, there);
      for (size_t a = 0; a < held[here].size(); ++a) {
        for (size_t b = 0; b <= held[there].size(); ++b) {
          const Document& down = held[here][a];
          const Document up = b ? held[there][b - 1] : Document{};
          const int64_t work = down.work - up.work, tokens = down.length - up.length;
          if (work <= 0 || bins.tokens[there] + tokens > max_tokens ||
              bins.tokens[here] - tokens > max_tokens)
            continue;
          const int64_t lower = std::max(rest, bins.work[here] - work), higher = bins.work[there] + work;
          const int64_t cost = same ? bins.cost_with(worst, 0, std::max(lower, higher))
                                    : std::max(bins.cost_with(worst, -work, lower),
                                               bins.cost_with(rank, work, std::max(rest_there, higher)));
          if (cost < best) best = cost, other = there, best_a = a, best_b = b;
        }
      }
    }
    if (!other) return;
    auto &from = held[here], &to = held[*other];
    const Document down = from[best_a], up = best_b ? to[best_b - 1] : Document{};
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(best_a));
    if (best_b) to.erase(to.begin() + static_cast<std::ptrdiff_t>(best_b - 1)), from.push_back(up);
    to.push_back(down);
    bins.change(here, up.work - down.work, up.length - down.length);
    bins.change(*other, down.work - up.work, down.length - up.length);
  }
}

}  // namespace

void check_documents(const std::vector<Document>& documents, const Sizes& sizes) {
  check_range("num_micro_batches", sizes.num_micro_batches, 1, kMaxMicroBatches);
  check_range("max_tokens", sizes.max_tokens, 1, kMaxTokens);
  check_range("ranks", sizes.ranks, 1, sizes.num_micro_batches);
  if (sizes.num_micro_batches % sizes.ranks)
    throw std::invalid_argument(std::to_string(sizes.num_micro_batches) + " micro-batches cannot be shared by " +
                                std::to_string(sizes.ranks) + " ranks");
  check_range("total_weight", sizes.total_weight, 1, kMaxWeight);
  check_range("largest_weight", sizes.largest_weight, 0, kMaxWeight);
  int64_t left = kMaxCost / (sizes.total_weight + sizes.largest_weight);
  for (const Document& d : documents) {
    check_range("a document's length", d.length, 1, sizes.max_tokens);
    check_range("a document's work", d.work, 0, d.length * kMaxWorkPerToken);
    check_range("the work of a document after those before it", d.work, 0, left);
    left -= d.work;
  }
}

std::vector<Document> by_length(const std::vector<Document>& documents) {
  std::vector<int64_t> lengths;
  for (const Document& d : documents) lengths.push_back(d.length);
  std::vector<Document> sorted;
  for (size_t i : longest_first(lengths)) sorted.push_back(documents[i]);
  return sorted;
}

Packed place_documents(const std::vector<Document>& documents, const Sizes& sizes) {
  Bins bins(sizes);
  std::vector<std::vector<Document>> held(bins.work.size());
  for (const Document& d : documents) {
    const auto at = bins.next_within(sizes.max_tokens - d.length);
    if (!at) continue;
    bins.add(d, *at);
    held[*at].push_back(d);
  }
  refine(held, bins, sizes.max_tokens);
  Packed packed{{}, {0}};
  for (size_t i = 0; i < bins.ranks.size() * bins.each; ++i) {
    auto& rows = held[bins.at(i / bins.each, i % bins.each)];
    std::sort(rows.begin(), rows.end(), [](const Document& a, const Document& b) { return a.row < b.row; });
    for (const Document& d : rows) packed.rows.push_back(d.row);
    packed.bounds.push_back(static_cast<int64_t>(packed.rows.size()));
  }
  return packed;
}

}  // namespace wlb
