#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
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

// A tensor in a buffer, at an offset in elements, with a storage of its own: whoever gives it other
// memory (share_memory(), set_()) takes nothing away from what travels in the same buffer.
at::Tensor placeIn(
    const at::Tensor& buffer,
    const std::vector<std::int64_t>& sizes,
    const std::vector<std::int64_t>& strides,
    std::int64_t offset) {
  auto* start = static_cast<char*>(buffer.mutable_data_ptr()) + offset * buffer.element_size();
  return at::for_blob(start, sizes)
      .strides(strides)
      .context(new at::Tensor(buffer), [](void* held) { delete static_cast<at::Tensor*>(held); })
      .options(buffer.options())
      .target_device(buffer.device())
      .make_tensor();
}

// A tensor of ours that the program gets hold of, and where we put it. Programs may give a gradient
// other memory or another type: model.float() does it to each.
class PlacedTensor {
 public:
  explicit PlacedTensor(at::Tensor tensor) {
    place(std::move(tensor));
  }

  void place(at::Tensor tensor) {
    tensor_ = std::move(tensor);
    storage_ = tensor_.storage();
    data_ = storage_.data();
    dtype_ = tensor_.scalar_type();
    device_ = tensor_.device();
  }

  [[nodiscard]] const at::Tensor& get() const {
    return tensor_;
  }
  [[nodiscard]] bool inPlace() const {
    return tensor_.storage().is_alias_of(storage_) && storage_.data() == data_ &&
        tensor_.scalar_type() == dtype_;
  }
  // Whether a tensor is of the kind that this one was made for.
  [[nodiscard]] bool fits(const at::Tensor& other) const {
    return other.scalar_type() == dtype_ && other.device() == device_;
  }

 private:
  at::Tensor tensor_;
  c10::Storage storage_;
  const void* data_ = nullptr; // share_memory() gives a storage another
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

// What hooks have to know of a parameter; slot.py describes it.
struct GradientSlot {
  PlacedTensor wire{at::empty({0})};
  PlacedTensor gradient{wire.get()};
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
  hook(const std::shared_ptr<GradientSlot>& slot, py::object guard, py::object otherwise) {
    // The parameter holds its hooks, where Python's garbage collector does not see it: nothing here
    // may hold the parameter, nor a gradient that is armed.
    return py::cpp_function([self = shared_from_this(), weak = std::weak_ptr(slot),
                             guard = std::move(guard),
                             otherwise = std::move(otherwise)](const at::Tensor& parameter) {
      const std::shared_ptr<GradientSlot> slot = weak.lock();
      if (slot == nullptr) {
        return;
      }
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
    if (!alike(slot.wire.get(), gradient)) {
      return false;
    }
    copier_->release();
    const py::gil_scoped_release noGil;
    if (C10dCopier::takes(slot.wire.get(), gradient)) {
      engine_->announce({model, slot.tensor});
      copier_->copy(
          slot.wire.get(), gradient, scale_,
          [engine = engine_, key = TensorKey{model, slot.tensor}] {
            markReady(*engine, key, nullptr);
          });
      return true;
    }
    const at::NoGradGuard noGrad;
    at::Tensor out = slot.wire.get();
    at::mul_out(out, gradient, at::native::wrapped_scalar_tensor(scale_));
    tensorReady(engine_, *transport_, model, slot.tensor, slot.wire.get());
    return true;
  }

 private:
  static bool alike(const at::Tensor& wire, const at::Tensor& gradient) {
    return gradient.layout() == at::kStrided && gradient.device() == wire.device() &&
        gradient.dtype() == wire.dtype() && gradient.sizes() == wire.sizes();
  }

  // Whether a gradient takes the way of most: of a running backward pass, fresh from an operator
  // (torch has allocated it; what lies in somebody's buffers is not resizable), in the form that
  // travels.
  [[nodiscard]] bool isOrdinary(const GradientSlot& slot, const at::Tensor& parameter) const {
    if (!inBackward || slot.sent || slot.late || slot.passesToGo < 1 || !slot.wire.inPlace()) {
      return false;
    }
    const at::Tensor& gradient = parameter.grad();
    return gradient.defined() && slot.gradient.get().is_same(slot.wire.get()) &&
        alike(slot.wire.get(), gradient) && gradient.storage().resizable() &&
        gradient.storage().nbytes() == gradient.nbytes();
  }

  void sendOrdinary(GradientSlot& slot, const at::Tensor& parameter, const py::object& guard) {
    slot.passesToGo = 0;
    slot.sent = true;
    slot.readySeconds = monotonicSeconds();
    const at::Tensor gradient = parameter.grad();
    send(slot, gradient);
    parameter.mutable_grad() = slot.gradient.get();
    // As read_guard.arm_gradient().
    const py::object shown = py::cast(slot.gradient.get());
    if (py::type::of(shown).is(tensorClass_)) {
      py::setattr(shown, guardAttribute_, guard);
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

// Which parameters still have a hook: torch.utils.swap_tensors gives a parameter another tensor.
std::vector<bool> hooked(const py::sequence& parameters) {
  std::vector<bool> found;
  found.reserve(parameters.size());
  for (const py::object parameter : parameters) {
    const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
    found.push_back(torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr);
  }
  return found;
}

// Whether gradients of parameters have left their places, or the parameters themselves are of
// another kind than the places.
enum class Places { KEPT, LEFT, UNFIT };

Places places(const py::sequence& slots, const py::sequence& parameters) {
  Places found = Places::KEPT;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto& slot = py::object(slots[i]).cast<const GradientSlot&>();
    const py::object parameter = parameters[i];
    if (!slot.gradient.fits(THPVariable_Unpack(parameter.ptr()))) {
      return Places::UNFIT;
    }
    if (!slot.wire.inPlace() || !slot.gradient.inPlace()) {
      found = Places::LEFT;
    }
  }
  return found;
}

} // namespace

void bindGradients(py::module_& m) {
  py::class_<C10dCopier, std::shared_ptr<C10dCopier>>(
      m, "C10dCopier", py::module_local(), "Copies large gradients of the CPU beside the training.")
      .def(py::init<>())
      .def("release", &C10dCopier::release, "Frees the gradients that have been copied.");
  py::class_<GradientSlot, std::shared_ptr<GradientSlot>>(
      m, "GradientSlot", py::module_local(), "The part of a slot that hooks need.")
      .def(py::init<>())
      .def_property(
          "wire", [](const GradientSlot& slot) { return slot.wire.get(); },
          [](GradientSlot& slot, at::Tensor tensor) { slot.wire.place(std::move(tensor)); })
      .def_property(
          "gradient", [](const GradientSlot& slot) { return slot.gradient.get(); },
          [](GradientSlot& slot, at::Tensor tensor) { slot.gradient.place(std::move(tensor)); })
      .def_property_readonly(
          "in_place",
          [](const GradientSlot& slot) { return slot.wire.inPlace() && slot.gradient.inPlace(); })
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
  py::enum_<Places>(m, "Places", py::module_local(), "Where gradients are.")
      .value("KEPT", Places::KEPT, "Where they were put.")
      .value("LEFT", Places::LEFT, "Some have been given other memory.")
      .value("UNFIT", Places::UNFIT, "Parameters are of another type or device than their places.");
  m.def(
      "hooked", &hooked, py::arg("parameters"),
      "For each parameter, whether anything is called when its gradient has come.");
  m.def(
      "place_in", &placeIn, py::arg("buffer"), py::arg("sizes"), py::arg("strides"),
      py::arg("offset"),
      "A tensor in a buffer, at an offset in elements, with a storage of its own.");
  m.def("places", &places, py::arg("slots"), py::arg("parameters"), "Where all gradients are.");
  m.def(
      "tensor_ready", &tensorReady, py::arg("engine"), py::arg("transport"), py::arg("model"),
      py::arg("tensor"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
