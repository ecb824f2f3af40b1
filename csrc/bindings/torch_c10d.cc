#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "transport/c10d.h"
#include "transport/c10d_control.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void tensorReady(
    const std::shared_ptr<Engine>& engine,
    C10dTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient) {
  transport.whenReady(gradient.device(), [engine, model, tensor](const std::exception_ptr& error) {
    if (error) {
      engine->fail(error);
    } else {
      engine->tensorReady({model, tensor});
    }
  });
}

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
  m.def(
      "tensor_ready", &tensorReady, py::arg("engine"), py::arg("transport"), py::arg("model"),
      py::arg("tensor"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
