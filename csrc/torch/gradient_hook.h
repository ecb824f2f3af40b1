#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/gradient_copier.h"
#include "c10d/torch_transport.h"
#include "engine/engine.h"

namespace hvd_order {

/// A tensor that the program can reach, and the place in a buffer where it was put. Programs may
/// give a gradient other memory or another type: model.float() does it to each.
class PlacedTensor {
 public:
  explicit PlacedTensor(at::Tensor tensor) {
    place(std::move(tensor));
  }

  void place(at::Tensor tensor);
  [[nodiscard]] const at::Tensor& get() const {
    return tensor_;
  }
  [[nodiscard]] bool inPlace() const;
  /// Whether a tensor has the dtype and device that this one was made for.
  [[nodiscard]] bool fits(const at::Tensor& other) const;

 private:
  at::Tensor tensor_;
  c10::Storage storage_;
  const void* data_ = nullptr; // share_memory() gives a storage another
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

/// What the hook needs of a parameter; hvd_order/torch/parameters/entry.py describes the fields.
struct GradientEntry {
  PlacedTensor wire{at::empty({0})};
  PlacedTensor gradient{wire.get()};
  TensorId tensor = 0;
  int passesToGo = 1;
  bool sent = false;
  bool late = false;
  double readySeconds = 0.0;
};

/// Hands the gradients of one optimizer to the engine.
///
/// A model has many hooks, and each runs between two layers whose data fill the caches. So the
/// ordinary gradient runs no Python code on its way. An ordinary gradient comes in a running
/// backward pass, from an operator that has just allocated it, in the form that is sent.
///
/// Thread safety: the GIL guards this object and the entries. Only the copy runs without it.
class GradientSender : public std::enable_shared_from_this<GradientSender> {
 public:
  GradientSender(
      std::shared_ptr<Engine> engine,
      std::shared_ptr<TorchTransport> transport,
      std::shared_ptr<GradientCopier> copier,
      double scale,
      pybind11::type inFlightClass,
      pybind11::str guardAttribute);

  ModelId model = 0;
  bool inBackward = false;

  /// A hook for Tensor.register_post_accumulate_grad_hook.
  /// @param otherwise is called with the parameter when its gradient is not ordinary.
  pybind11::cpp_function hook(
      const std::shared_ptr<GradientEntry>& entry,
      pybind11::object guard,
      pybind11::object otherwise);

  /// Does entry.wire = scale * gradient and marks the gradient ready, now or soon.
  /// @return false if the two differ in kind; nothing was done.
  bool send(const GradientEntry& entry, const at::Tensor& gradient);

 private:
  [[nodiscard]] bool isOrdinary(const GradientEntry& entry, const at::Tensor& parameter) const;
  void
  sendOrdinary(GradientEntry& entry, const at::Tensor& parameter, const pybind11::object& guard);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<TorchTransport> transport_;
  std::shared_ptr<GradientCopier> copier_;
  double scale_;
  pybind11::type inFlightClass_;
  pybind11::str guardAttribute_;
  pybind11::object tensorClass_;
};

/// Marks a gradient ready that lies in its buffer, or will once its device has computed it.
void tensorReady(
    const std::shared_ptr<Engine>& engine,
    TorchTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient);

/// A tensor in a buffer, at an offset in elements, with a storage of its own: whoever gives it
/// other memory (share_memory(), set_()) takes nothing from other tensors in the buffer.
at::Tensor placeIn(
    const at::Tensor& buffer,
    const std::vector<std::int64_t>& sizes,
    const std::vector<std::int64_t>& strides,
    std::int64_t offset);

/// Which parameters still have a hook: torch.utils.swap_tensors gives a parameter another tensor.
std::vector<bool> hooked(const pybind11::sequence& parameters);

/// Where gradients are, or that parameters are of another dtype or device than their places.
enum class Places { KEPT, LEFT, UNFIT };
Places places(const pybind11::sequence& entries, const pybind11::sequence& parameters);

} // namespace hvd_order
