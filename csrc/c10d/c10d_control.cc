#include "c10d/c10d_control.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "c10d/wait_limits.h"

// Control messages over a Gloo process group.
//
// A message on the wire consists of frames of kFrameWords words. The first frame begins with the
// kind and the number of words of the message; the words follow and continue in as many frames as
// they need. Frames of one pair of ranks arrive in order, so no other numbering is needed.
//
// Invariants: the frames of a message are posted under the peer's `sending` lock, so messages do
// not mix. A frame's memory lives until its send has completed: `posted_` holds the work, and one
// thread waits for the works in batches. Each listener posts more receives, up to kMostReceives,
// when fewer than kFewestReceives are left.
//
// Silence is not an error here: waits have practically no timeout, and a listener reports a broken
// connection. When the channel stops, posted messages get kFlushTime to go out; then work is
// aborted.

namespace hvd_order {

namespace {

constexpr std::size_t kFrameWords = 128;
constexpr std::size_t kHeaderWords = 2;
constexpr int kTag = 0;
// Number of sends that are waited for together: switching threads for each send costs more than
// the memory.
constexpr std::size_t kPostedBatch = 16;
// Most and fewest recvs posted ahead.
constexpr std::size_t kMostReceives = 16;
constexpr std::size_t kFewestReceives = 8;
// Time for the last messages to go out when the channel stops; a frozen peer receives none.

at::Tensor emptyFrame() {
  return at::empty({static_cast<std::int64_t>(kFrameWords)}, at::kInt);
}

std::uint32_t* wordsOf(const at::Tensor& frame) {
  return reinterpret_cast<std::uint32_t*>(frame.data_ptr<int>());
}

} // namespace

C10dControl::C10dControl(c10::intrusive_ptr<c10d::ProcessGroup> group, Rank rank, int size)
    : group_(std::move(group)) {
  for (Rank other = rank == 0 ? 1 : 0; other < (rank == 0 ? size : 1); ++other) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->rank = other;
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
  waiter_ = std::thread([this] { awaitPosted(); });
}

void C10dControl::send(Rank to, const ControlMessage& message) {
  const auto peer =
      std::find_if(peers_.begin(), peers_.end(), [to](const auto& p) { return p->rank == to; });
  HVDO_CHECK(peer != peers_.end(), "no control connection to rank ", to);
  std::vector<std::uint32_t> words{
      static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.words.size())};
  words.insert(words.end(), message.words.begin(), message.words.end());
  words.resize((words.size() + kFrameWords - 1) / kFrameWords * kFrameWords, 0);
  const std::scoped_lock lock((*peer)->sending);
  try {
    post(to, words);
  } catch (const std::exception& e) {
    throw PeerLost(concat("rank ", to, " cannot be reached: ", e.what()));
  }
}

void C10dControl::post(Rank to, const std::vector<std::uint32_t>& words) {
  for (std::size_t at = 0; at < words.size(); at += kFrameWords) {
    std::vector<at::Tensor> frame{emptyFrame()};
    std::copy_n(words.data() + at, kFrameWords, wordsOf(frame.front()));
    c10::intrusive_ptr<c10d::Work> work = group_->send(frame, to, kTag);
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
void C10dControl::postReceives(Peer& peer) {
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
std::optional<at::Tensor> C10dControl::receiveFrame(Peer& peer) {
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

void C10dControl::listen(Peer& peer) {
  try {
    while (std::optional<at::Tensor> frame = receiveFrame(peer)) {
      const std::uint32_t* words = wordsOf(*frame);
      ControlMessage message{static_cast<ControlMessage::Kind>(words[0]), {}};
      const std::size_t total = words[1];
      std::size_t take = std::min(total, kFrameWords - kHeaderWords);
      message.words.assign(words + kHeaderWords, words + kHeaderWords + take);
      while (message.words.size() < total) {
        frame = receiveFrame(peer);
        if (!frame) {
          return;
        }
        take = std::min(total - message.words.size(), kFrameWords);
        message.words.insert(message.words.end(), wordsOf(*frame), wordsOf(*frame) + take);
      }
      onMessage_(peer.rank, std::move(message));
    }
  } catch (const std::exception&) {
    if (!stopping_) {
      onLost_(peer.rank, std::current_exception());
    }
  }
}

void C10dControl::stop() noexcept {
  const auto abort = [](c10d::Work& work) {
    try {
      work.abort();
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
      // The work has already ended.
    }
  };
  {
    std::unique_lock lock(postedMutex_);
    ending_ = true;
    postedChanged_.notify_all();
    postedChanged_.wait_for(lock, kFlushTime, [this] { return posted_.empty(); });
    stopping_ = true;
    for (const auto& work : posted_) {
      abort(*work);
    }
  }
  if (waiter_.joinable()) {
    waiter_.join();
  }
  for (auto& peer : peers_) {
    {
      const std::scoped_lock lock(peer->receiving);
      if (!peer->posted.empty()) {
        abort(*peer->posted.front().work); // what the listener waits for
      }
    }
    if (peer->listener.joinable()) {
      peer->listener.join();
    }
  }
}

} // namespace hvd_order
