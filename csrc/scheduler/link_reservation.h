#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "scheduler/scheduler.h"

namespace hvd_order {

/// Keeps the link free for the gradient that the next forward pass reads first.
///
/// Its slice, the model's first, comes last in backward, when the link is often busy with large
/// slices that can wait and cannot be overtaken. Backward passes resemble each other: the tensor
/// that became ready one lead before that slice in the last step tells when to begin no further
/// large one. Nor does a large one begin beside the first slice: its messages would wait behind the
/// other's at every hop, several times as long as they take alone. A rank that is late may not keep
/// the link idle for longer than a lead, though.
///
/// `ready`, `done`, `someoneWaits` and `expire` return whether `largestBytes` or `until` changed.
///
/// Thread safety: none; the engine calls it under its own lock.
class LinkReservation final {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param lead how long what may be in flight needs to arrive; zero: never reserve.
  /// @param creditBytes what may be in flight; during a reservation, only slices up to an eighth
  /// begin.
  void retune(std::chrono::nanoseconds lead, ByteCount creditBytes);
  void addModel(ModelId model, const SliceLayout& layout);
  void removeModel(ModelId model);

  /// The largest slice that may begin now; Scheduler::kAnySize if nothing is held.
  [[nodiscard]] ByteCount largestBytes() const {
    return on_ ? limitBytes_ : Scheduler::kAnySize;
  }
  /// When to call `expire`; never: the largest time.
  [[nodiscard]] Clock::time_point until() const {
    return alone_ ? aloneUntil_ : Clock::time_point::max();
  }

  /// A tensor has become ready: a reservation may begin, and the first slice may have come.
  /// @param slices what became ready with it, which is more than one for a large tensor and none
  ///     where a slice waits for further tensors.
  bool ready(TensorKey tensor, const std::vector<SliceKey>& slices, Clock::time_point now);
  /// A slice has arrived.
  bool done(SliceKey slice);
  /// Someone waits, perhaps for what is held: in this step the first slice does not come. Once it
  /// has come, it is what most wait for.
  bool someoneWaits();
  bool expire(Clock::time_point now);

 private:
  struct Model {
    ByteCount firstSliceBytes = 0;
    std::vector<Clock::time_point> readyAt; // by tensor, in this step or the one before
    std::vector<std::uint32_t> steps;       // by tensor: how often it was ready
    std::uint32_t firstSlices = 0;          // how often the first slice was
    std::optional<TensorId> trigger;        // its readiness begins the reservation
  };

  [[nodiscard]] std::optional<TensorId> triggerOf(
      const Model& model,
      Clock::time_point firstSliceAt) const;

  bool firstSliceReady(SliceKey slice, ByteCount bytes, Clock::time_point now);
  bool end();

  std::chrono::nanoseconds lead_{0};
  ByteCount limitBytes_ = 0;
  bool on_ = false;
  std::optional<SliceKey>
      alone_; // the first slice travels, and the reservation lasts until it arrives
  Clock::time_point aloneUntil_; // or until then
  std::map<ModelId, Model> models_;
};

} // namespace hvd_order
