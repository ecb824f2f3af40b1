#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/types.h"
#include "scheduler/slice_layout.h"
#include "scheduler/state_words.h"

namespace hvd_order {

/// Order in which ready slices are issued.
enum class Policy {
  kArrival,  ///< in order of readiness, as DDP and Horovod do
  kPriority, ///< in consumption order: the slice needed first goes first
  kPlanned,  ///< exactly as the plan lists them, each waited for in turn; repeated every step
};

/// Decides which slices are sent next. Pure: no thread, clock, I/O or framework.
///
/// Events go in (`tensorReady`, `offer`, `sliceDone`), decisions come out (`next`). The engine
/// drives it with real transports, the simulator with a virtual clock, the tests with random
/// events. One step of a slice's life:
///
///     waiting --every tensor it carries is ready--> ready --next or take--> in flight --done-->
///     waiting
///
/// In a split layout (SliceLayout) the end of a reduce-scatter makes its all-gather ready, unless
/// that is sharded, and the end of the last one, with the tensor of the squares, makes the squares
/// ready.
///
/// A ready slice becomes a candidate of `next` only when the order agreement offers it, because
/// all ranks may issue it. Several models share one credit.
///
/// Cost: O(log slices) for `next` and `offer`, O(1) for the other events per slice touched; no
/// allocation in the steady state. Thread safety: none; the owner calls it under its own lock.
class Scheduler final {
 public:
  /// @param creditBytes bytes that may be in flight at once (SliceLayout::creditBytes); bytes in
  ///   flight cannot be overtaken.
  Scheduler(Policy policy, ByteCount creditBytes);

  /// @param plan all slices of the model in the order to issue them; for Policy::kPlanned only.
  /// @throws InvalidUsage if a slice is larger than the credit, the id is taken or out of range,
  ///   the plan is not a permutation of the slices or has a slice before one that it waits for, or
  ///   a second model is added under Policy::kPlanned (a plan does not define an order between
  ///   models).
  void addModel(
      ModelId model,
      std::shared_ptr<const SliceLayout> layout,
      std::vector<SliceIndex> plan = {});

  /// @throws InvalidUsage unless the model is known and idle.
  void removeModel(ModelId model);

  /// Changes policy and credit. Slices that are already offered keep their places.
  /// @throws InvalidUsage if a registered slice would not fit the credit, or for a change from or
  ///   to Policy::kPlanned.
  void retune(Policy policy, ByteCount creditBytes);

  /// Announces `leavePlan`: from now on models without a plan can be added. They wait for it.
  void prepareToLeavePlan() {
    leavingPlan_ = true;
  }
  /// Gives up Policy::kPlanned for another policy. Slices keep their states; those that are ready
  /// must be offered again.
  void leavePlan(Policy policy);

  [[nodiscard]] bool hasModel(ModelId model) const;
  /// The registered models, in ascending order.
  [[nodiscard]] std::vector<ModelId> models() const;
  [[nodiscard]] bool isEmpty() const {
    return models().empty();
  }
  /// Whether no tensor of the model is ready and unfinished.
  [[nodiscard]] bool idle(ModelId model) const;
  [[nodiscard]] const SliceLayout& layout(ModelId model) const;

  /// The gradient of `tensor` is in its buffer. The event has one name on all layers:
  /// Engine::tensorReady passes it to Agreement::tensorReady, and that one passes it on.
  /// @return the slices that became ready by this call; valid until the next call.
  /// @throws InvalidUsage if the tensor is already ready and not yet finished; in a split layout
  ///   also if the squares of its last step are not done.
  const std::vector<SliceKey>& tensorReady(TensorKey tensor);

  /// Makes a slice a candidate of `next`. Under kArrival the order of offers is the order of
  /// issue. The slice need not be ready on this rank yet, but it must be when `next` returns it.
  void offer(SliceKey slice);

  /// Limits the size of slices that `next` returns from now on, except under Policy::kPlanned.
  void reserve(ByteCount largestBytes) {
    largestBytes_ = largestBytes;
  }
  static constexpr ByteCount kAnySize = std::numeric_limits<ByteCount>::max();

  /// Returns the most urgent candidate if it fits the credit, and puts it in flight.
  std::optional<SliceKey> next();

  /// Puts the given slice in flight if it is ready and fits the credit; for ranks that follow an
  /// order decided by rank 0. @return whether it did.
  bool take(SliceKey slice);

  /// Returns the slice's credit.
  /// @return the tensors that are now complete; valid until the next call.
  const std::vector<TensorKey>& sliceDone(SliceKey slice);
  /// The slices that became ready by the last event, `tensorReady` or `sliceDone`; valid until the
  /// next.
  [[nodiscard]] const std::vector<SliceKey>& becameReady() const {
    return becameReady_;
  }

  /// The slice whose turn it is under the plan; none under the other policies.
  [[nodiscard]] std::optional<SliceKey> turn() const;

  [[nodiscard]] bool isReady(SliceKey slice) const;
  [[nodiscard]] bool isPending(TensorKey tensor) const;
  /// The tensors of the model that are ready and unfinished.
  [[nodiscard]] std::vector<TensorKey> pendingTensors(ModelId model) const;
  /// Number of times the tensor has become ready.
  [[nodiscard]] std::uint32_t readyCount(TensorKey tensor) const;
  [[nodiscard]] ByteCount inFlightBytes() const {
    return inFlightBytes_;
  }
  [[nodiscard]] ByteCount creditBytes() const {
    return creditBytes_;
  }

  /// Appends what `next`, `take` and `sliceDone` depend on, apart from what never changes.
  void appendState(StateWords& words) const;

 private:
  enum class SlicePhase : std::uint8_t { kWaiting, kReady, kInFlight };

  struct ModelState {
    std::shared_ptr<const SliceLayout> layout;
    std::vector<SliceIndex> plan;
    std::size_t planned = 0;                // place in `plan` of the slice to issue next
    std::vector<SlicePhase> state;          // by slice
    std::vector<std::uint8_t> offered;      // by slice; kPlanned only
    std::vector<std::uint32_t> toCome;      // by slice: its tensors not ready, slices not done
    std::vector<std::uint32_t> slicesToGo;  // by tensor: its unfinished slices; 0 when idle
    std::vector<std::uint32_t> readyCounts; // by tensor
    std::size_t pendingTensors = 0;
  };

  struct Candidate {
    std::uint64_t urgency; // smaller goes first
    SliceKey slice;
  };

  ModelState& modelOf(ModelId model);
  [[nodiscard]] const ModelState& modelOf(ModelId model) const;
  std::optional<SliceKey> nextPlanned();
  bool putInFlight(SliceKey slice);
  void count(ModelState& model, SliceKey slice);
  static bool waitsForTensors(const SliceLayout& layout, SliceIndex slice);
  static std::uint32_t prerequisites(const SliceLayout& layout, SliceIndex slice);
  static std::uint32_t squaresDone(const ModelState& model);

  Policy policy_;
  bool leavingPlan_ = false;
  ByteCount creditBytes_;
  ByteCount inFlightBytes_ = 0;
  ByteCount largestBytes_ = kAnySize;
  std::uint64_t arrivals_ = 0;
  std::vector<std::optional<ModelState>> models_;
  std::vector<Candidate> candidates_; // binary heap, most urgent in front
  std::vector<SliceKey> becameReady_; // results; members to avoid allocations
  std::vector<TensorKey> completed_;
};

} // namespace hvd_order
