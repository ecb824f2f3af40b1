#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/all_reduce/gradient_copier.h"
#include "c10d/torch_transport.h"
#include "engine/engine.h"

namespace hvd_order {

/// A tensor that the program can reach, and the place in a buffer where it was put. A program may
/// give a gradient other memory or another dtype; model.float() does so for every gradient.
class PlacedTensor {
 public:
  explicit PlacedTensor(at::Tensor tensor) {
    place(std::move(tensor));
  }

  void place(at::Tensor tensor);
  [[nodiscard]] const at::Tensor& get() const {
    return tensor_;
  }
  /// Whether the tensor still has the memory and dtype of its place.
  [[nodiscard]] bool inPlace() const;
  /// Whether `other` has the dtype and device for which this place was made.
  [[nodiscard]] bool fits(const at::Tensor& other) const;

 private:
  at::Tensor tensor_;
  c10::Storage storage_;
  const void* data_ = nullptr; // share_memory() gives a storage other memory
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

/// The part of a parameter entry that the hook needs; hvd_order/torch/parameters/entry.py
/// describes the fields.
struct GradientEntry {
  PlacedTensor wire{at::empty({0})};
  PlacedTensor gradient{wire.get()};
  at::Tensor residual;   // see cuda/elements.h; undefined before the first gradient
  bool casts = false;    // `wire` is a cast of `gradient` to 16 bits
  bool feedback = false; // what the cast loses is kept
  TensorId tensor = 0;
  int passesToGo = 1;
  bool sent = false;
  bool late = false;
};

/// Hands the gradients of one optimizer to the engine.
///
/// A model has many hooks, and each runs between two layers whose data fill the caches. An
/// ordinary gradient therefore runs no Python code. A gradient is ordinary if it arrives in a
/// running backward pass, from an operator that has just allocated it, in the form that is sent.
///
/// Thread safety: the GIL guards this object and the entries. Only the copy runs without the GIL.
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
  /// Large CPU gradients are copied by a thread of their own. Where the training thread waits for
  /// the sums at the end of the step, a second thread gains nothing and costs a switch.
  bool copiesBeside = true;

  /// Returns a hook for Tensor.register_post_accumulate_grad_hook.
  /// @param otherwise called with the parameter if its gradient is not ordinary.
  pybind11::cpp_function hook(
      const std::shared_ptr<GradientEntry>& entry,
      pybind11::object guard,
      pybind11::object otherwise);

  /// Sets entry.wire = scale * gradient, cast if the entry says so, and marks the gradient ready,
  /// now or once it is copied.
  /// @return false, with no effect, if `gradient` cannot be packed into the wire (packing.h).
  bool send(GradientEntry& entry, const at::Tensor& gradient);

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

/// Marks a gradient ready that is in its buffer, or will be once its device has computed it.
void tensorReady(
    const std::shared_ptr<Engine>& engine,
    TorchTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient);

/// Returns a tensor in a buffer, at an offset in elements, with a storage of its own. So giving it
/// other memory (share_memory(), set_()) does not affect other tensors in the buffer.
at::Tensor placeIn(
    const at::Tensor& buffer,
    const std::vector<std::int64_t>& sizes,
    const std::vector<std::int64_t>& strides,
    std::int64_t offset);

/// Returns for each parameter whether it still has a hook: torch.utils.swap_tensors gives a
/// parameter another tensor.
std::vector<bool> hooked(const pybind11::sequence& parameters);

/// KEPT: all gradients are in their places. LEFT: some are not. UNFIT: a parameter has another
/// dtype or device than its place.
enum class Places { KEPT, LEFT, UNFIT };
Places places(const pybind11::sequence& entries, const pybind11::sequence& parameters);

} // namespace hvd_order
