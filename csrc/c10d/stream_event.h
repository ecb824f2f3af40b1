#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "transport/event_watcher.h"

namespace hvd_order {

/// An event that happens when all work enqueued on a stream so far has run.
class StreamEvent final : public DeviceEvent {
 public:
  explicit StreamEvent(const c10::Stream& stream)
      : event_(stream.device_type(), c10::EventFlag::PYTORCH_DEFAULT) {
    event_.record(stream);
  }
  bool happened() override {
    return event_.query();
  }

 private:
  c10::Event event_;
};

} // namespace hvd_order
