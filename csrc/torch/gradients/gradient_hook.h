#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "torch/c10d/all_reduce/gradient_copier.h"
#include "torch/c10d/torch_transport.h"
#include "torch/gradients/gradient_phase.h"
#include "torch/gradients/storage_lock.h"

namespace hvd_order {

/// A tensor and the place in a buffer where it was put. A program may give a gradient other memory
/// or another dtype; model.float() does so for every gradient.
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
  /// Whether gradients of `parameter` have the shape, dtype and device of this place.
  [[nodiscard]] bool fits(const at::Tensor& parameter) const;
  /// Whether anything beside this object refers to the tensor or shares its storage.
  [[nodiscard]] bool isHeld() const;

 private:
  at::Tensor tensor_;
  c10::Storage storage_;
  const void* data_ = nullptr; // share_memory() gives a storage other memory
  c10::DimVector sizes_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

/// The part of a parameter entry that the hook needs; hvd_order/torch/parameters/entry.py adds the
/// rest of it.
struct GradientEntry {
  // Where the gradient lies; set with the buffers.

  /// The gradient's place in its buffer, as it is sent. Nobody outside sees this tensor, so it
  /// stays where it was put.
  at::Tensor wire = at::empty({0});
  /// What the program sees as `parameter.grad`, unless a tensor of its own stays there. In the
  /// memory of `wire` if `onWire`. The lock is on its storage alone.
  PlacedTensor gradient{at::empty({0})};
  bool onWire = true;
  /// Its place in the model's consumption order.
  TensorId tensor = 0;
  /// One element in the buffer that tells whether any rank has a gradient (use_flags.h).
  at::Tensor useFlag;

  /// `wire` is a cast of `gradient` to 16 bits, which `send` makes in one pass; set with the
  /// buffers.
  bool casts = false;

  // The step.

  /// Backward passes until the gradient is sent.
  int passesToGo = 1;
  /// The update of the last step was still deferred when this step's gradients came.
  bool late = false;
  /// The parameter had no gradient when this backward pass produced its first, so what arrives in
  /// this pass has been made by autograd.
  bool fresh = false;
  StorageLock gradientLock;           ///< closed while the gradient is in flight
  StorageLock parameterLock;          ///< closed while the update is pending
  std::deque<StorageLock> stateLocks; ///< of the optimizer's state that the program may read

  /// Passed to the engine in this step, or left out of its sums.
  [[nodiscard]] bool isSent() const {
    return phase_ != GradientPhase::WAITING;
  }
  /// The sum is there, whether or not the update has been applied.
  [[nodiscard]] bool isSummed() const {
    return phase_ == GradientPhase::SUMMED || phase_ == GradientPhase::DUE;
  }
  /// `step()` has been called, and the parameter has not been updated.
  [[nodiscard]] bool isUpdatePending() const {
    return phase_ == GradientPhase::DEFERRED || phase_ == GradientPhase::DUE;
  }
  /// @throws BrokenInvariant where the event cannot happen in this phase
  void advance(GradientEvent event);
  /// Prepares for the gradient of the next step.
  void beginStep(int passes);

 private:
  GradientPhase phase_ = GradientPhase::WAITING;
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

  /// Begins a backward pass, which has produced its first gradient. Notes which parameters have no
  /// gradient yet: what arrives for them in this pass has been made by autograd.
  void beginPass(const pybind11::sequence& entries, const pybind11::sequence& parameters);

  /// Marks a gradient ready that is in its buffer. On the CPU the last one of a step is held back
  /// until its backward pass has ended, so no rank gets all sums of a step whose pass ends by an
  /// exception.
  void handOver(const GradientEntry& entry);

  /// Marks the gradient ready that is held back, if there is one.
  void release();

  /// Forgets the gradient that is held back, and waits until nobody writes to its place.
  /// @return its tensor, if there is one.
  std::optional<TensorId> takeBack();

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

  /// A gradient that is ready once as many as `waits` have come: its copy, if a thread of its own
  /// makes it, and the end of the pass.
  struct LastGradient {
    TensorId tensor;
    at::Tensor wire;
    std::shared_ptr<std::atomic<int>> waits;
  };
  [[nodiscard]] bool countsAsLast(const at::Tensor& wire);

  std::size_t unsent_ = 0; // gradients that this pass has yet to produce
  std::optional<LastGradient> last_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<TorchTransport> transport_;
  std::shared_ptr<GradientCopier> copier_;
  double scale_;
  pybind11::type inFlightClass_;
  pybind11::str guardAttribute_;
  pybind11::object tensorClass_;
};

/// Who reaches the gradient of a parameter beside the parameter and its entry.
/// ALONE: nobody. SHARED: something shares its memory; autograd itself does while it hands over a
/// fresh gradient. HELD: the program has the tensor, or has allocated its memory.
enum class GradientReach { ALONE, SHARED, HELD };
GradientReach gradientReach(const GradientEntry& entry, const at::Tensor& parameter);

/// Gives a tensor made by placeIn(), and all that share its storage, memory of their own with the
/// same elements. Raw addresses still lead to the buffer, which lives as long as the storage.
void moveOut(const at::Tensor& gradient);

/// Marks a gradient ready that is in its buffer, or will be once its device has computed it.
void markReadyWhenComputed(
    const std::shared_ptr<Engine>& engine,
    TorchTransport& transport,
    ModelId model,
    TensorId tensor,
    const at::Tensor& gradient);

/// Returns the first of the entries whose use flag has a sum below zero: a rank has given up the
/// step; -1: there is none. Looks at gradients of the CPU only: another device would have to be
/// waited for.
std::int64_t findGivenUp(const pybind11::sequence& entries);

/// Advances all entries, a sequence of GradientEntry.
void advance(const pybind11::sequence& entries, GradientEvent event);

/// Opens the locks of gradients, whose sums have come.
void unlockGradients(const pybind11::sequence& entries);

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

/// Returns the dtype of a parameter's gradients: its own, unless the program has set grad_dtype
/// (PyTorch 2.10). Where that allows any dtype, the parameter's own.
at::ScalarType gradientDtype(const at::Tensor& parameter);

/// KEPT: all gradients are in their places. LEFT: some are not. UNFIT: the gradients of a parameter
/// have another shape, dtype or device than its place.
enum class Places { KEPT, LEFT, UNFIT };
Places places(const pybind11::sequence& entries, const pybind11::sequence& parameters);

} // namespace hvd_order
