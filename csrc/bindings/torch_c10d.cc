#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
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

// One call for all that a hook has to do with most gradients: hooks are many, and run between
// layers.
bool sendGradient(
    const std::shared_ptr<Engine>& engine,
    C10dTransport& transport,
    C10dCopier& copier,
    ModelId model,
    TensorId tensor,
    const at::Tensor& wire,
    const at::Tensor& gradient,
    double scale) {
  copier.release();
  if (gradient.layout() != at::kStrided || gradient.device() != wire.device() ||
      gradient.dtype() != wire.dtype() || gradient.sizes() != wire.sizes()) {
    return false;
  }
  const py::gil_scoped_release noGil;
  if (C10dCopier::takes(wire, gradient)) {
    engine->announce({model, tensor});
    copier.copy(wire, gradient, scale, [engine, model, tensor] {
      markReady(*engine, {model, tensor}, nullptr);
    });
    return true;
  }
  const at::NoGradGuard noGrad;
  at::Tensor out = wire;
  at::mul_out(out, gradient, at::native::wrapped_scalar_tensor(scale));
  tensorReady(engine, transport, model, tensor, wire);
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
      "send_gradient", &sendGradient, py::arg("engine"), py::arg("transport"), py::arg("copier"),
      py::arg("model"), py::arg("tensor"), py::arg("wire"), py::arg("gradient"), py::arg("scale"),
      "Does wire = scale * gradient and marks the gradient ready, now or soon; false: the two "
      "differ in kind, nothing was done.");
  m.def(
      "tensor_ready", &tensorReady, py::arg("engine"), py::arg("transport"), py::arg("model"),
      py::arg("tensor"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
