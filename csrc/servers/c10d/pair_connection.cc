#include "servers/c10d/pair_connection.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/thread_name.h"
#include "servers/wire/registration.h"
#include "torch/c10d/wait_limits.h"

// A frame on a Gloo process group: a send of the header and, if there is one, of the payload.
//
// Gloo transmits a send only after the receiver has posted a matching receive, with a buffer of at
// least its size. The receiver therefore keeps kDepth headers and payload buffers of the largest
// size posted. Frames use the places of this ring in turn, and each place has its own two tags, so
// a receive can only match the frame of its place. A payload buffer that a frame without payload
// did not use stays posted for the next frame of that place.
//
// Invariant: memory outlives the Gloo work that uses it. The sender waits for both sends of a
// frame before it drops the frame. All work under way is listed in `underWay_`, so that `stop` and
// `breakOff` can abort it, and no work starts after that.
//
// Only the listener reports a loss, because every failure of the sender also ends the listener.
// After a loss the last of the two threads releases the group, which closes the connection for the
// other end.
namespace hvd_order {

namespace {

std::vector<at::Tensor> viewOf(std::byte* memory, std::size_t sizeBytes) {
  return {at::from_blob(memory, {static_cast<std::int64_t>(sizeBytes)}, at::kByte)};
}

// Tags are derived from a frame's place in a ring: a receive posted for one place cannot take the
// frame of another.
int headerTag(std::uint64_t number, std::uint64_t depth) {
  return static_cast<int>(2 * (number % depth));
}
int payloadTag(std::uint64_t number, std::uint64_t depth) {
  return headerTag(number, depth) + 1;
}

// Whether the payload is a slice's gradient, sum or parameters on its way from or to a worker.
bool isContent(const FrameHeader& header) {
  return header.model != kNoModel &&
      (header.kind == FrameKind::kPush || header.kind == FrameKind::kValue);
}

} // namespace

PairConnection::PairConnection(
    c10::intrusive_ptr<c10d::Backend> group,
    std::uint64_t sends,
    std::uint64_t receives,
    std::size_t largestPayload)
    : group_(std::move(group)),
      peer_(1 - group_->getRank()),
      sends_(sends),
      receives_(receives),
      largestPayload_(largestPayload),
      pool_(std::make_shared<BufferPool>(largestPayload)) {
  if (group_->getSize() != 2) {
    throw InvalidUsage(concat("a connection needs a group of 2 members, got ", group_->getSize()));
  }
}

PairConnection::~PairConnection() {
  stop();
}

void PairConnection::start(OnFrame onFrame, OnLost onLost) {
  onFrame_ = std::move(onFrame);
  onLost_ = std::move(onLost);
  listener_ = std::thread([self = shared_from_this()] {
    self->listen();
    self->letGo();
  });
  sender_ = std::thread([self = shared_from_this()] {
    self->sendAll();
    self->letGo();
  });
}

void PairConnection::send(std::uint64_t urgency, FrameHeader header, Payload payload) {
  HVDO_CHECK(
      payload.sizeBytes <= largestPayload_, "a payload of ", payload.sizeBytes,
      " bytes on a connection for ", largestPayload_);
  const std::scoped_lock lock(queueMutex_);
  if (broken_) {
    return;
  }
  queue_.push({urgency, queued_++, header, std::move(payload)});
  queueChanged_.notify_all();
}

void PairConnection::sendAll() {
  nameThisThread("hvdo ps send");
  std::unique_lock lock(queueMutex_);
  while (true) {
    queueChanged_.wait(lock, [this] { return stopping_ || broken_ || !queue_.empty(); });
    if (stopping_ || broken_) {
      return;
    }
    QueuedFrame next = queue_.top();
    queue_.pop();
    sending_ = true;
    lock.unlock();
    try {
      transmit(std::move(next));
    } catch (const std::exception&) {
      // The listener observes the same failure; it alone reports.
      lock.lock();
      broken_ = true;
      sending_ = false;
      queueChanged_.notify_all();
      return;
    }
    lock.lock();
    sending_ = false;
    queueChanged_.notify_all();
  }
}

void PairConnection::transmit(QueuedFrame frame) {
  frame.header.session = sends_;
  frame.header.number = sent_;
  frame.header.payloadBytes = frame.payload.sizeBytes;
  Header bytes;
  write(frame.header, bytes);
  auto header = viewOf(bytes.data(), bytes.size());
  Work headerWork;
  Work payloadWork;
  const auto forget = [&] {
    const std::scoped_lock lock(workMutex_);
    std::erase_if(
        underWay_, [&](const Work& work) { return work == headerWork || work == payloadWork; });
  };
  try {
    headerWork = posted([&] { return group_->send(header, peer_, headerTag(sent_, kDepth)); });
    if (frame.payload.sizeBytes > 0) {
      auto payload = viewOf(frame.payload.data(), frame.payload.sizeBytes);
      payloadWork = posted([&] { return group_->send(payload, peer_, payloadTag(sent_, kDepth)); });
    }
    ++sent_;
    headerWork->wait(kForever);
    if (payloadWork) {
      payloadWork->wait(kForever);
    }
  } catch (...) {
    forget(); // aborted work reads the memory until it is destroyed
    throw;
  }
  forget();
}

// Starts work and lists it, so that `stop` can abort it.
PairConnection::Work PairConnection::posted(const std::function<Work()>& begin) {
  const std::scoped_lock lock(workMutex_);
  if (stopping_ || brokenOff_) {
    throw PeerLost("the connection is being closed");
  }
  underWay_.push_back(begin());
  return underWay_.back();
}

void PairConnection::post(std::size_t place, bool withPayload) {
  Posted& at = posted_.at(place);
  auto header = viewOf(at.header.data(), at.header.size());
  at.headerWork = posted([&] { return group_->recv(header, peer_, headerTag(place, kDepth)); });
  if (withPayload) {
    at.payload = pool_->take();
    auto payload = viewOf(at.payload.data(), at.payload.sizeBytes);
    at.payloadWork =
        posted([&] { return group_->recv(payload, peer_, payloadTag(place, kDepth)); });
  }
}

bool PairConnection::receive() {
  const std::size_t place = received_ % kDepth;
  Posted& at = posted_.at(place);
  if (at.notPosted) {
    std::rethrow_exception(at.notPosted);
  }
  ReceivedTimes times{.beforeNs = lastCameNs_, .freeNs = steadyNs(), .thread = threadNumber()};
  if (!at.headerWork->wait(kForever) || stopping_) {
    return false;
  }
  times.beganNs = steadyNs();
  const FrameHeader header = parse(at.header, {receives_, received_, largestPayload_});
  Payload payload;
  const bool withPayload = header.payloadBytes > 0;
  if (withPayload) {
    if (!at.payloadWork->wait(kForever) || stopping_) {
      return false;
    }
    payload = std::exchange(at.payload, {});
    payload.sizeBytes = header.payloadBytes;
  }
  times.cameNs = lastCameNs_ = steadyNs();
  {
    const std::scoped_lock lock(workMutex_);
    std::erase_if(underWay_, [&](const Work& work) {
      return work == at.headerWork || (withPayload && work == at.payloadWork);
    });
  }
  ++received_;
  // Before the frame is handled, so the peer does not wait for that.
  try {
    post(place, withPayload);
  } catch (const PeerLost&) {
    throw;
  } catch (const std::exception&) {
    // The peer has closed the connection. What it sent before, such as that it leaves, has arrived
    // and must be handled; the first frame that is missing reports the loss.
    at.notPosted = std::current_exception();
  }
  onFrame_(header, std::move(payload));
  if (received.isOn() && withPayload && isContent(header)) {
    times.sizeBytes = header.payloadBytes;
    times.handledNs = steadyNs();
    received.add(times);
  }
  return true;
}

void PairConnection::listen() {
  nameThisThread("hvdo ps receive");
  std::optional<std::string> why;
  try {
    for (std::size_t place = 0; place < kDepth; ++place) {
      post(place, /*withPayload=*/true);
    }
    while (receive()) {
    }
  } catch (const std::exception& e) {
    why = e.what();
  }
  {
    const std::scoped_lock lock(workMutex_);
    why = brokenOff_ ? brokenOff_ : why;
  }
  if (why) {
    lost(*why);
  }
}

void PairConnection::breakOff(const std::string& why) noexcept {
  const std::scoped_lock lock(workMutex_);
  if (!brokenOff_) {
    brokenOff_ = why;
    abortWork();
  }
}

// Called under `workMutex_`.
void PairConnection::abortWork() noexcept {
  for (const Work& work : underWay_) {
    try {
      work->abort();
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
      // The work has already ended.
    }
  }
}

// After a loss the last thread closes the connection; otherwise the other end would wait forever,
// because a connection that was broken off, or that received an invalid frame, is still open. Work
// is released first, because it holds the group's context.
void PairConnection::letGo() {
  if (--threads_ > 0 || stopping_) {
    return;
  }
  const std::scoped_lock lock(workMutex_);
  underWay_.clear();
  for (Posted& at : posted_) {
    at.headerWork.reset();
    at.payloadWork.reset();
  }
  group_.reset();
  for (Posted& at : posted_) {
    at.payload = {};
  }
}

void PairConnection::lost(const std::string& why) {
  {
    const std::scoped_lock lock(queueMutex_);
    broken_ = true;
    queue_ = {};
    queueChanged_.notify_all();
  }
  if (!stopping_) {
    onLost_(why);
  }
}

void PairConnection::stop() noexcept {
  {
    std::unique_lock lock(queueMutex_);
    queueChanged_.wait_for(
        lock, kFlushTime, [this] { return broken_ || (queue_.empty() && !sending_); });
    stopping_ = true;
    queueChanged_.notify_all();
  }
  {
    const std::scoped_lock lock(workMutex_);
    abortWork();
  }
  for (std::thread* thread : {&sender_, &listener_}) {
    if (thread->get_id() == std::this_thread::get_id()) {
      thread->detach(); // it has just dropped the last other owner, and ends by itself
    } else if (thread->joinable()) {
      thread->join();
    }
  }
}

} // namespace hvd_order
