#include "torch/gradients/gradient_hook.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <utility>

#include "base/error.h"
#include "torch/gradients/owners.h"

// The first file on a gradient's way, and for most gradients the only one of the shim.
//
// Autograd calls the hook of a parameter when its gradient of a backward pass is complete, on the
// thread that runs the pass. An ordinary gradient is then
// 1. scaled, and cast if it is compressed, into its place in the buffer (`send`): by this thread,
//    by the copier's thread if it is large and lies on the CPU, or by its device;
// 2. shown: `parameter.grad` becomes a tensor at that place, of the class that waits for the sum
//    when the program reads it;
// 3. marked ready (`markReadyWhenComputed`): now, when the copy is made, or when an event of the
// device has
//    happened. On the CPU the last gradient of a step is kept until its pass has ended
//    (`handOver`).
// The engine decides when it is sent. Everything else, such as the first gradient of a pass, one of
// another form, or one that the program holds, goes to `otherwise` in Python.
//
// How to tell that a gradient is ordinary: nobody but the parameter has the tensor (`isFresh`), and
// it can be packed in one pass over memory (`fits`). An error in step 3 fails the engine, because
// autograd, a copier and a device's event have no caller who would receive it.
//
// Invariant: each gradient lies in a storage of its own, which points into the buffer and keeps it
// alive (`placeIn`). What a program does to one gradient's memory leaves its neighbours alone.

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

/// Whether the gradient becomes what is sent by one pass over memory.
bool fits(const GradientEntry& entry, const at::Tensor& gradient) {
  const at::Tensor& wire = entry.wire;
  return canPack(gradient, wire) && (entry.casts || gradient.dtype() == wire.dtype());
}

void whenReady(
    const std::shared_ptr<Engine>& engine,
    TorchTransport& transport,
    TensorKey tensor,
    const c10::Device& device,
    std::optional<Packing> packing) {
  engine->announce(tensor);
  transport.whenReady(
      tensor, device, std::move(packing),
      [engine, tensor](const std::exception_ptr& error) { markReady(*engine, tensor, error); },
      [engine, tensor](const std::exception_ptr& error) {
        if (error) {
          engine->fail(error);
        } else {
          engine->computed(tensor);
        }
      });
}

// A storage's address, also of one that is locked.
const void* addressOf(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

void releaseBuffer(void* held) {
  delete static_cast<at::Tensor*>(held);
}

bool isPlaced(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_deleter() ==
      &releaseBuffer;
}

bool isBelowZero(const at::Tensor& flag) {
  switch (flag.scalar_type()) {
    case at::kDouble:
      return *flag.const_data_ptr<double>() < 0;
    case at::kFloat:
      return *flag.const_data_ptr<float>() < 0;
    case at::kHalf:
      return *flag.const_data_ptr<at::Half>() < 0;
    case at::kBFloat16:
      return *flag.const_data_ptr<at::BFloat16>() < 0;
    default:
      return at::real(flag).item<double>() < 0;
  }
}

// Nobody but the parameter and, while it hands the gradient over, autograd has it.
bool isFresh(const GradientEntry& entry, const at::Tensor& gradient) {
  return !isHeld(gradient, 1) && (entry.fresh || gradient.storage().use_count() == 1);
}

} // namespace

void PlacedTensor::place(at::Tensor tensor) {
  tensor_ = std::move(tensor);
  storage_ = tensor_.storage();
  data_ = addressOf(storage_);
  dtype_ = tensor_.scalar_type();
  device_ = tensor_.device();
  sizes_ = tensor_.sizes();
}

bool PlacedTensor::inPlace() const {
  return tensor_.storage().is_alias_of(storage_) && addressOf(storage_) == data_ &&
      tensor_.scalar_type() == dtype_;
}

bool PlacedTensor::isHeld() const {
  return hvd_order::isHeld(tensor_, 1) || ownersOf(*storage_.unsafeGetStorageImpl()) > 2;
}

bool PlacedTensor::fits(const at::Tensor& parameter) const {
  return gradientDtype(parameter) == dtype_ && parameter.device() == device_ &&
      parameter.sizes() == at::IntArrayRef(sizes_);
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

bool GradientSender::send(GradientEntry& entry, const at::Tensor& gradient) {
  if (!fits(entry, gradient)) {
    return false;
  }
  copier_->release();
  const at::Tensor& wire = entry.wire;
  const TensorKey key{model, entry.tensor};
  const bool isLast = countsAsLast(wire);
  const py::gil_scoped_release noGil;
  const at::NoGradGuard noGrad;
  if (copiesBeside && !entry.casts && GradientCopier::takes(wire, gradient)) {
    engine_->announce(key);
    const auto waits = std::make_shared<std::atomic<int>>(isLast ? 2 : 1);
    if (isLast) {
      last_ = LastGradient{entry.tensor, wire, waits};
    }
    copier_->copy(wire, gradient, scale_, [engine = engine_, key, waits] {
      if (waits->fetch_sub(1) == 1) {
        markReady(*engine, key, nullptr);
      }
      waits->notify_all();
    });
    return true;
  }
  Packing packing{gradient, wire, scale_};
  if (isBestPackedWithOthers(packing)) {
    whenReady(engine_, *transport_, key, wire.device(), std::move(packing));
    return true;
  }
  pack({&packing, 1});
  if (isLast) {
    last_ = LastGradient{entry.tensor, wire, std::make_shared<std::atomic<int>>(1)};
  } else {
    markReadyWhenComputed(engine_, *transport_, model, entry.tensor, wire);
  }
  return true;
}

void GradientEntry::advance(GradientEvent event) {
  const auto next = nextPhase(phase_, event);
  HVDO_CHECK(
      next, "the gradient of tensor ", tensor, " (in consumption order) got the event ",
      kGradientEventNames[static_cast<std::size_t>(event)], " in the phase ",
      kGradientPhaseNames[static_cast<std::size_t>(phase_)]);
  phase_ = *next;
}

void GradientEntry::beginStep(int passes) {
  advance(GradientEvent::BEGIN);
  passesToGo = passes;
  late = false;
}

bool GradientSender::countsAsLast(const at::Tensor& wire) {
  return inBackward && unsent_ > 0 && --unsent_ == 0 && wire.is_cpu();
}

void GradientSender::handOver(const GradientEntry& entry) {
  if (countsAsLast(entry.wire)) {
    last_ = LastGradient{entry.tensor, entry.wire, std::make_shared<std::atomic<int>>(1)};
    return;
  }
  const py::gil_scoped_release noGil;
  markReadyWhenComputed(engine_, *transport_, model, entry.tensor, entry.wire);
}

void GradientSender::release() {
  if (const auto held = std::exchange(last_, std::nullopt)) {
    const py::gil_scoped_release noGil;
    if (held->waits->fetch_sub(1) == 1) {
      markReadyWhenComputed(engine_, *transport_, model, held->tensor, held->wire);
    }
  }
}

std::optional<TensorId> GradientSender::takeBack() {
  const auto held = std::exchange(last_, std::nullopt);
  if (!held) {
    return std::nullopt;
  }
  const py::gil_scoped_release noGil;
  for (int waits = held->waits->load(); waits != 1; waits = held->waits->load()) {
    held->waits->wait(waits);
  }
  return held->tensor;
}

void GradientSender::beginPass(const py::sequence& entries, const py::sequence& parameters) {
  unsent_ = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const py::object parameter = parameters[i];
    auto& entry = py::object(entries[i]).cast<GradientEntry&>();
    entry.fresh = !THPVariable_Unpack(parameter.ptr()).grad().defined();
    unsent_ += entry.isSent() ? 0 : 1;
  }
}

bool GradientSender::isOrdinary(const GradientEntry& entry, const at::Tensor& parameter) const {
  if (!inBackward || entry.isSent() || entry.late || entry.passesToGo < 1 ||
      !entry.gradient.inPlace()) {
    return false;
  }
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && (entry.casts || entry.onWire) && fits(entry, gradient) &&
      gradient.storage().resizable() && gradient.storage().nbytes() == gradient.nbytes() &&
      !gradient.requires_grad() && isFresh(entry, gradient) && !entry.gradient.isHeld();
}

void GradientSender::sendOrdinary(
    GradientEntry& entry,
    const at::Tensor& parameter,
    const py::object& guard) {
  entry.passesToGo = 0;
  entry.advance(GradientEvent::SEND);
  const at::Tensor gradient = parameter.grad();
  send(entry, gradient);
  parameter.mutable_grad() = entry.gradient.get();
  entry.gradientLock.close(entry.gradient.get());
  // Same as read_guard.arm_gradient().
  const py::object shown = py::cast(entry.gradient.get());
  if (py::type::of(shown).is(tensorClass_)) {
    py::setattr(shown, guardAttribute_, guard);
    py::setattr(shown, "__class__", inFlightClass_);
  }
}

void markReadyWhenComputed(
    const std::shared_ptr<Engine>& engine,
    TorchTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient) {
  if (gradient.device().is_cpu()) {
    engine->tensorReady({model, tensor});
    return;
  }
  whenReady(engine, transport, {model, tensor}, gradient.device(), std::nullopt);
}

at::Tensor placeIn(
    const at::Tensor& buffer,
    const std::vector<std::int64_t>& sizes,
    const std::vector<std::int64_t>& strides,
    std::int64_t offset) {
  auto* start = static_cast<char*>(buffer.mutable_data_ptr()) + offset * buffer.element_size();
  return at::for_blob(start, sizes)
      .strides(strides)
      .context(new at::Tensor(buffer), &releaseBuffer)
      .options(buffer.options())
      .target_device(buffer.device())
      .make_tensor();
}

std::int64_t findGivenUp(const py::sequence& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const at::Tensor& flag = py::object(entries[i]).cast<const GradientEntry&>().useFlag;
    if (flag.defined() && flag.is_cpu() && flag.numel() > 0 && isBelowZero(flag)) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

void advance(const py::sequence& entries, GradientEvent event) {
  for (size_t i = 0; i < entries.size(); ++i) {
    py::object(entries[i]).cast<GradientEntry&>().advance(event);
  }
}

void unlockGradients(const py::sequence& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    py::object(entries[i]).cast<GradientEntry&>().gradientLock.open();
  }
}

GradientReach gradientReach(const GradientEntry& entry, const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  const std::size_t ours = gradient.is_same(entry.gradient.get()) ? 1 : 0;
  if (!gradient.defined() || isHeld(gradient, 1 + ours)) {
    return GradientReach::HELD;
  }
  if (!gradient.has_storage()) {
    return GradientReach::ALONE; // sparse: autograd made it
  }
  c10::StorageImpl& storage = *gradient.storage().unsafeGetStorageImpl();
  if (!isOurs(storage) && !isPlaced(gradient.storage())) {
    return GradientReach::HELD;
  }
  return ownersOf(storage) == 1 + ours ? GradientReach::ALONE : GradientReach::SHARED;
}

void moveOut(const at::Tensor& gradient) {
  struct Memory {
    at::Tensor copy;
    at::DataPtr before; // for raw addresses, as numpy has them
  };
  const at::NoGradGuard noGrad;
  c10::StorageImpl& storage = *gradient.storage().unsafeGetStorageImpl();
  auto* memory = new Memory{gradient.clone(at::MemoryFormat::Preserve), {}};
  at::DataPtr moved(
      memory->copy.mutable_data_ptr(), memory,
      [](void* held) { delete static_cast<Memory*>(held); }, gradient.device());
  memory->before = std::exchange(storage._mutable_data_ptr_no_checks(), std::move(moved));
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

at::ScalarType gradientDtype(const at::Tensor& parameter) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  return parameter.scalar_type();
#else
  return parameter.grad_dtype().value_or(parameter.scalar_type());
#endif
}

Places places(const py::sequence& entries, const py::sequence& parameters) {
  Places found = Places::KEPT;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = py::object(entries[i]).cast<const GradientEntry&>();
    const py::object parameter = parameters[i];
    if (!entry.gradient.fits(THPVariable_Unpack(parameter.ptr()))) {
      return Places::UNFIT;
    }
    if (!entry.gradient.inPlace()) {
      found = Places::LEFT;
    }
  }
  return found;
}

} // namespace hvd_order
