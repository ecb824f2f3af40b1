#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "server/wire/connection.h"
#include "server/wire/registration.h"

namespace hvd_order {

/// Who is at the other end of a connection.
struct Peer {
  enum class Kind : std::uint8_t {
    kWorker,   ///< number: its rank
    kServer,   ///< number: ServerId
    kObserver, ///< a tool that asks and gives orders; number: any
  };
  Kind kind;
  int number;
  friend auto operator<=>(const Peer&, const Peer&) = default;
};
/// "worker 3"
std::string nameOf(Peer peer);

/// The connections of a server, by who is at their other ends.
///
/// Thread safety: all methods may be called from any thread.
class Peers {
 public:
  /// @throws InvalidUsage if that peer has a connection already.
  void add(Peer peer, std::shared_ptr<Connection> connection);
  /// The peer has said that it goes.
  void sayGoodbye(Peer peer);
  /// The peer is gone. On its connection's thread, so the connection is kept until `stop`.
  /// @return whether it had said so before.
  bool remove(Peer peer);

  [[nodiscard]] bool hasServer(ServerId server) const;
  [[nodiscard]] std::vector<Peer> all() const;
  [[nodiscard]] std::vector<Peer> all(Peer::Kind kind) const;

  /// Connection::send; dropped if the peer is gone, which has been reported then.
  void send(Peer peer, std::uint64_t urgency, const FrameHeader& header, Payload payload) const;

  /// Connection::breakOff, if the peer is there.
  void breakOff(Peer peer, const std::string& why) const;

  /// Ends all connections.
  void stop() noexcept;

 private:
  /// Null if the peer is not there.
  std::shared_ptr<Connection> connectionTo(Peer peer) const;

  mutable std::shared_mutex mutex_; // guards what follows
  std::map<Peer, std::shared_ptr<Connection>> connections_;
  std::set<Peer> goodbyes_;
  std::vector<std::shared_ptr<Connection>> ended_; // their threads may be about to end
};

} // namespace hvd_order
