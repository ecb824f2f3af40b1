#include "servers/wire/peers.h"

#include <mutex>
#include <utility>

#include "base/error.h"

namespace hvd_order {

std::string nameOf(Peer peer) {
  static constexpr const char* kNames[] = {"worker ", "server ", "observer "};
  return kNames[static_cast<std::size_t>(peer.kind)] + std::to_string(peer.number);
}

void Peers::add(Peer peer, std::shared_ptr<Connection> connection) {
  const std::unique_lock lock(mutex_);
  if (!connections_.emplace(peer, std::move(connection)).second) {
    throw InvalidUsage(nameOf(peer) + " is connected already");
  }
}

void Peers::announceLeave(Peer peer) {
  const std::unique_lock lock(mutex_);
  leaving_.insert(peer);
}

bool Peers::remove(Peer peer) {
  const std::unique_lock lock(mutex_);
  if (auto connection = connections_.extract(peer); !connection.empty()) {
    ended_.push_back(std::move(connection.mapped()));
  }
  return leaving_.contains(peer);
}

bool Peers::hasServer(ServerId server) const {
  const std::shared_lock lock(mutex_);
  return connections_.contains({PeerKind::kServer, server});
}

std::vector<Peer> Peers::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<Peer> peers;
  peers.reserve(connections_.size());
  for (const auto& [peer, connection] : connections_) {
    peers.push_back(peer);
  }
  return peers;
}

std::vector<Peer> Peers::all(PeerKind kind) const {
  std::vector<Peer> peers = all();
  std::erase_if(peers, [&](Peer peer) { return peer.kind != kind; });
  return peers;
}

void Peers::send(Peer peer, std::uint64_t urgency, const FrameHeader& header, Payload payload)
    const {
  if (const auto connection = connectionTo(peer)) {
    connection->send(urgency, header, std::move(payload));
  }
}

void Peers::breakOff(Peer peer, const std::string& why) const {
  if (const auto connection = connectionTo(peer)) {
    connection->breakOff(why);
  }
}

std::shared_ptr<Connection> Peers::connectionTo(Peer peer) const {
  const std::shared_lock lock(mutex_);
  const auto found = connections_.find(peer);
  return found == connections_.end() ? nullptr : found->second;
}

void Peers::stop() noexcept {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    const std::unique_lock lock(mutex_);
    for (const auto& [peer, connection] : connections_) {
      connections.push_back(connection);
    }
    connections.insert(connections.end(), ended_.begin(), ended_.end());
    connections_.clear();
    ended_.clear();
  }
  for (const auto& connection : connections) {
    connection->stop();
  }
}

} // namespace hvd_order
