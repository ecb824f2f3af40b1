#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "servers/wire/peers.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// When pushes are applied.
enum class Consistency : std::uint8_t {
  kSynchronous,  ///< one round at a time, when every worker's push of it is there
  kAsynchronous, ///< each push by itself, as it arrives
};

/// What a parameter server is told when it starts.
struct ServerOptions {
  ServerId server = 0;
  int workers = 1;
  Consistency consistency = Consistency::kSynchronous;
  /// Asynchronous: an answer waits until no worker is more than this many rounds behind.
  Round staleness = std::numeric_limits<Round>::max();
  /// Asynchronous: an update is applied at most this many versions after the version that its
  /// worker had read.
  std::optional<Round> delayBound = std::nullopt;
  /// With a delay bound: where it is faster, other servers add the updates of several workers and
  /// send the sum here.
  bool aggregates = false;
  /// Seconds since an arbitrary moment.
  std::function<double()> clock = [] {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
  };
  /// Whether the most urgent answer goes first; else answers go in the order in which they became
  /// ready.
  bool ordered = true;
  /// A replica may lag by updates whose norms add up to at most this; 0: answers wait for the
  /// replica.
  double divergenceBound = 0;
  std::size_t largestSlice = std::size_t{64} << 20;
  /// Receives a log line about a refused frame and its sender.
  std::function<void(const std::string&)> log;
  /// Called for a control frame, on the connection's thread, before later frames of that
  /// connection are handled.
  std::function<void(Peer from, const std::string& text)> onControl;
  /// Called when a peer is gone; `why` is empty if the peer had announced it.
  std::function<void(Peer peer, const std::string& why)> onGone;
  /// Called when a worker or another server is lost. @return whether this process was suspended
  /// for long until recently. In that case the other processes have given this server up, and it
  /// does no more work.
  std::function<bool()> wasAway;

  /// Urgency of a slice among the frames that wait for a connection; the lowest number goes first.
  [[nodiscard]] std::uint64_t urgencyOf(SliceIndex slice) const {
    return ordered ? std::uint64_t{slice} + 1 : 1;
  }
};

} // namespace hvd_order
