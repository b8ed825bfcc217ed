#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adaptive.h"
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
                                std::to_string(first.size()));
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

Int64s array(const std::vector<int64_t>& values) {
  return Int64s(static_cast<py::ssize_t>(values.size()), values.data());
}

Int64s indices(const std::vector<wlb::Document>& rows) {
  std::vector<int64_t> values(rows.size());
  std::transform(rows.begin(), rows.end(), values.begin(), [](const wlb::Document& d) { return d.index; });
  return array(values);
}

// From the dataclass in plan/packing/adaptive.py, whose fields have these names.
wlb::AdaptiveSettings adaptive_settings(const py::object& s) {
  const auto integer = [&](const char* name) { return s.attr(name).cast<int64_t>(); };
  const auto real = [&](const char* name) { return s.attr(name).cast<double>(); };
  return {integer("num_micro_batches"), integer("max_tokens"), integer("context_length"),
          s.attr("constant_tokens").cast<bool>(), integer("max_delay_steps"), real("tolerance"),
          real("age_tolerance"), real("ratio_limit"), real("token_band"), real("token_repay"),
          real("imbalance_price"), real("token_price")};
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
          py::arg("step"), py::arg("credit"))
      .def("waiting", [](const wlb::AdaptiveCore& core) { return indices(core.waiting()); });
  py::class_<wlb::WlbCore>(module, "WlbCore")
      .def(py::init<int64_t, int64_t, std::vector<int64_t>>(), py::arg("num_micro_batches"), py::arg("max_tokens"),
           py::arg("outlier_thresholds"))
      .def(
          "step",
          [](wlb::WlbCore& core, const py::array& index, const py::array& length, const py::array& work) {
            const auto arrived = documents(index, length, work);
            const auto packed = [&] {
              py::gil_scoped_release release;
              return core.step(arrived);
            }();
            return std::make_tuple(array(packed.order), array(packed.bounds));
          },
          py::arg("index"), py::arg("length"), py::arg("work"))
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
