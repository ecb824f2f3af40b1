#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "servers/wire/connection.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// What a process that connects to a server is.
enum class PeerKind : std::uint8_t {
  kWorker,   ///< number: its rank
  kServer,   ///< number: ServerId
  kObserver, ///< a tool that sends queries and commands; number: any
};

/// The process at the other end of a connection.
struct Peer {
  PeerKind kind;
  int number;
  friend auto operator<=>(const Peer&, const Peer&) = default;
};
/// "worker 3"
std::string nameOf(Peer peer);

/// The connections of a server, by peer.
///
/// Thread safety: all methods may be called from any thread.
class Peers {
 public:
  /// Adds a connection. @throws InvalidUsage if the peer already has one.
  void add(Peer peer, std::shared_ptr<Connection> connection);
  /// Records that the peer has announced its leaving.
  void announceLeave(Peer peer);
  /// Removes a peer that is gone. Runs on the thread of the peer's connection, so the connection
  /// object is kept until `stop`.
  /// @return whether the peer had announced its leaving.
  bool remove(Peer peer);

  [[nodiscard]] bool hasServer(ServerId server) const;
  [[nodiscard]] std::vector<Peer> all() const;
  [[nodiscard]] std::vector<Peer> all(PeerKind kind) const;

  /// Connection::send; drops the frame if the peer is gone, a loss that has already been reported.
  void send(Peer peer, std::uint64_t urgency, const FrameHeader& header, Payload payload) const;

  /// Connection::breakOff, if the peer is connected.
  void breakOff(Peer peer, const std::string& why) const;

  /// Ends all connections.
  void stop() noexcept;

 private:
  /// The peer's connection, or null.
  std::shared_ptr<Connection> connectionTo(Peer peer) const;

  mutable std::shared_mutex mutex_; // guards what follows
  std::map<Peer, std::shared_ptr<Connection>> connections_;
  std::set<Peer> leaving_;
  std::vector<std::shared_ptr<Connection>> ended_; // their threads may still be running
};

} // namespace hvd_order
