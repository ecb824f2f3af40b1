#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "scheduler/slice_layout.h"
#include "torch/c10d/stream_event.h"
#include "torch/packing/packing.h"

namespace hvd_order {

/// The device events around the slices of one model: behind the gradients that go into a slice, and
/// behind its newest sum.
///
/// Thread safety: every method may be called from any thread.
class SliceEvents final {
 public:
  /// Called with null when the device has computed the gradient, else with its error.
  using Then = EventWatcher::Then;

  /// A stream that produced gradients of one slice, and what to call when it has.
  struct Producer {
    c10::Stream stream;
    std::vector<Packing> packings; // still to be enqueued on the stream
    std::vector<Then> thens;
    std::vector<Then> computed; // called when the device has computed the gradients in any case
  };

  SliceEvents(SliceLayout layout, std::shared_ptr<EventPool> events);

  /// Notes that `stream` produces the gradient of a tensor. A slice needs all of its tensors, so
  /// one event for each stream is enough, behind the last of them.
  /// @param packing what is still to be done on the stream, with the others of the slice.
  /// @return the producers of the tensor's slices if it was the last; else nothing.
  std::vector<Producer> produced(
      TensorId tensor,
      const c10::Stream& stream,
      std::optional<Packing> packing,
      Then then,
      Then computed);

  /// Sets the events that the next transfer of the tensor's slices must wait for on the device.
  void setReady(TensorId tensor, const std::vector<std::shared_ptr<StreamEvent>>& events);
  /// Takes the events set by `setReady`.
  std::vector<std::shared_ptr<StreamEvent>> takeReady(SliceIndex slice);

  /// Sets the event behind the newest sum of a slice. Its stream must be the same for all slices.
  void setSummed(SliceIndex slice, std::shared_ptr<StreamEvent> event);
  /// Makes `stream` wait for the newest sums of a tensor's slices that have been enqueued.
  void orderBehindSums(TensorId tensor, const c10::Stream& stream) const;

 private:
  struct PerSlice {
    std::size_t toCome = 0; // tensors without a gradient so far
    std::vector<Producer> producers;
    std::vector<std::shared_ptr<StreamEvent>> ready;
    std::shared_ptr<StreamEvent> summed;
    std::uint64_t number = 0; // of `summed`: larger is later
  };

  const SliceLayout layout_;
  const std::shared_ptr<EventPool> events_;
  mutable std::mutex mutex_; // guards what follows
  std::vector<PerSlice> slices_;
  std::uint64_t sums_ = 0;
};

} // namespace hvd_order
