#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "transport/c10d_copier.h"
#include "transport/torch_transport.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

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
    TorchTransport& transport,
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

double monotonicSeconds() { // Python's time.monotonic()
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What hooks have to know of a parameter; slot.py describes it.
struct GradientSlot {
  at::Tensor wire = at::empty({0});
  at::Tensor gradient = wire;
  TensorId tensor = 0;
  int passesToGo = 1;
  bool sent = false;
  bool late = false;
  double readySeconds = 0.0;
};

// Sends the gradients of one optimizer. Everything but the copy itself runs under the GIL, which
// guards this and the slots.
//
// Hooks are many, and each runs between two layers with caches that are full of other things: the
// ordinary gradient meets no interpreted code on its way.
class GradientSender : public std::enable_shared_from_this<GradientSender> {
 public:
  GradientSender(
      std::shared_ptr<Engine> engine,
      std::shared_ptr<TorchTransport> transport,
      std::shared_ptr<C10dCopier> copier,
      double scale,
      py::type inFlightClass,
      py::str guardAttribute)
      : engine_(std::move(engine)),
        transport_(std::move(transport)),
        copier_(std::move(copier)),
        scale_(scale),
        inFlightClass_(std::move(inFlightClass)),
        guardAttribute_(std::move(guardAttribute)),
        tensorClass_(py::reinterpret_borrow<py::object>(THPVariableClass)) {}

  ModelId model = 0;
  bool inBackward = false;

  // A hook for Tensor.register_post_accumulate_grad_hook.
  py::cpp_function
  hook(std::shared_ptr<GradientSlot> slot, py::object guard, py::object otherwise) {
    return py::cpp_function([self = shared_from_this(), slot = std::move(slot),
                             guard = std::move(guard),
                             otherwise = std::move(otherwise)](const at::Tensor& parameter) {
      if (!self->isOrdinary(*slot, parameter)) {
        otherwise(parameter);
      } else if (slot->passesToGo > 1) {
        --slot->passesToGo;
      } else {
        self->sendOrdinary(*slot, parameter, guard);
      }
    });
  }

  // Does slot.wire = scale * gradient and marks the gradient ready, now or soon.
  bool send(const GradientSlot& slot, const at::Tensor& gradient) {
    if (!alike(slot.wire, gradient)) {
      return false;
    }
    copier_->release();
    const py::gil_scoped_release noGil;
    if (C10dCopier::takes(slot.wire, gradient)) {
      engine_->announce({model, slot.tensor});
      copier_->copy(
          slot.wire, gradient, scale_, [engine = engine_, key = TensorKey{model, slot.tensor}] {
            markReady(*engine, key, nullptr);
          });
      return true;
    }
    const at::NoGradGuard noGrad;
    at::Tensor out = slot.wire;
    at::mul_out(out, gradient, at::native::wrapped_scalar_tensor(scale_));
    tensorReady(engine_, *transport_, model, slot.tensor, slot.wire);
    return true;
  }

 private:
  static bool alike(const at::Tensor& wire, const at::Tensor& gradient) {
    return gradient.layout() == at::kStrided && gradient.device() == wire.device() &&
        gradient.dtype() == wire.dtype() && gradient.sizes() == wire.sizes();
  }

  // Whether a gradient takes the way of most: of a running backward pass, fresh from an operator
  // (it fills its storage; what lies in somebody's buffers does not), in the form that travels.
  [[nodiscard]] bool isOrdinary(const GradientSlot& slot, const at::Tensor& parameter) const {
    if (!inBackward || slot.sent || slot.late || slot.passesToGo < 1) {
      return false;
    }
    const at::Tensor& gradient = parameter.grad();
    return gradient.defined() && slot.gradient.is_same(slot.wire) && alike(slot.wire, gradient) &&
        gradient.storage().nbytes() == gradient.nbytes();
  }

  void sendOrdinary(GradientSlot& slot, const at::Tensor& parameter, const py::object& guard) {
    slot.passesToGo = 0;
    slot.sent = true;
    slot.readySeconds = monotonicSeconds();
    const at::Tensor gradient = parameter.grad();
    send(slot, gradient);
    parameter.mutable_grad() = slot.gradient;
    // As read_guard.arm_gradient().
    const py::object shown = py::cast(slot.gradient);
    if (py::type::of(shown).is(tensorClass_)) {
      py::setattr(shown, guardAttribute_, guard());
      py::setattr(shown, "__class__", inFlightClass_);
    }
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<TorchTransport> transport_;
  std::shared_ptr<C10dCopier> copier_;
  double scale_;
  py::type inFlightClass_;
  py::str guardAttribute_;
  py::object tensorClass_;
};

} // namespace

void bindGradients(py::module_& m) {
  py::class_<C10dCopier, std::shared_ptr<C10dCopier>>(
      m, "C10dCopier", py::module_local(), "Copies large gradients of the CPU beside the training.")
      .def(py::init<>())
      .def("release", &C10dCopier::release, "Frees the gradients that have been copied.");
  py::class_<GradientSlot, std::shared_ptr<GradientSlot>>(
      m, "GradientSlot", py::module_local(), "The part of a slot that hooks need.")
      .def(py::init<>())
      .def_readwrite("wire", &GradientSlot::wire)
      .def_readwrite("gradient", &GradientSlot::gradient)
      .def_readwrite("tensor", &GradientSlot::tensor)
      .def_readwrite("passes_to_go", &GradientSlot::passesToGo)
      .def_readwrite("sent", &GradientSlot::sent)
      .def_readwrite("late", &GradientSlot::late)
      .def_readwrite("ready_s", &GradientSlot::readySeconds);
  py::class_<GradientSender, std::shared_ptr<GradientSender>>(
      m, "GradientSender", py::module_local(), "Sends the gradients of one optimizer.")
      .def(
          py::init<
              std::shared_ptr<Engine>, std::shared_ptr<TorchTransport>, std::shared_ptr<C10dCopier>,
              double, py::type, py::str>(),
          py::arg("engine"), py::arg("transport"), py::arg("copier"), py::arg("scale"),
          py::arg("in_flight_class"), py::arg("guard_attribute"))
      .def_readwrite("model", &GradientSender::model)
      .def_readwrite("in_backward", &GradientSender::inBackward)
      .def(
          "hook", &GradientSender::hook, py::arg("slot"), py::arg("guard"), py::arg("otherwise"),
          "A hook that sends the ordinary gradient and calls `otherwise` for any other.")
      .def(
          "send", &GradientSender::send, py::arg("slot"), py::arg("gradient"),
          "Does slot.wire = scale * gradient and marks the gradient ready, now or soon; false: the "
          "two differ in kind, nothing was done.");
  m.def(
      "tensor_ready", &tensorReady, py::arg("engine"), py::arg("transport"), py::arg("model"),
      py::arg("tensor"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
