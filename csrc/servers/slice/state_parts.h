#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "servers/slice/slice_context.h"
#include "servers/slice/slice_store.h"

namespace hvd_order {

/// Sends a state to a server, in parts: its counters, its value, then the optimizer's moments.
/// @param map version of the map by which it is sent.
/// @param isCopy the original stays here.
void sendState(
    const SliceContext& context,
    const SliceState& state,
    ServerId to,
    std::uint64_t urgency,
    std::uint32_t map,
    bool isCopy);

/// Puts together the states of one slice that arrive in parts. Not thread-safe.
class StateReceiver {
 public:
  explicit StateReceiver(const SliceContext& context) : context_(context) {}

  /// Whether the frame is part of a slice's initial state, which worker 0 sends; later states come
  /// from servers. @throws FrameError if it comes from another process, or begins wrongly.
  static bool begins(Peer from, const FrameHeader& header);

  /// Stores a part. @return the whole state once its last part has come.
  /// @throws FrameError if the part does not fit, or the state is not a possible one.
  std::optional<SliceState> take(Peer from, const FrameHeader& header, Payload payload);

  /// Drops the parts of a lost server.
  void forget(ServerId server);

 private:
  using Parts = std::vector<std::optional<Payload>>;

  std::optional<Parts> takePart(Peer from, const FrameHeader& header, Payload payload);

  const SliceContext& context_;
  std::map<std::pair<Peer, bool>, Parts> incoming_; // by sender, and whether it is a copy
};

} // namespace hvd_order
