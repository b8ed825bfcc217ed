#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "delay.h"
#include "pipeline.h"
#include "place.h"
#include "sharding.h"

namespace py = pybind11;
using py::literals::operator""_a;
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

namespace {

// The values of a 1-d array of exactly int64, strided or not, as many as there are lengths.
std::vector<int64_t> int64s(const py::array& source, const char* name, const py::array& lengths) {
  if (!py::isinstance<py::array_t<int64_t>>(source) || source.ndim() != 1)
    throw std::invalid_argument(std::string(name) + " must be a 1-d array of int64, not " +
                                std::to_string(source.ndim()) + "-d of " +
                                py::str(source.dtype()).cast<std::string>());
  if (source.size() != lengths.size())
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(source.size()) + " elements, length has " +
                                std::to_string(lengths.size()) + "; give as many");
  const auto view = source.unchecked<int64_t, 1>();
  std::vector<int64_t> values(static_cast<size_t>(source.size()));
  for (py::ssize_t k = 0; k < source.size(); ++k) values[static_cast<size_t>(k)] = view(k);
  return values;
}

template <typename T>
Array<T> array(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <typename Call>
auto without_gil(Call&& call) {
  py::gil_scoped_release release;
  return call();
}

// An attribute of one of the package's dataclasses or named tuples.
template <typename T>
T value(const py::handle& object, const char* name) {
  return object.attr(name).cast<T>();
}

wlb::Kernel kernel_model(const py::handle& k) {
  const auto window = value<std::optional<int64_t>>(k, "window");
  const double hidden = window ? 0 : value<double>(k, "hidden");  // windows are not measured
  return {value<int64_t>(k, "tile_rows"), value<double>(k, "launch"),   value<double>(k, "tile"),
          value<double>(k, "query_tile"), hidden,                       value<int64_t>(k, "heads"),
          value<int64_t>(k, "kv_chunks"), value<double>(k, "exchange"), window};
}

std::optional<wlb::RoundCosts> round_costs(const py::handle& c) {
  if (c.is_none()) return {};
  const py::object exchange = c.attr("exchange");
  return wlb::RoundCosts{kernel_model(c.attr("forward")), kernel_model(c.attr("backward")),
                         value<double>(exchange, "latency"), value<double>(exchange, "arrive"),
                         value<double>(exchange, "leave"), value<double>(exchange, "prefetch"),
                         value<double>(c, "merge"), value<std::vector<std::vector<double>>>(c, "key_bounds")};
}

wlb::Sizes sizes_of(const py::handle& s) {
  return {value<int64_t>(s, "num_micro_batches"), value<int64_t>(s, "ranks"), value<int64_t>(s, "total_weight"),
          value<int64_t>(s, "largest_weight"), value<int64_t>(s, "max_tokens")};
}

wlb::Limits limits_of(const py::handle& l) {
  return {value<int64_t>(l, "unit_weight"), value<int64_t>(l, "batch_tokens"), value<int64_t>(l, "crossover_tokens"),
          value<int64_t>(l, "max_delay_steps")};
}

// (rows by micro-batch, bounds of micro-batches)
auto place_documents(const py::array& length, const py::array& work, const py::object& sizes) {
  const auto lengths = int64s(length, "length", length), works = int64s(work, "work", length);
  std::vector<wlb::Document> documents(lengths.size());
  for (size_t k = 0; k < documents.size(); ++k) documents[k] = {static_cast<int64_t>(k), lengths[k], works[k], 0};
  const wlb::Packed packed = without_gil([&, each = sizes_of(sizes)] {
    wlb::check_documents(documents, each);
    return wlb::place_documents(wlb::by_length(documents), each);
  });
  return std::make_tuple(array(packed.rows), array(packed.bounds));
}

auto release_documents(const py::array& length, const py::array& work, const py::array& arrival, int64_t step,
                       int64_t credit, const py::object& sizes, const py::object& limits) {
  const auto lengths = int64s(length, "length", length), works = int64s(work, "work", length),
             arrivals = int64s(arrival, "arrival", length);
  std::vector<wlb::Document> waiting(lengths.size());
  for (size_t k = 0; k < waiting.size(); ++k)
    waiting[k] = {static_cast<int64_t>(k), lengths[k], works[k], arrivals[k]};
  const wlb::Packed packed = without_gil([&, each = sizes_of(sizes), within = limits_of(limits)] {
    return wlb::release_documents(waiting, step, credit, each, within);
  });
  return std::make_tuple(array(packed.rows), array(packed.bounds));
}

// (strategy, predicted time, SEGMENT columns, where each call begins, key bounds of rounds)
py::tuple choose_sharding(const py::array& length, int64_t cp_size, const std::vector<std::string>& strategies,
                          const std::vector<double>& most_shares, const py::object& kernel, const py::object& costs) {
  const std::vector<int64_t> lengths = int64s(length, "length", length);
  const wlb::Choice choice{strategies, most_shares, kernel_model(kernel), round_costs(costs)};
  const wlb::Sharding plan = without_gil([&] { return wlb::choose_sharding(lengths, cp_size, choice); });
  static_assert(sizeof(wlb::Segment) == 3 * sizeof(int64_t));
  Array<int64_t> segments({static_cast<py::ssize_t>(plan.segments.size()), py::ssize_t{3}});
  std::memcpy(segments.mutable_data(), plan.segments.data(), plan.segments.size() * sizeof(wlb::Segment));
  return py::make_tuple(plan.strategy, plan.time, segments, plan.bounds, plan.key_bounds);
}

// SEGMENT rows of all calls, rank by rank, where each call begins, and the plan's key bounds.
py::tuple attention_times(const Array<int64_t>& segments, const std::vector<size_t>& bounds, size_t cp_size,
                          const std::vector<double>& key_bounds, const py::object& costs, std::optional<int64_t> moved) {
  const std::optional<wlb::RoundCosts> round_costs_of = round_costs(costs);
  const size_t count = static_cast<size_t>(segments.size()) / 3;
  if (!round_costs_of || !cp_size || bounds.size() < 2 || (bounds.size() - 1) % cp_size || bounds.back() != count)
    throw std::invalid_argument("give costs, and as many calls for every rank");
  const size_t per_rank = (bounds.size() - 1) / cp_size;
  std::vector<wlb::Piece> pieces(count);
  const int64_t* values = segments.data();
  for (size_t call = 0; call + 1 < bounds.size(); ++call) {
    const bool is_tail = per_rank > 1 && (call + 1) % per_rank == 0;
    for (size_t k = bounds[call]; k < bounds[call + 1] && k < count; ++k)
      pieces[k] = {2 * (call / per_rank) + is_tail, {values[3 * k], values[3 * k + 1], values[3 * k + 2]}};
  }
  const wlb::AttentionTimes times = without_gil([&] {
    std::sort(pieces.begin(), pieces.end(), [](const wlb::Piece& a, const wlb::Piece& b) {
      return std::pair(a.segment.document, a.segment.start) < std::pair(b.segment.document, b.segment.start);
    });
    return wlb::attention_times(pieces, cp_size, key_bounds, *round_costs_of, moved);
  });
  return py::make_tuple(array(times.forward), array(times.backward), times.forward_end, times.backward_end);
}

// `work` is [count, width].
template <typename Time>
Array<Time> makespans(const Array<int32_t>& first, const Array<int32_t>& second, const Array<int32_t>& end,
                      const Array<int32_t>& time, size_t num_slots, const Array<Time>& work) {
  const wlb::PassGraph graph{first.data(), second.data(), end.data(),
                             time.data(),  static_cast<size_t>(time.size()), num_slots};
  const auto count = static_cast<size_t>(work.shape(0)), width = static_cast<size_t>(work.shape(1));
  return array(without_gil([&] { return wlb::makespans(graph, work.data(), count, width); }));
}

Array<int64_t> place(const py::array& work, size_t dp, int64_t total_weight, int64_t largest_weight) {
  const std::vector<int64_t> works = int64s(work, "work", work);
  return array(without_gil([&] { return wlb::place(works, dp, total_weight, largest_weight); }))
      .reshape({static_cast<py::ssize_t>(dp), py::ssize_t{-1}});
}

Array<double> node_ends(const Array<int64_t>& first, const Array<int64_t>& second, const Array<double>& times) {
  const auto size = static_cast<size_t>(times.size());
  return array(without_gil([&] { return wlb::node_ends(first.data(), second.data(), times.data(), size); }));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The cores of planning; the Python functions that call them document them.";
  module.attr("MAX_TOKENS") = wlb::kMaxTokens;
  module.attr("FORCED_STEPS") = wlb::kForcedSteps;
  module.attr("FILLER_SHARE") = wlb::kFillerShare;
  module.attr("TOKEN_BAND") = wlb::kTokenBand;
  module.attr("TOKEN_REPAY") = wlb::kTokenRepay;
  module.def("place_documents", &place_documents, "length"_a, "work"_a, "sizes"_a);
  module.def("release_documents", &release_documents, "length"_a, "work"_a, "arrival"_a, "step"_a, "credit"_a,
             "sizes"_a, "limits"_a);
  module.def("choose_sharding", &choose_sharding, "length"_a, "cp_size"_a, "strategies"_a, "most_shares"_a, "kernel"_a,
             "costs"_a);
  module.def("attention_times", &attention_times, "segments"_a, "bounds"_a, "cp_size"_a, "key_bounds"_a, "costs"_a,
             "moved"_a);
  module.def("makespans", &makespans<double>, "first"_a, "second"_a, "end"_a, "time"_a, "num_slots"_a,
             py::arg("work").noconvert());
  module.def("makespans", &makespans<int64_t>, "first"_a, "second"_a, "end"_a, "time"_a, "num_slots"_a,
             py::arg("work").noconvert());
  module.def("place", &place, "work"_a, "dp"_a, "total_weight"_a, "largest_weight"_a);
  module.def("node_ends", &node_ends, "first"_a, "second"_a, "times"_a);
}
