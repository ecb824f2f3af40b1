#include "server/peers.h"

#include <mutex>
#include <utility>

#include "base/error.h"

namespace hvd_order {

std::string nameOf(Peer peer) {
  static constexpr const char* kNames[] = {"worker ", "server ", "observer "};
  return kNames[static_cast<std::size_t>(peer.kind)] + std::to_string(peer.number);
}

void Peers::add(Peer peer, std::shared_ptr<Link> link) {
  const std::unique_lock lock(mutex_);
  if (!links_.emplace(peer, std::move(link)).second) {
    throw InvalidUsage(nameOf(peer) + " is connected already");
  }
}

void Peers::sayGoodbye(Peer peer) {
  const std::unique_lock lock(mutex_);
  goodbyes_.insert(peer);
}

bool Peers::remove(Peer peer) {
  const std::unique_lock lock(mutex_);
  if (auto link = links_.extract(peer); !link.empty()) {
    ended_.push_back(std::move(link.mapped()));
  }
  return goodbyes_.contains(peer);
}

bool Peers::hasServer(ServerId server) const {
  const std::shared_lock lock(mutex_);
  return links_.contains({Peer::Kind::kServer, server});
}

std::vector<Peer> Peers::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<Peer> peers;
  peers.reserve(links_.size());
  for (const auto& [peer, link] : links_) {
    peers.push_back(peer);
  }
  return peers;
}

std::vector<Peer> Peers::all(Peer::Kind kind) const {
  std::vector<Peer> peers = all();
  std::erase_if(peers, [&](Peer peer) { return peer.kind != kind; });
  return peers;
}

void Peers::send(Peer peer, std::uint64_t urgency, const FrameHeader& header, Payload payload)
    const {
  if (const auto link = linkTo(peer)) {
    link->send(urgency, header, std::move(payload));
  }
}

void Peers::breakOff(Peer peer, const std::string& why) const {
  if (const auto link = linkTo(peer)) {
    link->breakOff(why);
  }
}

std::shared_ptr<Link> Peers::linkTo(Peer peer) const {
  const std::shared_lock lock(mutex_);
  const auto found = links_.find(peer);
  return found == links_.end() ? nullptr : found->second;
}

void Peers::stop() noexcept {
  std::vector<std::shared_ptr<Link>> links;
  {
    const std::unique_lock lock(mutex_);
    for (const auto& [peer, link] : links_) {
      links.push_back(link);
    }
    links.insert(links.end(), ended_.begin(), ended_.end());
    links_.clear();
    ended_.clear();
  }
  for (const auto& link : links) {
    link->stop();
  }
}

} // namespace hvd_order
