#include "torch/c10d/c10d_control.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/thread_name.h"
#include "scheduler/tree.h"
#include "torch/c10d/wait_limits.h"

// Control messages over a Gloo process group.
//
// A message travels as frames (frames.h). Frames of one pair of ranks arrive in order, so no other
// numbering is needed. Messages to rank 0 from ranks that are not its neighbours have a tag of
// their own, for rank 0 receives them from any source.
//
// Invariants: the frames of a message are posted under `sending_`, so messages to one peer do not
// mix. A frame's memory lives until its send has completed: `posted_` holds the work, and one
// thread waits for the works in batches. Each listener posts more receives, up to kMostReceives,
// when fewer than kFewestReceives are left.
//
// A channel that stops parts from its neighbours, whose listeners then end without a report. On a
// connection to or from rank 0 the owner of the channel says what the end means.
//
// Silence is not an error here: waits have practically no timeout, and a listener reports a broken
// connection. When the channel stops, posted messages get kFlushTime to go out; then work is
// aborted.

namespace hvd_order {

namespace {

constexpr int kTag = 0;
constexpr int kFarTag = 1; // and the next
// Number of sends that are waited for together: switching threads for each send costs more than
// the memory.
constexpr std::size_t kPostedBatch = 16;
// Most and fewest recvs posted ahead.
constexpr std::size_t kMostReceives = 16;
constexpr std::size_t kFewestReceives = 8;

// Ranks whose messages rank 0 receives from any source.
std::vector<Rank> farFrom(Rank rank, int size, const std::vector<Rank>& neighbours) {
  std::vector<Rank> far;
  for (Rank other = 1; rank == 0 && other < size; ++other) {
    if (std::ranges::find(neighbours, other) == neighbours.end()) {
      far.push_back(other);
    }
  }
  return far;
}

} // namespace

std::vector<Rank> neighboursInTree(Rank rank, int size) {
  const TreePlace place = placeInTree(rank, size);
  std::vector<Rank> neighbours;
  if (rank > 0) {
    neighbours.push_back(place.parent);
  }
  for (Rank child = place.firstChild; place.isChild(child); ++child) {
    neighbours.push_back(child);
  }
  return neighbours;
}

C10dControl::C10dControl(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    Rank rank,
    int size,
    const std::vector<Rank>& neighbours)
    : group_(std::move(group)),
      rank_(rank),
      farPeers_(group_, farFrom(rank, size, neighbours), kFarTag) {
  const auto listenTo = [this](Rank other) {
    peers_.push_back(std::make_unique<Neighbour>());
    peers_.back()->rank = other;
  };
  std::ranges::for_each(neighbours, listenTo);
  nearRankZero_ = std::ranges::find(neighbours, 0) != neighbours.end();
  if (rank != 0 && !nearRankZero_) {
    listenTo(0);
  }
}

C10dControl::~C10dControl() {
  stop();
}

void C10dControl::start(OnMessage onMessage, OnLost onLost) {
  onMessage_ = std::move(onMessage);
  onLost_ = std::move(onLost);
  for (auto& peer : peers_) {
    peer->listener = std::thread([this, &peer] { listen(*peer); });
  }
  farPeers_.start(onMessage_, onLost_);
  waiter_ = std::thread([this] { awaitPosted(); });
}

void C10dControl::send(Rank to, const ControlMessage& message) {
  const bool connected = rank_ == 0 ||
      std::ranges::any_of(peers_, [to](const auto& peer) { return peer->rank == to; });
  HVDO_CHECK(to != rank_ && connected, "no control connection to rank ", to);
  try {
    post(to, message);
  } catch (const std::exception& e) {
    throw PeerLost(concat("rank ", to, " cannot be reached: ", e.what()));
  }
}

void C10dControl::post(Rank to, const ControlMessage& message) {
  const int tag = to == 0 && !nearRankZero_ ? kFarTag : kTag;
  const std::scoped_lock sending(sending_);
  for (at::Tensor& content : framesOf(message)) {
    std::vector<at::Tensor> frame{std::move(content)};
    const at::DisableRecordFunctionGuard unseen; // see TorchTransport::issue
    c10::intrusive_ptr<c10d::Work> work = group_->send(frame, to, tag);
    const std::scoped_lock lock(postedMutex_);
    posted_.push_back(std::move(work));
    if (posted_.size() >= kPostedBatch) {
      postedChanged_.notify_all();
    }
  }
}

// Waits for sends one after the other. A frozen peer delays the release of later sends to other
// ranks. That is little memory, because no rank proceeds then.
void C10dControl::awaitPosted() {
  nameThisThread("hvdo sends");
  std::unique_lock lock(postedMutex_);
  while (true) {
    postedChanged_.wait(lock, [this] { return ending_ || posted_.size() >= kPostedBatch; });
    while (!posted_.empty()) {
      const c10::intrusive_ptr<c10d::Work> oldest = posted_.front();
      lock.unlock();
      try {
        oldest->wait(kForever);
      } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
        // The peer is gone; its listener reports that.
      }
      lock.lock();
      posted_.pop_front();
    }
    if (ending_) {
      postedChanged_.notify_all(); // stop() waits for this
      return;
    }
  }
}

// Called under `receiving`.
void C10dControl::postReceives(Neighbour& peer) {
  try {
    while (peer.posted.size() < kMostReceives) {
      std::vector<at::Tensor> frame{emptyFrame()};
      peer.posted.push_back({frame.front(), group_->recv(frame, peer.rank, kTag)});
    }
  } catch (const std::exception&) {
    // The connection broke. Messages that came before are still to be read: they may give the
    // reason.
    if (peer.posted.empty()) {
      throw;
    }
  }
}

/// Returns the next frame; nothing if the channel stops.
std::optional<at::Tensor> C10dControl::receiveFrame(Neighbour& peer) {
  Receive oldest;
  {
    const std::scoped_lock lock(peer.receiving);
    if (stopping_) {
      return std::nullopt;
    }
    if (peer.posted.size() < kFewestReceives) {
      postReceives(peer);
    }
    oldest = peer.posted.front();
  }
  if (!oldest.work->wait(kForever) || stopping_) { // silence is not an error
    return std::nullopt;
  }
  const std::scoped_lock lock(peer.receiving);
  peer.posted.pop_front();
  return oldest.frame;
}

void C10dControl::listen(Neighbour& peer) {
  nameThisThread("hvdo listener");
  Assembly assembly;
  try {
    while (const std::optional<at::Tensor> frame = receiveFrame(peer)) {
      std::optional<ControlMessage> message = assembly.add(peer.rank, wordsOf(*frame));
      if (message && message->kind == kParting) {
        return;
      }
      if (message) {
        onMessage_(peer.rank, *std::move(message));
      }
    }
  } catch (const std::exception&) {
    if (!stopping_) {
      onLost_(peer.rank, std::current_exception());
    }
  }
}

// Rank 0 hears of the end of the others by itself, and they of its end.
void C10dControl::part() noexcept {
  for (const auto& peer : peers_) {
    if (rank_ != 0 && peer->rank != 0) {
      try {
        post(peer->rank, {kParting, {}});
      } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
        // The peer is gone.
      }
    }
  }
}

void C10dControl::stop() noexcept {
  if (parted_.exchange(true)) {
    return;
  }
  part();
  {
    std::unique_lock lock(postedMutex_);
    ending_ = true;
    postedChanged_.notify_all();
    postedChanged_.wait_for(lock, kFlushTime, [this] { return posted_.empty(); });
    stopping_ = true;
    for (const auto& work : posted_) {
      interrupt(*work);
    }
  }
  if (waiter_.joinable()) {
    waiter_.join();
  }
  farPeers_.stop();
  for (auto& peer : peers_) {
    {
      const std::scoped_lock lock(peer->receiving);
      if (!peer->posted.empty()) {
        interrupt(*peer->posted.front().work); // what the listener waits for
      }
    }
    if (peer->listener.joinable()) {
      peer->listener.join();
    }
  }
}

} // namespace hvd_order
