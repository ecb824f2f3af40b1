#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// A short message between rank 0 and another rank, beside the data.
struct ControlMessage {
  enum class Kind : std::uint32_t {
    kSlices,   ///< words: slices (SliceKey::word), see SliceMessage
    kQuery,    ///< words: who asks, its number of the inquiry, then (model, tensor, ready count)
               ///< each: have you this gradient?
    kReply,    ///< words: who asked, that number, who answers, then (model, tensor) each: these I
               ///< have not
    kFailed,   ///< words: class and text of an error: the job failed on the sender
    kLeave,    ///< no words: the sender shuts down in peace
    kFarewell, ///< these three before that, see Farewell
    kFinished,
    kMissing,
  };

  Kind kind;
  std::vector<std::uint32_t> words;
};

/// Carries control messages on connections of its own, so that they never queue behind data. A
/// star: rank 0 talks to every rank, every other rank to rank 0 only. Messages between two ranks
/// arrive in order.
class ControlChannel {
 public:
  using OnMessage = std::function<void(Rank from, ControlMessage message)>;
  using OnLost = std::function<void(Rank peer, std::exception_ptr error)>;

  ControlChannel() = default;
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;
  virtual ~ControlChannel() = default;

  /// Starts listening. Both functions are called from threads of the channel, one at a time for
  /// each peer; `onLost` at most once for each peer.
  virtual void start(OnMessage onMessage, OnLost onLost) = 0;

  /// Posts the message and returns at once, however slow the peer is. Safe from several threads,
  /// and from the functions given to `start`.
  /// @throws PeerLost if the peer is known to be gone; else its loss is told through `onLost`.
  virtual void send(Rank to, const ControlMessage& message) = 0;

  /// Gives what has been posted a moment to go out, then ends. No function is called after it
  /// returns. Harmless when called twice.
  virtual void stop() noexcept = 0;
};

} // namespace hvd_order
