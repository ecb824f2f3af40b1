#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "transport/c10d.h"
#include "transport/c10d_control.h"
#include "transport/c10d_copier.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void markReady(Engine& engine, TensorKey tensor, const std::exception_ptr& error) {
  if (error) {
    engine.fail(error);
    return;
  }
  try {
    engine.tensorReady(tensor);
  } catch (...) {
    engine.fail(std::current_exception()); // nobody waits for this thread
  }
}

// The gradient lies in its buffer, or will once its device has computed it.
void tensorReady(
    const std::shared_ptr<Engine>& engine,
    C10dTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient) {
  if (gradient.device().is_cpu()) {
    engine->tensorReady({model, tensor});
    return;
  }
  engine->announce({model, tensor});
  transport.whenReady(gradient.device(), [engine, model, tensor](const std::exception_ptr& error) {
    markReady(*engine, {model, tensor}, error);
  });
}

bool copyThenReady(
    const std::shared_ptr<Engine>& engine,
    C10dCopier& copier,
    ModelId model,
    TensorId tensor,
    const at::Tensor& wire,
    const at::Tensor& gradient,
    double scale) {
  copier.release();
  if (!C10dCopier::takes(wire, gradient)) {
    return false;
  }
  const py::gil_scoped_release noGil;
  engine->announce({model, tensor});
  copier.copy(wire, gradient, scale, [engine, model, tensor] {
    markReady(*engine, {model, tensor}, nullptr);
  });
  return true;
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
  py::class_<C10dCopier>(
      m, "C10dCopier", py::module_local(), "Copies large gradients of the CPU beside the training.")
      .def(py::init<>())
      .def("release", &C10dCopier::release, "Frees the gradients that have been copied.");
  m.def(
      "copy_then_ready", &copyThenReady, py::arg("engine"), py::arg("copier"), py::arg("model"),
      py::arg("tensor"), py::arg("wire"), py::arg("gradient"), py::arg("scale"),
      "Starts wire = scale * gradient, and marks the gradient ready after it; false: it must be "
      "copied by the caller.");
  m.def(
      "tensor_ready", &tensorReady, py::arg("engine"), py::arg("transport"), py::arg("model"),
      py::arg("tensor"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
