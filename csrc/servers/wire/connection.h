#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "servers/wire/frame.h"
#include "servers/wire/payload.h"

namespace hvd_order {

/// Carries frames between two processes, one of which is a parameter server.
class Connection {
 public:
  using OnFrame = std::function<void(const FrameHeader& header, Payload payload)>;
  using OnLost = std::function<void(const std::string& why)>;

  /// Ahead of all other frames that wait.
  static constexpr std::uint64_t kAtOnce = 0;
  /// After all frames that wait at that moment or are more urgent.
  static constexpr std::uint64_t kLast = ~std::uint64_t{0};

  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  virtual ~Connection() = default;

  /// Starts receiving. Both functions are called from one thread of the connection. `onLost` is
  /// called at most once and last: the connection broke, or a frame came that no honest peer
  /// sends.
  virtual void start(OnFrame onFrame, OnLost onLost) = 0;

  /// Queues a frame and returns at once. Of the waiting frames the one with the lowest `urgency`
  /// goes next; frames of equal urgency go in the order of the calls. This method sets session,
  /// number and payload size of the header. After the connection is lost, frames are dropped:
  /// `onLost` has reported the loss.
  virtual void send(std::uint64_t urgency, FrameHeader header, Payload payload) = 0;

  /// Ends the connection from this side as if it had been lost: nothing more is sent, `onLost`
  /// gets this reason on its thread, and the other end sees a closed connection. Does not wait.
  virtual void breakOff(const std::string& why) noexcept = 0;

  /// Gives queued frames a moment to go out, then ends the connection. Must not be called from a
  /// function given to `start`.
  virtual void stop() noexcept = 0;
};

} // namespace hvd_order
