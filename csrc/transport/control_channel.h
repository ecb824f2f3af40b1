#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// What a control message is, and what its words are.
enum class MessageKind : std::uint32_t {
  kSlices,  ///< words: number of the agreement (AgreementSequence), then slices (SliceKey::word)
  kQuery,   ///< asks for gradients; words: asking rank, its number of the inquiry, then (model,
            ///< tensor, ready count) for each gradient
  kReply,   ///< words: asking rank, number of the inquiry, answering rank, then (model, tensor)
            ///< for each gradient that the answering rank lacks
  kFailed,  ///< words: class and text of an error: the job failed on the sender
  kLeave,   ///< no words: the sender shuts down without an error
  kBarrier, ///< sent before kLeave, like the next two; see ShutdownBarrier
  kFinished,
  kMissing,
  kActivity, ///< follows a kReply; words: asking rank, number of the inquiry, answering rank,
             ///< then a text (engine/activity.h): what the answering rank waits in
};

/// A short message between two ranks, separate from the data.
struct ControlMessage {
  MessageKind kind;
  std::vector<std::uint32_t> words;
};

/// Carries control messages on connections of its own, so that they never queue behind data. Every
/// rank has connections to its neighbours in the tree (scheduler/tree.h), for the frequent messages
/// of the order agreement, and to rank 0, for the rare other ones. Messages between two ranks
/// arrive in order.
class ControlChannel {
 public:
  using OnMessage = std::function<void(Rank from, ControlMessage message)>;
  using OnLost = std::function<void(Rank peer, std::exception_ptr error)>;

  ControlChannel() = default;
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;
  virtual ~ControlChannel() = default;

  /// Starts listening. Rank 0 learns of the loss of every rank, every other rank of the loss of
  /// rank 0 and of its neighbours. Both functions are called from threads of the channel, one at a
  /// time for each peer; `onLost` at most once for each peer.
  virtual void start(OnMessage onMessage, OnLost onLost) = 0;

  /// Posts the message and returns at once, however slow the peer is. Safe from several threads,
  /// and from the functions given to `start`.
  /// @throws PeerLost if the peer is known to be gone; else `onLost` reports its loss.
  virtual void send(Rank to, const ControlMessage& message) = 0;

  /// Waits a short time for posted messages to be sent, then ends. No function is called after it
  /// returns. A second call has no effect.
  virtual void stop() noexcept = 0;
};

} // namespace hvd_order
