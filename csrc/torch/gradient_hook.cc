#include "torch/gradient_hook.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

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
    engine.fail(std::current_exception()); // no thread would receive an exception of this one
  }
}

bool alike(const at::Tensor& wire, const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.device() == wire.device() &&
      gradient.dtype() == wire.dtype() && gradient.sizes() == wire.sizes();
}

} // namespace

void PlacedTensor::place(at::Tensor tensor) {
  tensor_ = std::move(tensor);
  storage_ = tensor_.storage();
  data_ = storage_.data();
  dtype_ = tensor_.scalar_type();
  device_ = tensor_.device();
}

bool PlacedTensor::inPlace() const {
  return tensor_.storage().is_alias_of(storage_) && storage_.data() == data_ &&
      tensor_.scalar_type() == dtype_;
}

bool PlacedTensor::fits(const at::Tensor& other) const {
  return other.scalar_type() == dtype_ && other.device() == device_;
}

GradientSender::GradientSender(
    std::shared_ptr<Engine> engine,
    std::shared_ptr<TorchTransport> transport,
    std::shared_ptr<GradientCopier> copier,
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

py::cpp_function GradientSender::hook(
    const std::shared_ptr<GradientEntry>& entry,
    py::object guard,
    py::object otherwise) {
  // The parameter owns its hooks, and Python's garbage collector does not see that reference. The
  // hook must therefore own neither the parameter nor an armed gradient.
  return py::cpp_function([self = shared_from_this(), weak = std::weak_ptr(entry),
                           guard = std::move(guard),
                           otherwise = std::move(otherwise)](const at::Tensor& parameter) {
    const std::shared_ptr<GradientEntry> entry = weak.lock();
    if (entry == nullptr) {
      return;
    }
    if (!self->isOrdinary(*entry, parameter)) {
      otherwise(parameter);
    } else if (entry->passesToGo > 1) {
      --entry->passesToGo;
    } else {
      self->sendOrdinary(*entry, parameter, guard);
    }
  });
}

bool GradientSender::send(const GradientEntry& entry, const at::Tensor& gradient) {
  if (!alike(entry.wire.get(), gradient)) {
    return false;
  }
  copier_->release();
  const py::gil_scoped_release noGil;
  if (copiesBeside && GradientCopier::takes(entry.wire.get(), gradient)) {
    engine_->announce({model, entry.tensor});
    copier_->copy(
        entry.wire.get(), gradient, scale_,
        [engine = engine_, key = TensorKey{model, entry.tensor}] {
          markReady(*engine, key, nullptr);
        });
    return true;
  }
  const at::NoGradGuard noGrad;
  at::Tensor out = entry.wire.get();
  at::mul_out(out, gradient, at::native::wrapped_scalar_tensor(scale_));
  tensorReady(engine_, *transport_, model, entry.tensor, entry.wire.get());
  return true;
}

bool GradientSender::isOrdinary(const GradientEntry& entry, const at::Tensor& parameter) const {
  if (!inBackward || entry.sent || entry.late || entry.passesToGo < 1 || !entry.wire.inPlace()) {
    return false;
  }
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && entry.gradient.get().is_same(entry.wire.get()) &&
      alike(entry.wire.get(), gradient) && gradient.storage().resizable() &&
      gradient.storage().nbytes() == gradient.nbytes();
}

void GradientSender::sendOrdinary(
    GradientEntry& entry,
    const at::Tensor& parameter,
    const py::object& guard) {
  entry.passesToGo = 0;
  entry.sent = true;
  const at::Tensor gradient = parameter.grad();
  send(entry, gradient);
  parameter.mutable_grad() = entry.gradient.get();
  // Same as read_guard.arm_gradient().
  const py::object shown = py::cast(entry.gradient.get());
  if (py::type::of(shown).is(tensorClass_)) {
    py::setattr(shown, guardAttribute_, guard);
    py::setattr(shown, "__class__", inFlightClass_);
  }
}

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
  transport.whenReady(
      {model, tensor}, gradient.device(),
      [engine, model, tensor](const std::exception_ptr& error) {
        markReady(*engine, {model, tensor}, error);
      },
      [engine, model, tensor](const std::exception_ptr& error) {
        if (error) {
          engine->fail(error);
        } else {
          engine->computed({model, tensor});
        }
      });
}

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

std::vector<bool> hooked(const py::sequence& parameters) {
  std::vector<bool> found;
  found.reserve(parameters.size());
  for (const py::object parameter : parameters) {
    const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
    found.push_back(torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr);
  }
  return found;
}

Places places(const py::sequence& entries, const py::sequence& parameters) {
  Places found = Places::KEPT;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = py::object(entries[i]).cast<const GradientEntry&>();
    const py::object parameter = parameters[i];
    if (!entry.gradient.fits(THPVariable_Unpack(parameter.ptr()))) {
      return Places::UNFIT;
    }
    if (!entry.wire.inPlace() || !entry.gradient.inPlace()) {
      found = Places::LEFT;
    }
  }
  return found;
}

} // namespace hvd_order
