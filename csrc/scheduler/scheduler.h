#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/types.h"
#include "scheduler/slice_layout.h"

namespace hvd_order {

/// In which order ready slices are issued.
enum class Policy {
  kArrival,  ///< as they became ready: what DDP and Horovod do
  kPriority, ///< by consumption order: what is needed first goes first
  kPlanned,  ///< exactly as the plan lists them, waiting for each in turn; round and round
};

/// Decides which slices travel next. Pure: no thread, clock, I/O or framework.
///
/// Events go in (`tensorReady`, `offer`, `sliceDone`), decisions come out (`next`). The engine
/// drives it with real transports, the simulator with a virtual clock, the tests with random
/// events. One step of a slice's life:
///
///     waiting --every tensor it carries is ready--> ready --next or take--> in flight --done-->
///     waiting
///
/// A ready slice becomes a candidate of `next` only when it is offered: order agreement stands in
/// between and offers what all ranks may issue. Several models share one credit.
///
/// Cost: O(log slices) for `next` and `offer`, O(1) for the other events per slice touched; no
/// allocation in the steady state. Thread safety: none; the owner calls it under its own lock.
class Scheduler final {
 public:
  /// @param creditBytes how much may be in flight at once; what is in flight cannot be overtaken.
  Scheduler(Policy policy, ByteCount creditBytes);

  /// @param plan all slices of the model in the order to issue them; for Policy::kPlanned only.
  /// @throws InvalidUsage if a slice is larger than the credit, the id is taken or out of range,
  ///   the plan is no permutation of the slices, or a second model comes under Policy::kPlanned
  ///   (which says nothing about the order between models).
  void addModel(
      ModelId model,
      std::shared_ptr<const SliceLayout> layout,
      std::vector<SliceIndex> plan = {});

  /// @throws InvalidUsage unless the model is known and idle.
  void removeModel(ModelId model);

  /// Changes what the constructor was given. Slices offered before keep the place they have.
  /// @throws InvalidUsage if a registered slice would not fit the credit, or for a change from or
  /// to
  ///   Policy::kPlanned.
  void retune(Policy policy, ByteCount creditBytes);

  [[nodiscard]] bool hasModel(ModelId model) const;
  /// Whether no tensor of the model is ready and unfinished.
  [[nodiscard]] bool idle(ModelId model) const;
  [[nodiscard]] const SliceLayout& layout(ModelId model) const;

  /// The gradient of `tensor` lies in its buffer.
  /// @return the slices that became ready through it; valid until the next call.
  /// @throws InvalidUsage if the tensor is ready already and not yet finished.
  const std::vector<SliceKey>& tensorReady(TensorKey tensor);

  /// Makes a slice a candidate of `next`. Under kArrival the order of offers is the order of issue.
  /// It need not be ready here when other ranks decided; then it is the caller who waits.
  void offer(SliceKey slice);

  /// From now on `next` begins no slice with more bytes, except under Policy::kPlanned.
  void reserve(ByteCount largestBytes) {
    largestBytes_ = largestBytes;
  }
  static constexpr ByteCount kAnySize = std::numeric_limits<ByteCount>::max();

  /// Most urgent candidate if it fits the credit; it counts as in flight from then on.
  std::optional<SliceKey> next();

  /// Puts this very slice in flight if it is ready and fits the credit; for ranks that follow an
  /// order decided elsewhere.
  bool take(SliceKey slice);

  /// Gives the credit back.
  /// @return the tensors that are complete now; valid until the next call.
  const std::vector<TensorKey>& sliceDone(SliceKey slice);

  /// The slice whose turn it is under the plan; none under the other policies.
  [[nodiscard]] std::optional<SliceKey> turn() const;

  [[nodiscard]] bool isReady(SliceKey slice) const;
  [[nodiscard]] bool isPending(TensorKey tensor) const;
  /// How many times the tensor has become ready.
  [[nodiscard]] std::uint32_t readyCount(TensorKey tensor) const;
  [[nodiscard]] ByteCount inFlightBytes() const {
    return inFlightBytes_;
  }
  [[nodiscard]] ByteCount creditBytes() const {
    return creditBytes_;
  }

 private:
  enum class SliceState : std::uint8_t { kWaiting, kReady, kInFlight };

  struct Model {
    std::shared_ptr<const SliceLayout> layout;
    std::vector<SliceIndex> plan;
    std::size_t planned = 0;                  // place in `plan` of the slice to issue next
    std::vector<SliceState> state;            // by slice
    std::vector<std::uint8_t> offered;        // by slice; kPlanned only
    std::vector<std::uint32_t> tensorsToCome; // by slice: tensors it carries that are not ready yet
    std::vector<std::uint32_t> slicesToGo;    // by tensor: its unfinished slices; 0 when idle
    std::vector<std::uint32_t> readyCounts;   // by tensor
    std::size_t pendingTensors = 0;
  };

  struct Candidate {
    std::uint64_t urgency; // smaller goes first
    SliceKey slice;
  };

  Model& modelOf(ModelId model);
  [[nodiscard]] const Model& modelOf(ModelId model) const;
  std::optional<SliceKey> nextPlanned();
  bool putInFlight(SliceKey slice);

  Policy policy_;
  ByteCount creditBytes_;
  ByteCount inFlightBytes_ = 0;
  ByteCount largestBytes_ = kAnySize;
  std::uint64_t arrivals_ = 0;
  std::vector<std::optional<Model>> models_;
  std::vector<Candidate> candidates_; // binary heap, most urgent in front
  std::vector<SliceKey> becameReady_; // results, kept to spare the allocation
  std::vector<TensorKey> completed_;
};

} // namespace hvd_order
