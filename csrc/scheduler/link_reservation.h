#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "scheduler/scheduler.h"

namespace hvd_order {

/// Keeps the link free for the gradient that the next forward pass reads first.
///
/// That gradient is in the model's first slice, which is produced last in the backward pass. By
/// then large slices, which can wait but cannot be overtaken, often occupy the link. Backward
/// passes resemble each other, so the tensor that became ready one lead before the first slice in
/// the last step is the trigger tensor of this step: once it is ready, no large slice starts. No
/// large slice starts beside the first slice either: the messages of the first slice would wait
/// behind those of the large one at every hop, several times as long as they take alone. The first
/// slice holds large slices back for one lead at most, so that a late rank does not keep the link
/// idle. A model whose layout is split makes no reservation.
///
/// `ready`, `done`, `someoneWaits` and `expire` return whether `largestBytes` or `until` changed.
///
/// Thread safety: none; the engine calls it under its own lock.
class LinkReservation final {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param lead time that the bytes in flight need to arrive; zero: never reserve.
  /// @param creditBytes bytes that may be in flight; during a reservation, only slices of up to an
  ///   eighth of it start.
  void retune(std::chrono::nanoseconds lead, ByteCount creditBytes);
  void addModel(ModelId model, const SliceLayout& layout);
  void removeModel(ModelId model);

  /// Size of the largest slice that may start now; Scheduler::kAnySize without a reservation.
  [[nodiscard]] ByteCount largestBytes() const {
    return on_ ? limitBytes_ : Scheduler::kAnySize;
  }
  /// Time at which to call `expire`; the largest time if there is none.
  [[nodiscard]] Clock::time_point until() const {
    return alone_ ? aloneUntil_ : Clock::time_point::max();
  }

  /// A tensor has become ready: a reservation may start, and the first slice may be ready.
  /// @param slices the slices that became ready with it: several for a large tensor, none if its
  ///   slice waits for further tensors.
  bool ready(TensorKey tensor, const std::vector<SliceKey>& slices, Clock::time_point now);
  /// A slice has arrived.
  bool done(SliceKey slice);
  /// A reader waits. Ends a reservation whose first slice is not ready yet: the reader may wait
  /// for a slice that is held back. Once the first slice is ready, most readers wait for that
  /// slice, so the reservation stays.
  bool someoneWaits();
  /// Ends the reservation if the first slice has not arrived within one lead.
  bool expire(Clock::time_point now);

 private:
  struct ModelReservation {
    bool reserves = false;
    ByteCount firstSliceBytes = 0;
    std::vector<Clock::time_point> readyAt; // by tensor, in this step or the last
    std::vector<std::uint32_t> steps;       // by tensor: number of times it was ready
    std::uint32_t firstSlices = 0;          // number of times the first slice was ready
    std::optional<TensorId> trigger;        // its readiness begins the reservation
  };

  [[nodiscard]] std::optional<TensorId> triggerOf(
      const ModelReservation& model,
      Clock::time_point firstSliceAt) const;

  bool firstSliceReady(SliceKey slice, ByteCount bytes, Clock::time_point now);
  bool end();

  std::chrono::nanoseconds lead_{0};
  ByteCount limitBytes_ = 0;
  bool on_ = false;
  // The first slice, from its readiness on; the reservation lasts until it arrives or aloneUntil_.
  std::optional<SliceKey> alone_;
  Clock::time_point aloneUntil_;
  std::map<ModelId, ModelReservation> models_;
};

} // namespace hvd_order
