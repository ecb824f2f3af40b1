#pragma once

#include <cstdint>

#include "servers/admission/push_windows.h"
#include "servers/wire/frame.h"
#include "servers/wire/options.h"
#include "servers/wire/payload.h"
#include "servers/wire/peers.h"

namespace hvd_order {

class ServedModel;

/// Which slice it is, what the server's options mean for it, and how its frames are sent. All
/// parts of a served slice share one.
///
/// Thread safety: all methods may be called from any thread; the slice's lock is not needed.
class SliceContext {
 public:
  SliceContext(ServedModel& servedModel, SliceIndex slice) : model(servedModel), index(slice) {}
  SliceContext(const SliceContext&) = delete;
  SliceContext& operator=(const SliceContext&) = delete;
  ~SliceContext() = default;

  [[nodiscard]] const ServerOptions& options() const;
  [[nodiscard]] const Peers& peers() const;
  [[nodiscard]] std::uint32_t sizeBytes() const;
  /// By urgency: the order in which slices wait for room.
  [[nodiscard]] PushWindows::Key key() const;

  /// A server that only sums waits for all workers.
  [[nodiscard]] Consistency consistency() const;
  /// Whether a worker may get an answer that its replica does not know yet. A parameter may miss a
  /// small update; a worker that waits for a sum may not.
  [[nodiscard]] bool mayLag() const;
  /// Whether workers ask before they push.
  [[nodiscard]] bool asksFirst() const;

  [[nodiscard]] std::uint64_t urgency() const;
  /// Of a state and the updates that follow it: the same, so that no update overtakes the state.
  [[nodiscard]] std::uint64_t replicaUrgency() const;
  /// The header of a frame about this slice.
  [[nodiscard]] FrameHeader about(FrameKind kind) const;
  /// Peers::send
  void send(Peer to, std::uint64_t urgency, const FrameHeader& header, Payload payload) const;

  ServedModel& model;
  const SliceIndex index;
};

} // namespace hvd_order
