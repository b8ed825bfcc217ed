#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adaptive.h"
#include "fixed.h"
#include "original.h"
#include "pipeline.h"
#include "sharding.h"
#include "wlb.h"

namespace py = pybind11;
using Int64s = py::array_t<int64_t>;

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
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(values.size()) + " elements, index has " +
                                std::to_string(first.size()) + "; give as many");
  return values.unchecked<T, 1>();
}

std::vector<wlb::Document> documents(const py::array& index, const py::array& length, const py::array& work) {
  const auto i = column<int64_t>(index, "index", index);
  const auto l = column<int64_t>(length, "length", index);
  const auto w = column<int64_t>(work, "work", index);
  std::vector<wlb::Document> rows(static_cast<size_t>(index.size()));
  for (py::ssize_t k = 0; k < index.size(); ++k) rows[static_cast<size_t>(k)] = {i(k), l(k), w(k), 0};
  return rows;
}

// Documents numbered by their rows, without work.
std::vector<wlb::Document> documents(const py::array& length) {
  const auto l = column<int64_t>(length, "length", length);
  std::vector<wlb::Document> rows(static_cast<size_t>(length.size()));
  for (py::ssize_t k = 0; k < length.size(); ++k) rows[static_cast<size_t>(k)] = {k, l(k)};
  return rows;
}

std::vector<int64_t> int64s(const py::array& given, const char* name) {
  const auto view = column<int64_t>(given, name, given);
  std::vector<int64_t> values(static_cast<size_t>(given.size()));
  for (py::ssize_t k = 0; k < given.size(); ++k) values[static_cast<size_t>(k)] = view(k);
  return values;
}

Int64s array(const std::vector<int64_t>& values) {
  return Int64s(static_cast<py::ssize_t>(values.size()), values.data());
}

Int64s indices(const std::vector<wlb::Document>& rows) {
  std::vector<int64_t> values(rows.size());
  std::transform(rows.begin(), rows.end(), values.begin(), [](const wlb::Document& d) { return d.index; });
  return array(values);
}

// From the dataclass in plan/packing/adaptive_core.py, whose fields have these names.
wlb::AdaptiveSettings adaptive_settings(const py::object& s) {
  const auto integer = [&](const char* name) { return s.attr(name).cast<int64_t>(); };
  const auto real = [&](const char* name) { return s.attr(name).cast<double>(); };
  return {integer("num_micro_batches"), integer("max_tokens"), integer("context_length"),
          s.attr("constant_tokens").cast<bool>(), integer("max_delay_steps"), real("tolerance"),
          real("age_tolerance"), real("ratio_limit"), real("token_band"), real("token_repay"),
          real("imbalance_price"), real("token_price")};
}

// From the dataclass in plan/workload.py.
wlb::Kernel kernel_model(const py::object& k) {
  const auto integer = [&](const char* name) { return k.attr(name).cast<int64_t>(); };
  const auto real = [&](const char* name) { return k.attr(name).cast<double>(); };
  return {integer("tile_rows"), real("launch"), real("tile"), real("query_tile"), integer("heads"), real("exchange")};
}

// (strategy, predicted time, SEGMENT columns, where each call begins)
py::tuple sharding(const wlb::Sharding& plan) {
  size_t size = 0;
  for (const auto& call : plan.calls) size += call.size();
  py::array_t<int64_t> segments({static_cast<py::ssize_t>(size), py::ssize_t{3}});
  std::vector<int64_t> bounds{0};
  int64_t* row = segments.mutable_data();
  for (const auto& call : plan.calls) {
    for (const wlb::Segment& s : call) {
      *row++ = s.document;
      *row++ = s.start;
      *row++ = s.stop;
    }
    bounds.push_back(bounds.back() + static_cast<int64_t>(call.size()));
  }
  return py::make_tuple(plan.strategy, plan.time, segments, bounds);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native packing cores; plan/packing/ documents them.";
  py::class_<wlb::AdaptiveCore>(module, "AdaptiveCore")
      .def(py::init([](const py::object& settings) { return wlb::AdaptiveCore(adaptive_settings(settings)); }),
           py::arg("settings"))
      .def(
          "add",
          [](wlb::AdaptiveCore& core, const py::array& index, const py::array& length, const py::array& work,
             const py::array& arrival) {
            auto rows = documents(index, length, work);
            const auto arrivals = column<int64_t>(arrival, "arrival", index);
            for (size_t k = 0; k < rows.size(); ++k) rows[k].arrival = arrivals(static_cast<py::ssize_t>(k));
            core.add(rows);
          },
          py::arg("index"), py::arg("length"), py::arg("work"), py::arg("arrival"))
      .def(
          "step",
          [](wlb::AdaptiveCore& core, int64_t step, int64_t credit) {
            const auto packed = [&] {
              py::gil_scoped_release release;
              return core.step(step, credit);
            }();
            return std::make_tuple(array(packed.order), array(packed.bounds));
          },
          py::arg("step"), py::arg("credit"));
  py::class_<wlb::FixedCore>(module, "FixedCore")
      .def(py::init<int64_t, int64_t>(), py::arg("context_length"), py::arg("crossover_tokens"))
      .def(
          "place",
          [](const wlb::FixedCore& core, const py::array& length, int64_t num_windows) {
            const auto rows = documents(length);
            const auto pieces = [&] {
              py::gil_scoped_release release;
              return core.place(rows, num_windows);
            }();
            return std::make_tuple(array(pieces.row), array(pieces.length), array(pieces.window));
          },
          py::arg("length"), py::arg("num_windows"));
  py::class_<wlb::OriginalCore>(module, "OriginalCore")
      .def(py::init<int64_t, int64_t>(), py::arg("num_micro_batches"), py::arg("context_length"))
      .def(
          "cut",
          [](const wlb::OriginalCore& core, const py::array& length) {
            const auto rows = documents(length);
            const auto cut = [&] {
              py::gil_scoped_release release;
              return core.cut(rows);
            }();
            return std::make_tuple(array(cut.row), array(cut.offset), array(cut.length), array(cut.bounds));
          },
          py::arg("length"));
  module.def(
      "order",
      [](const py::array& work, int64_t num_stages, int64_t num_chunks) {
        const std::vector<int64_t> works = int64s(work, "work");
        return array([&] {
          py::gil_scoped_release release;
          return wlb::order(works, num_stages, num_chunks);
        }());
      },
      py::arg("work"), py::arg("num_stages"), py::arg("num_chunks"));
  module.def(
      "place",
      [](const py::array& work, int64_t dp_size, int64_t num_stages, int64_t num_chunks) {
        const std::vector<int64_t> works = int64s(work, "work");
        return array([&] {
                 py::gil_scoped_release release;
                 return wlb::place(works, dp_size, num_stages, num_chunks);
               }())
            .reshape({py::ssize_t{dp_size}, py::ssize_t{-1}});
      },
      py::arg("work"), py::arg("dp_size"), py::arg("num_stages"), py::arg("num_chunks"));
  module.def(
      "shard",
      [](const py::array& length, int64_t cp_size, const std::vector<std::string>& strategies,
         const std::vector<int64_t>& long_shares, const py::object& kernel) {
        const std::vector<int64_t> lengths = int64s(length, "length");
        const wlb::Kernel model = kernel_model(kernel);
        return sharding([&] {
          py::gil_scoped_release release;
          return wlb::shard(lengths, cp_size, strategies, long_shares, model);
        }());
      },
      py::arg("length"), py::arg("cp_size"), py::arg("strategies"), py::arg("long_shares"), py::arg("kernel"));
  py::class_<wlb::WlbCore>(module, "WlbCore")
      .def(py::init<int64_t, int64_t, std::vector<int64_t>>(), py::arg("num_micro_batches"), py::arg("max_tokens"),
           py::arg("outlier_thresholds"))
      .def(
          "step",
          [](wlb::WlbCore& core, const py::array& index, const py::array& length, const py::array& work,
             int64_t late_before) {
            const auto arrived = documents(index, length, work);
            const auto packed = [&] {
              py::gil_scoped_release release;
              return core.step(arrived, late_before);
            }();
            return std::make_tuple(array(packed.order), array(packed.bounds));
          },
          py::arg("index"), py::arg("length"), py::arg("work"), py::arg("late_before") = 0)
      .def("waiting",
           [](const wlb::WlbCore& core) {
             std::vector<Int64s> queues;
             for (const auto& queue : core.queues()) queues.push_back(indices(queue));
             return std::make_tuple(queues, indices(core.remained()));
           })
      .def(
          "load",
          [](wlb::WlbCore& core, const py::array& index, const py::array& length, const py::array& work,
             const py::array& remained) {
            const auto rows = documents(index, length, work);
            const auto flags = column<bool>(remained, "remained", index);
            std::vector<bool> ready(rows.size());
            for (size_t k = 0; k < ready.size(); ++k) ready[k] = flags(static_cast<py::ssize_t>(k));
            core.load(rows, ready);
          },
          py::arg("index"), py::arg("length"), py::arg("work"), py::arg("remained"));
}
