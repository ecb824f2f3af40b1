#include "torch/c10d/far_peers.h"

#include <chrono>
#include <utility>

#include "base/thread_name.h"
#include "torch/c10d/wait_limits.h"

// Receives from many peers with one thread.
//
// recvs from any source are posted ahead. Gloo fills them in the order in which senders announce
// their messages, and lets each sender send when its turn comes. The listener waits for the oldest.
// Gloo leaves two things open, and a clock closes both: every kTick it interrupts the listener,
// which then looks at all peers and recvs.
//
// - Such a recv does not fail when a connection breaks. So a *probe*, a recv that is never
//   completed, is posted for each peer. To wait for an interrupted recv returns at once, or throws
//   if its connection is broken.
// - A peer that freezes between its announcement and its message keeps the oldest recv waiting,
//   while younger ones may have completed. A frame shows by itself that it has arrived
//   (frames.h).
//
// Invariants: messages of one peer are taken in the order in which they were sent, because their
// recvs are in that order in `receives_`, and because `takeArrived` looks at the youngest first:
// what it finds arrived, all older ones of the same peer are. A peer that is lost is reported after
// the messages that arrived from it: its probe is looked at before those are taken. Only the
// listener changes `receives_` and `peers_` once it runs, and it calls both functions.

namespace hvd_order {

namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
// recvs posted ahead: so many peers may freeze at the wrong moment.
constexpr std::size_t kReceives = 64;

} // namespace

FarPeers::FarPeers(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<Rank> peers, int tag)
    : group_(std::move(group)), tag_(tag) {
  for (const Rank peer : peers) {
    peers_[peer];
  }
}

FarPeers::~FarPeers() {
  stop();
}

void FarPeers::start(ControlChannel::OnMessage onMessage, ControlChannel::OnLost onLost) {
  onMessage_ = std::move(onMessage);
  onLost_ = std::move(onLost);
  if (peers_.empty()) {
    return;
  }
  replenish();
  listener_ = std::thread([this] { listen(); });
  clock_ = std::thread([this] { tick(); });
}

void FarPeers::replenish() {
  const std::scoped_lock lock(mutex_);
  try {
    while (receives_.size() < kReceives) {
      std::vector<at::Tensor> frame{emptyFrame()};
      receives_.push_back({frame.front(), group_->recvAnysource(frame, tag_)});
    }
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // A peer announced a message and died; its probe reports that. Those posted before remain.
  }
}

void FarPeers::tick() {
  nameThisThread("hvdo clock");
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kTick, [this] { return stopping_; })) {
    if (!receives_.empty()) {
      interrupt(*receives_.front().work);
    }
  }
}

void FarPeers::listen() {
  nameThisThread("hvdo far peers");
  while (true) {
    replenish();
    Receive oldest;
    {
      const std::scoped_lock lock(mutex_);
      if (stopping_) {
        return;
      }
      if (!receives_.empty()) {
        oldest = receives_.front();
      }
    }
    if (!oldest.work) {
      look(); // says who is lost; nothing can be received any more
      return;
    }
    bool arrived = false;
    try {
      arrived = oldest.work->wait(kForever); // silence is not an error
    } catch (const std::exception&) {
      dropOldest(); // its sender died before it sent; the probe reports that
      continue;
    }
    if (arrived) {
      dropOldest();
      take(oldest);
    } else {
      look();
    }
  }
}

void FarPeers::dropOldest() {
  const std::scoped_lock lock(mutex_);
  receives_.pop_front();
}

void FarPeers::look() {
  const std::map<Rank, std::exception_ptr> lost = broken();
  takeArrived();
  for (const auto& [peer, error] : lost) {
    peers_.erase(peer);
    onLost_(peer, error);
  }
}

/// Returns the peers whose connections are broken, and why.
std::map<Rank, std::exception_ptr> FarPeers::broken() {
  std::map<Rank, std::exception_ptr> lost;
  for (auto& [rank, peer] : peers_) {
    try {
      if (!peer.probe.work) {
        std::vector<at::Tensor> frame{emptyFrame()};
        peer.probe = {frame.front(), group_->recv(frame, rank, tag_ + 1)};
      }
      interrupt(*peer.probe.work);
      peer.probe.work->wait(kForever);
    } catch (const std::exception&) {
      lost[rank] = std::current_exception();
    }
  }
  return lost;
}

void FarPeers::takeArrived() {
  std::deque<Receive> arrived;
  {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = receives_.size(); i-- > 0;) {
      if (hasArrived(receives_[i].frame)) {
        arrived.push_front(receives_[i]);
        receives_.erase(receives_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
  for (const Receive& receive : arrived) {
    while (!receive.work->wait(kForever)) { // false if it was interrupted before it arrived
    }
    take(receive);
  }
}

void FarPeers::take(const Receive& receive) {
  const Rank from = receive.work->sourceRank();
  const auto peer = peers_.find(from);
  if (peer == peers_.end()) {
    return;
  }
  try {
    if (std::optional<ControlMessage> message =
            peer->second.assembly.add(from, wordsOf(receive.frame))) {
      onMessage_(from, *std::move(message));
    }
  } catch (const std::exception&) { // what it sends makes no sense any more
    peers_.erase(peer);
    onLost_(from, std::current_exception());
  }
}

void FarPeers::stop() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    stopped_.notify_all();
    if (!receives_.empty()) {
      interrupt(*receives_.front().work);
    }
  }
  if (clock_.joinable()) {
    clock_.join();
  }
  if (listener_.joinable()) {
    listener_.join();
  }
}

} // namespace hvd_order
