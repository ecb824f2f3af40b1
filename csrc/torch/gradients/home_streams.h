#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "torch/c10d/stream_event.h"

namespace hvd_order {

/// A point in the work of the home streams.
class StreamPoint final {
 public:
  explicit StreamPoint(std::vector<std::shared_ptr<StreamEvent>> events)
      : events_(std::move(events)) {}

  /// Makes the current streams wait for the point. @return whether it had already passed.
  [[nodiscard]] bool passed() const;

 private:
  std::vector<std::shared_ptr<StreamEvent>> events_; // one for each device
};

/// The streams on which one optimizer's sums are unpacked and its parameters updated, one for each
/// device.
///
/// In ordinary training an update runs on the stream that is current in `step()`, and programs
/// order their other streams behind that. A deferred update runs on the same stream, whoever reads
/// first.
///
/// Not thread safe.
class HomeStreams final {
 public:
  /// @param devices those of the parameters; the CPU has no streams and is ignored.
  explicit HomeStreams(const std::vector<c10::Device>& devices);

  /// Takes the current streams, behind what the streams before were given to do.
  void follow();
  /// Makes the home streams wait for what the current streams were given to do. They will read
  /// `values`, whose memory is not used again before that.
  void waitForCurrent(const std::vector<at::Tensor>& values);

 private:
  friend class OnHomeStreams;

  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
  std::vector<c10::Stream> streams_;
};

/// A context in which work runs on the home streams. The reader's streams, which are current
/// outside, wait for that work.
class OnHomeStreams final {
 public:
  explicit OnHomeStreams(std::shared_ptr<HomeStreams> home) : home_(std::move(home)) {}

  void enter();
  void exit();
  /// Returns the point that the work in this context has come to; null if there are no devices.
  [[nodiscard]] std::shared_ptr<StreamPoint> point() const;

 private:
  std::shared_ptr<HomeStreams> home_;
  std::vector<c10::Stream> outside_; // current before `enter`
};

} // namespace hvd_order
