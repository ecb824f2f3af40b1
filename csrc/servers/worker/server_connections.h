#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "servers/wire/connection.h"
#include "servers/wire/registration.h"

namespace hvd_order {

/// A worker's connections to the servers: what it observes of each server's work, and why it has
/// lost others.
///
/// Times are seconds since an arbitrary moment. Not thread-safe.
class ServerConnections final {
 public:
  /// Work of a server since the last call of `takeFigures`, as this worker observed it.
  struct Figures {
    ServerId server;
    ByteCount bytes;    ///< of answers
    double busySeconds; ///< time with a push of this worker under way to it
  };

  /// @throws InvalidUsage if the server already has a connection.
  void add(ServerId server, std::shared_ptr<Connection> connection);
  /// The server's connection; null if there is none.
  [[nodiscard]] Connection* find(ServerId server) const;
  /// Same, where there must be one.
  Connection& at(ServerId server) const;
  /// The servers that have a connection, in ascending order.
  [[nodiscard]] std::vector<ServerId> servers() const;
  /// Sends every server the same frame.
  void sendToAll(std::uint64_t urgency, const FrameHeader& header, const Payload& payload) const;

  /// Counts the server as lost. Its connection is kept until `takeAll`, because its thread may
  /// still be running. @return the connection; null if there was none.
  std::shared_ptr<Connection> lose(ServerId server, const std::string& why);
  [[nodiscard]] bool isLost(ServerId server) const {
    return lost_.contains(server);
  }
  /// Whether neither the owner nor a replica is left.
  [[nodiscard]] bool isLost(const SliceOwners& place) const;
  /// The error about slices of these owners, the first of which is lost.
  [[nodiscard]] ServerLost lossOf(const SliceOwners& place, Rank rank) const;
  /// Removes and returns all connections, those of lost servers too.
  std::vector<std::shared_ptr<Connection>> takeAll();

  void frameCame(ServerId server);
  /// Number of frames received from each server.
  [[nodiscard]] std::map<ServerId, std::uint64_t> framesFrom() const;
  /// A push of this worker is under way to the server.
  void pushBegan(ServerId server, double now);
  /// It is under way no more.
  void pushEnded(ServerId server, double now);
  void answerCame(ServerId server, ByteCount bytes);
  std::vector<Figures> takeFigures(double now);

 private:
  struct Connected {
    std::shared_ptr<Connection> connection;
    std::uint64_t frames = 0; // number of frames received
    ByteCount bytes = 0;
    int underWay = 0;
    double busySeconds = 0;
    double busySince = 0;
  };

  std::map<ServerId, Connected> connected_;
  std::map<ServerId, std::string> lost_; // with the reason
  std::vector<std::shared_ptr<Connection>> ended_;
};

} // namespace hvd_order
