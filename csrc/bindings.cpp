#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adaptive.h"
#include "pipeline.h"
#include "sharding.h"
#include "wlb.h"

namespace py = pybind11;
using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;
using Doubles = py::array_t<double, py::array::c_style>;

namespace {

// The values of a 1-d array of exactly type T, strided or not.
template <typename T>
auto column(const py::array& values, const char* name, const py::array& first) {
  if (!py::isinstance<py::array_t<T>>(values) || values.ndim() != 1)
    throw std::invalid_argument(std::string(name) + " must be a 1-d array of " +
                                py::str(py::dtype::of<T>()).cast<std::string>() + ", not " +
                                std::to_string(values.ndim()) + "-d of " +
                                py::str(values.dtype()).cast<std::string>());
  if (values.size() != first.size())
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(values.size()) + " elements, length has " +
                                std::to_string(first.size()) + "; give as many");
  return values.unchecked<T, 1>();
}

// Documents numbered by their rows.
std::vector<wlb::Document> documents(const py::array& length, const py::array& work) {
  const auto l = column<int64_t>(length, "length", length);
  const auto w = column<int64_t>(work, "work", length);
  std::vector<wlb::Document> rows(static_cast<size_t>(length.size()));
  for (py::ssize_t k = 0; k < length.size(); ++k) rows[static_cast<size_t>(k)] = {k, l(k), w(k)};
  return rows;
}

std::vector<int64_t> int64s(const py::array& source, const char* name) {
  const auto view = column<int64_t>(source, name, source);
  std::vector<int64_t> values(static_cast<size_t>(source.size()));
  for (py::ssize_t k = 0; k < source.size(); ++k) values[static_cast<size_t>(k)] = view(k);
  return values;
}

Int64s array(const std::vector<int64_t>& values) {
  return Int64s(static_cast<py::ssize_t>(values.size()), values.data());
}

// Attributes of the dataclasses of cost/ and plan/sharding/stages.py.
template <typename T>
T value(const py::handle& object, const char* name) {
  return object.attr(name).cast<T>();
}

wlb::Kernel kernel_model(const py::handle& k) {
  return {value<int64_t>(k, "tile_rows"),  value<double>(k, "launch"), value<double>(k, "tile"),
          value<double>(k, "query_tile"), value<int64_t>(k, "heads"), value<int64_t>(k, "parts")};
}

std::optional<wlb::Staging> staging(const py::handle& s) {
  if (s.is_none()) return {};
  const py::object exchange = s.attr("exchange");
  return wlb::Staging{kernel_model(s.attr("forward")),
                      kernel_model(s.attr("backward")),
                      value<double>(exchange, "latency"),
                      value<double>(exchange, "arrive"),
                      value<double>(exchange, "leave"),
                      value<double>(exchange, "ahead"),
                      value<double>(s, "merge"),
                      value<bool>(s, "kept"),
                      value<int64_t>(s, "num_heads"),
                      value<std::vector<int64_t>>(s, "edges"),
                      value<std::vector<std::vector<double>>>(s, "shares")};
}

// (order, strategy, predicted time, SEGMENT columns, where each call begins, sets of calls, fields of Stages)
py::tuple sharding(const wlb::Sharding& plan) {
  static_assert(sizeof(wlb::Segment) == 3 * sizeof(int64_t));
  py::array_t<int64_t> segments({static_cast<py::ssize_t>(plan.segments.size()), py::ssize_t{3}});
  std::memcpy(segments.mutable_data(), plan.segments.data(), plan.segments.size() * sizeof(wlb::Segment));
  std::vector<std::tuple<int64_t, decltype(wlb::Stage::heads), decltype(wlb::Stage::keys)>> stages;
  for (const wlb::Stage& stage : plan.stages) stages.emplace_back(stage.document_set, stage.heads, stage.keys);
  return py::make_tuple(array(plan.order), plan.strategy, plan.time, segments, plan.bounds, plan.call_sets, stages);
}

// `work` is [count, width].
template <typename Time>
py::array_t<Time> makespans(const Int32s& first, const Int32s& second, const Int32s& end, const Int32s& time,
                            size_t num_slots, const py::array_t<Time, py::array::c_style>& work) {
  const wlb::PassGraph graph{first.data(), second.data(), end.data(),
                             time.data(),  static_cast<size_t>(time.size()), num_slots};
  const auto ends = [&] {
    py::gil_scoped_release release;
    return wlb::makespans(graph, work.data(), static_cast<size_t>(work.shape(0)), static_cast<size_t>(work.shape(1)));
  }();
  return py::array_t<Time>(static_cast<py::ssize_t>(ends.size()), ends.data());
}

// The fields of `Played`.
py::tuple play(const py::handle& graph, const Doubles& times, size_t num_passes, size_t num_stages, size_t per_stage,
               const py::handle& parts) {
  const auto nodes = value<Int64s>(graph, "nodes"), first = value<Int64s>(graph, "first"),
             second = value<Int64s>(graph, "second"), bounds = value<Int64s>(parts, "bounds");
  const auto part = value<Doubles>(parts, "times"), held = value<Doubles>(parts, "held"),
             needs = value<Doubles>(parts, "needs"), steps = value<Doubles>(parts, "steps"),
             limit = value<Doubles>(parts, "limit");
  const wlb::Graph nodes_of{nodes.data(), first.data(), second.data(), times.data(), static_cast<size_t>(times.size()),
                            num_passes,   num_stages,   per_stage};
  const wlb::Parts put_off{bounds.data(), part.data(),  held.data(),
                           needs.data(),  steps.data(), limit.data(), value<int64_t>(parts, "urgent")};
  const auto played = [&] {
    py::gil_scoped_release release;
    return wlb::play(nodes_of, put_off);
  }();
  const auto doubles = [](const std::vector<double>& values) {
    return Doubles(static_cast<py::ssize_t>(values.size()), values.data());
  };
  return py::make_tuple(doubles(played.start), doubles(played.end), doubles(played.filled), array(played.before),
                        doubles(played.left));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native cores of planning; the Python functions that call them document them.";
  module.def(
      "choose_adaptive",
      [](const py::array& length, const py::array& work, const py::array& arrival, int64_t step, int64_t credit,
         int64_t num_micro_batches, int64_t ranks, int64_t total_weight, int64_t largest_weight, int64_t unit_weight,
         int64_t max_tokens, int64_t batch_tokens, int64_t crossover_tokens, int64_t max_delay_steps) {
        auto waiting = documents(length, work);
        const auto arrivals = column<int64_t>(arrival, "arrival", length);
        for (size_t k = 0; k < waiting.size(); ++k) waiting[k].arrival = arrivals(static_cast<py::ssize_t>(k));
        const auto packed = [&] {
          py::gil_scoped_release release;
          return wlb::choose_adaptive(waiting, step, credit,
                                      {num_micro_batches, ranks, total_weight, largest_weight, unit_weight, max_tokens,
                                       batch_tokens, crossover_tokens, max_delay_steps});
        }();
        return std::make_tuple(array(packed.rows), array(packed.bounds));
      },
      py::arg("length"), py::arg("work"), py::arg("arrival"), py::arg("step"), py::arg("credit"),
      py::arg("num_micro_batches"), py::arg("ranks"), py::arg("total_weight"), py::arg("largest_weight"),
      py::arg("unit_weight"), py::arg("max_tokens"), py::arg("batch_tokens"), py::arg("crossover_tokens"),
      py::arg("max_delay_steps"));
  module.def("makespans", &makespans<double>, py::arg("first"), py::arg("second"), py::arg("end"), py::arg("time"),
             py::arg("num_slots"), py::arg("work").noconvert());
  module.def("makespans", &makespans<int64_t>, py::arg("first"), py::arg("second"), py::arg("end"), py::arg("time"),
             py::arg("num_slots"), py::arg("work").noconvert());
  module.def(
      "place",
      [](const py::array& work, size_t dp, int64_t total_weight, int64_t largest_weight) {
        const std::vector<int64_t> works = int64s(work, "work");
        return array([&] {
                 py::gil_scoped_release release;
                 return wlb::place(works, dp, total_weight, largest_weight);
               }())
            .reshape({static_cast<py::ssize_t>(dp), py::ssize_t{-1}});
      },
      py::arg("work"), py::arg("dp"), py::arg("total_weight"), py::arg("largest_weight"));
  module.def("play", &play, py::arg("graph"), py::arg("times"), py::arg("num_passes"), py::arg("num_stages"),
             py::arg("per_stage"), py::arg("parts"));
  module.def(
      "choose_sharding",
      [](const py::array& length, int64_t cp_size, const std::vector<std::string>& strategies,
         const std::vector<double>& most_shares, const py::object& kernel, const std::vector<double>& exchanges,
         int64_t num_mirrored, const py::object& tried) {
        const std::vector<int64_t> lengths = int64s(length, "length");
        const wlb::Choice choice{strategies, most_shares,  kernel_model(kernel),
                                 exchanges,  num_mirrored, staging(tried)};
        return sharding([&] {
          py::gil_scoped_release release;
          return wlb::choose_sharding(lengths, cp_size, choice);
        }());
      },
      py::arg("length"), py::arg("cp_size"), py::arg("strategies"), py::arg("most_shares"), py::arg("kernel"),
      py::arg("exchanges"), py::arg("num_mirrored"), py::arg("staging"));
  module.def(
      "place_wlb",
      [](const py::array& length, const py::array& work, int64_t num_micro_batches, int64_t max_tokens) {
        const auto rows = documents(length, work);
        return array([&] {
          py::gil_scoped_release release;
          return wlb::place_wlb(rows, num_micro_batches, max_tokens);
        }());
      },
      py::arg("length"), py::arg("work"), py::arg("num_micro_batches"), py::arg("max_tokens"));
}
