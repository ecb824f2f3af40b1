#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "server/slice/held_slice.h"
#include "server/wire/peers.h"

namespace hvd_order {

struct ServerOptions {
  ServerId server = 0;
  int workers = 1;
  Consistency consistency = Consistency::kSynchronous;
  /// Asynchronous: an answer waits until no worker is more rounds behind than this.
  Round staleness = std::numeric_limits<Round>::max();
  /// Asynchronous: no update is applied more versions after the one that its worker had read.
  std::optional<Round> delayBound = std::nullopt;
  /// With a delay bound: where it is faster, other servers add several workers' updates up and send
  /// the sum here.
  bool aggregates = false;
  /// Seconds, from any moment on.
  std::function<double()> clock = [] {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
  };
  /// Answers go most urgent first; else in the order in which they became ready.
  bool ordered = true;
  /// A replica may lag by updates whose norms add up to this; 0: answers wait for the replica.
  double divergenceBound = 0;
  std::size_t largestSlice = std::size_t{64} << 20;
  /// A line for the log: what was refused, and from whom.
  std::function<void(const std::string&)> log;
  /// A control frame came; called on the connection's thread, before what follows on that
  /// connection.
  std::function<void(Peer from, const std::string& text)> onControl;
  /// A peer is gone: `why` is empty if it said so before.
  std::function<void(Peer peer, const std::string& why)> onGone;
  /// Asked when a worker or another server is lost: whether this process did not run for long until
  /// lately. Then it is this server that they have given up, and it does nothing more.
  std::function<bool()> wasAway;
};

} // namespace hvd_order
