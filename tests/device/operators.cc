// Operators run on streams: the shapes of the results come from the meta device, the numbers from
// the CPU's operator, which a task of the current stream calls on the device's memory.
//
// A task holds addresses and no tensors. So the life of memory is the allocator's affair, as on a
// real device: memory that is freed too early is overwritten.

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "allocator.h"

namespace test_device {

namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

bool isOurs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice.type();
}

/// The memory of a tensor, without the tensor.
struct View {
  void* data;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype;

  explicit View(const at::Tensor& tensor)
      : data(tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}
  [[nodiscard]] at::Tensor onCpu() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
  }
};

void enqueue(Task task) {
  Device::get().stream(currentStream()).enqueue([task = std::move(task)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    task();
  });
}

/// Replaces every tensor in a stack's value by function(tensor).
template <typename Function>
IValue mapped(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(function(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) {
    return function.device;
  }
  return value;
}

struct ToMeta {
  std::map<const c10::TensorImpl*, at::Tensor>& ours; // by meta tensor
  c10::Device device{c10::DeviceType::Meta};
  at::Tensor operator()(const at::Tensor& tensor) const {
    if (!tensor.defined() || (!isOurs(tensor) && tensor.dim() == 0)) {
      return tensor;
    }
    at::Tensor meta =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      meta.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    ours[meta.unsafeGetTensorImpl()] = tensor;
    return meta;
  }
};

/// A value as the task gets it: views of our memory, copies of the CPU's scalars.
struct Argument {
  IValue other;
  std::vector<std::optional<View>> views;
  std::vector<at::Tensor> copies;
  bool isList = false;
  bool isOptionalList = false;

  explicit Argument(const IValue& value) : other(value) {
    isList = value.isTensorList();
    isOptionalList = value.isOptionalTensorList();
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (isList) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor);
      }
    } else if (isOptionalList) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        add(tensor ? *tensor : at::Tensor());
      }
    }
    if (value.isTensor() || isList || isOptionalList) {
      other = IValue();
    } else if (value.isDevice()) {
      other = c10::Device(c10::DeviceType::CPU);
    }
  }

  void add(const at::Tensor& tensor) {
    if (isOurs(tensor)) {
      views.emplace_back(View(tensor));
      copies.emplace_back();
    } else {
      views.emplace_back(std::nullopt);
      at::Tensor copy = tensor.defined() ? tensor.clone() : tensor;
      if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      copies.push_back(std::move(copy));
    }
  }

  [[nodiscard]] at::Tensor at(std::size_t i) const {
    return views[i] ? views[i]->onCpu() : copies[i];
  }
  [[nodiscard]] IValue value() const {
    if (isList) {
      c10::List<at::Tensor> list;
      for (std::size_t i = 0; i < views.size(); ++i) {
        list.push_back(at(i));
      }
      return list;
    }
    if (isOptionalList) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::size_t i = 0; i < views.size(); ++i) {
        const at::Tensor tensor = at(i);
        list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
      }
      return list;
    }
    return views.empty() ? other : IValue(at(0));
  }
};

/// A result: null if the operator writes to an argument, which then is the result.
using Results = std::vector<std::optional<View>>;

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count).vec();
  std::map<const c10::TensorImpl*, at::Tensor> ours;
  Stack meta;
  for (const IValue& argument : arguments) {
    meta.push_back(mapped(argument, ToMeta{ours}));
  }
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    // The shape depends on the numbers (nonzero): the host waits, as on a real device. A mistake of
    // the caller is an error of the CPU's operator as well.
    at::native::cpu_fallback(op, stack);
    return;
  }
  std::vector<Argument> inputs(arguments.begin(), arguments.end());
  Results results;
  torch::jit::drop(*stack, count);
  const auto taken = [&](const at::Tensor& result) {
    const auto argument = ours.find(result.unsafeGetTensorImpl());
    if (!result.defined()) {
      results.emplace_back(std::nullopt);
      return result;
    }
    if (argument != ours.end()) {
      results.emplace_back(std::nullopt);
      if (argument->second.sizes() != result.sizes()) {
        argument->second.resize_(result.sizes());
      }
      return argument->second;
    }
    at::Tensor tensor =
        at::empty_strided(result.sizes(), result.strides(), result.options().device(kDevice));
    results.emplace_back(View(tensor));
    return tensor;
  };
  for (const IValue& result : meta) {
    if (result.isTensor()) {
      stack->emplace_back(taken(result.toTensor()));
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : result.toTensorVector()) {
        list.push_back(taken(tensor));
      }
      stack->emplace_back(list);
    } else {
      stack->push_back(result);
    }
  }
  if (!results.empty() || op.schema().is_mutable()) {
    // Arguments that were resized have other memory now.
    inputs = std::vector<Argument>(arguments.begin(), arguments.end());
  }
  enqueue([op, inputs = std::move(inputs), results = std::move(results)] {
    Stack values;
    for (const Argument& input : inputs) {
      values.push_back(input.value());
    }
    try {
      op.callBoxed(&values);
    } catch (const c10::Error& error) {
      throw std::runtime_error(
          toString(op.schema().operator_name()) + ": " + error.what_without_backtrace());
    }
    std::size_t place = 0;
    const auto store = [&](const at::Tensor& value) {
      if (results[place]) {
        results[place]->onCpu().copy_(value);
      }
      ++place;
    };
    for (const IValue& value : values) {
      if (value.isTensor()) {
        store(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          store(tensor);
        }
      }
    }
  });
}

at::Tensor emptyStrided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> /*device*/,
    std::optional<bool> /*pinned*/) {
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      sizes, strides, &CachingAllocator::get(), keys, c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> /*device*/,
    std::optional<bool> /*pinned*/,
    std::optional<at::MemoryFormat> format) {
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      sizes, &CachingAllocator::get(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool /*nonBlocking*/) {
  if (to.numel() == 0) {
    return to;
  }
  const at::Tensor source =
      from.numel() == to.numel() && from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (isOurs(source) && isOurs(to)) {
    enqueue([source = View(source), target = View(to)] { target.onCpu().copy_(source.onCpu()); });
  } else if (isOurs(to)) { // pageable memory: it has been read when the call returns
    enqueue([source = source.clone(), target = View(to)] { target.onCpu().copy_(source); });
  } else {
    Stream& stream = Device::get().stream(currentStream());
    at::Tensor target = to;
    enqueue(
        [source = View(source), target = View(target)] { target.onCpu().copy_(source.onCpu()); });
    stream.await(stream.enqueued());
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copyFrom(from, to, false);
}

at::Scalar localScalar(const at::Tensor& tensor) {
  return tensor.cpu().item();
}

void recordStream(at::Tensor& tensor, c10::Stream stream) {
  CachingAllocator::get().recordStream(tensor.storage().data_ptr().get_context(), stream.id());
}

const at::Tensor& resize(
    const at::Tensor& self,
    c10::SymIntArrayRef sizes,
    std::optional<at::MemoryFormat> /*format*/) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), std::nullopt);
}

at::Tensor& setStorage(
    at::Tensor& self,
    at::Storage storage,
    std::int64_t offset,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}

at::Tensor& setWhole(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

at::Tensor& setSource(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // By default torch would make its output in the shape of `reduction="none"`, to be resized later.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &emptyStrided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &setStorage);
  m.impl("set_.source_Storage", &setWhole);
  m.impl("set_.source_Tensor", &setSource);
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("_local_scalar_dense", &localScalar);
  m.impl("record_stream", &recordStream);
}

} // namespace test_device
