#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "transport/c10d.h"
#include "transport/c10d_control.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

} // namespace

void bindC10d(py::module_& m) {
  py::class_<C10dTransport, Transport, std::shared_ptr<C10dTransport>>(
      m, "C10dTransport", py::module_local(), "Carries slices over a process group.")
      .def(
          py::init([](const Group& group) { return std::make_shared<C10dTransport>(group); }),
          py::arg("group"))
      .def(
          "set_buffers", &C10dTransport::setBuffers, py::arg("model"), py::arg("buffers"),
          py::arg("layout"))
      .def("remove_buffers", &C10dTransport::removeBuffers, py::arg("model"));
  py::class_<C10dControl, ControlChannel, std::shared_ptr<C10dControl>>(
      m, "C10dControl", py::module_local(), "Control messages over a Gloo process group.")
      .def(
          py::init([](const Group& group, Rank rank, int size) {
            return std::make_shared<C10dControl>(group, rank, size);
          }),
          py::arg("group"), py::arg("rank"), py::arg("size"));
}

} // namespace hvd_order
