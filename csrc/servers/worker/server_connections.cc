#include "servers/worker/server_connections.h"

#include <utility>

// A server is busy for a worker from the moment at which one of its pushes is under way there until
// none is. The time adds up over intervals; `takeFigures` ends the open interval and begins another
// one, so no time counts twice.
//
// Invariant: a server is connected or lost, never both. It comes back only with another number.
namespace hvd_order {

void ServerConnections::add(ServerId server, std::shared_ptr<Connection> connection) {
  if (!connected_.emplace(server, Connected{std::move(connection)}).second) {
    throw InvalidUsage(concat("server ", server, " is connected already"));
  }
}

Connection* ServerConnections::find(ServerId server) const {
  const auto found = connected_.find(server);
  return found == connected_.end() ? nullptr : found->second.connection.get();
}

Connection& ServerConnections::at(ServerId server) const {
  Connection* const connection = find(server);
  HVDO_CHECK(connection != nullptr, "no connection to server ", server);
  return *connection;
}

std::vector<ServerId> ServerConnections::servers() const {
  std::vector<ServerId> servers;
  servers.reserve(connected_.size());
  for (const auto& [server, connected] : connected_) {
    servers.push_back(server);
  }
  return servers;
}

void ServerConnections::sendToAll(
    std::uint64_t urgency,
    const FrameHeader& header,
    const Payload& payload) const {
  for (const auto& [server, connected] : connected_) {
    connected.connection->send(urgency, header, payload);
  }
}

std::shared_ptr<Connection> ServerConnections::lose(ServerId server, const std::string& why) {
  lost_[server] = why;
  const auto connected = connected_.extract(server);
  if (connected.empty()) {
    return nullptr;
  }
  ended_.push_back(connected.mapped().connection);
  return ended_.back();
}

bool ServerConnections::isLost(const SliceOwners& place) const {
  return isLost(place.owner) && (place.replica == kNoServer || isLost(place.replica));
}

ServerLost ServerConnections::lossOf(const SliceOwners& place, Rank rank) const {
  const std::string& why = lost_.at(place.owner);
  if (place.replica != kNoServer) {
    return ServerLost(concat(
        "server ", place.owner, " is gone (seen by rank ", rank, ": ", why, "), and server ",
        place.replica, ", which has the copy of its slices, too (", lost_.at(place.replica), ")"));
  }
  return ServerLost(concat(
      "server ", place.owner, " is gone, and nobody has a copy of its slices (seen by rank ", rank,
      ": ", why, "); HVD_ORDER_PS_REPLICAS=1 keeps one on another server"));
}

std::vector<std::shared_ptr<Connection>> ServerConnections::takeAll() {
  std::vector<std::shared_ptr<Connection>> all;
  for (const auto& [server, connected] : std::exchange(connected_, {})) {
    all.push_back(connected.connection);
  }
  for (auto& connection : std::exchange(ended_, {})) {
    all.push_back(std::move(connection));
  }
  return all;
}

void ServerConnections::frameCame(ServerId server) {
  if (const auto found = connected_.find(server); found != connected_.end()) {
    ++found->second.frames;
  }
}

std::map<ServerId, std::uint64_t> ServerConnections::framesFrom() const {
  std::map<ServerId, std::uint64_t> frames;
  for (const auto& [server, connected] : connected_) {
    frames[server] = connected.frames;
  }
  return frames;
}

void ServerConnections::pushBegan(ServerId server, double now) {
  const auto found = connected_.find(server);
  if (found == connected_.end()) {
    return;
  }
  if (found->second.underWay == 0) {
    found->second.busySince = now;
  }
  ++found->second.underWay;
}

void ServerConnections::pushEnded(ServerId server, double now) {
  const auto found = connected_.find(server);
  if (found == connected_.end() || found->second.underWay == 0) {
    return;
  }
  --found->second.underWay;
  if (found->second.underWay == 0) {
    found->second.busySeconds += now - found->second.busySince;
  }
}

void ServerConnections::answerCame(ServerId server, ByteCount bytes) {
  if (const auto found = connected_.find(server); found != connected_.end()) {
    found->second.bytes += bytes;
  }
}

std::vector<ServerConnections::Figures> ServerConnections::takeFigures(double now) {
  std::vector<Figures> figures;
  for (auto& [server, connected] : connected_) {
    if (connected.underWay > 0) {
      connected.busySeconds += now - connected.busySince;
      connected.busySince = now;
    }
    figures.push_back(
        {server, std::exchange(connected.bytes, 0), std::exchange(connected.busySeconds, 0)});
  }
  return figures;
}

} // namespace hvd_order
