#include "transport/polled.h"

#include "base/error.h"

namespace hvd_order {

namespace {

constexpr std::chrono::seconds kTimeToGoOut{2};

} // namespace

class PolledTransport final : public Transport {
 public:
  explicit PolledTransport(std::shared_ptr<PolledPort> port) : port_(std::move(port)) {}

  void issue(SliceKey key, const Slice& slice, Done done) override {
    port_->issue(key, slice, std::move(done));
  }
  // A collective that has begun cannot be cancelled; after a failure the engine waits for none.
  void abort() noexcept override {}

 private:
  std::shared_ptr<PolledPort> port_;
};

class PolledControl final : public ControlChannel {
 public:
  explicit PolledControl(std::shared_ptr<PolledPort> port) : port_(std::move(port)) {}

  void start(OnMessage onMessage, OnLost onLost) override {
    port_->listen(std::move(onMessage), std::move(onLost));
  }
  void send(Rank to, const ControlMessage& message) override {
    port_->send(to, message);
  }
  void stop() noexcept override {
    port_->silence();
  }

 private:
  std::shared_ptr<PolledPort> port_;
};

std::shared_ptr<PolledPort> PolledPort::create() {
  return std::shared_ptr<PolledPort>(new PolledPort);
}

std::shared_ptr<Transport> PolledPort::transport() {
  return std::make_shared<PolledTransport>(shared_from_this());
}

std::shared_ptr<ControlChannel> PolledPort::control() {
  return std::make_shared<PolledControl>(shared_from_this());
}

void PolledPort::setBuffers(ModelId model, std::vector<std::byte*> buffers) {
  const std::scoped_lock lock(mutex_);
  buffers_[model] = std::move(buffers);
}

void PolledPort::removeBuffers(ModelId model) {
  const std::scoped_lock lock(mutex_);
  buffers_.erase(model);
}

void PolledPort::issue(SliceKey key, const Slice& slice, Transport::Done done) {
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      throw CollectiveError("the connection to the other ranks is closed");
    }
    std::byte* const memory = buffers_.at(key.model).at(slice.buffer) + slice.offsetBytes;
    slices_.push_back({next_, key.model, slice.buffer, memory, slice.sizeBytes});
    underWay_.emplace(next_, std::move(done));
    ++next_;
  }
  wakeUp_.notify_one();
}

void PolledPort::send(Rank to, const ControlMessage& message) {
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) {
      throw PeerLost(concat("the connection to rank ", to, " is closed"));
    }
    Outgoing outgoing{to, {static_cast<std::uint32_t>(message.kind)}};
    outgoing.words.insert(outgoing.words.end(), message.words.begin(), message.words.end());
    messages_.push_back(std::move(outgoing));
  }
  wakeUp_.notify_one();
}

void PolledPort::wait(std::chrono::nanoseconds atMost) {
  std::unique_lock lock(mutex_);
  wakeUp_.wait_for(lock, atMost, [this] { return !slices_.empty() || !messages_.empty(); });
}

std::optional<PolledPort::Issued> PolledPort::nextSlice() {
  const std::scoped_lock lock(mutex_);
  if (slices_.empty()) {
    return std::nullopt;
  }
  const Issued slice = slices_.front();
  slices_.pop_front();
  return slice;
}

std::optional<PolledPort::Outgoing> PolledPort::nextMessage() {
  std::optional<Outgoing> message;
  {
    const std::scoped_lock lock(mutex_);
    if (messages_.empty()) {
      return std::nullopt;
    }
    message = std::move(messages_.front());
    messages_.pop_front();
  }
  sent_.notify_all();
  return message;
}

void PolledPort::done(std::uint64_t number, const std::string& error) {
  Transport::Done tell;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = underWay_.find(number);
    if (found == underWay_.end()) {
      return; // closed in the meantime
    }
    tell = std::move(found->second);
    underWay_.erase(found);
  }
  tell(error.empty() ? nullptr : std::make_exception_ptr(CollectiveError(error)));
}

void PolledPort::received(Rank from, const std::vector<std::uint32_t>& words) {
  HVDO_CHECK(!words.empty(), "rank ", from, " has sent an empty message");
  ControlMessage message{
      static_cast<ControlMessage::Kind>(words.front()), {words.begin() + 1, words.end()}};
  const std::scoped_lock lock(listenersMutex_);
  if (onMessage_) {
    onMessage_(from, std::move(message));
  }
}

void PolledPort::lost(Rank peer, const std::string& why) {
  const std::scoped_lock lock(listenersMutex_);
  if (onLost_) {
    onLost_(peer, std::make_exception_ptr(PeerLost(why)));
  }
}

void PolledPort::listen(ControlChannel::OnMessage onMessage, ControlChannel::OnLost onLost) {
  const std::scoped_lock lock(listenersMutex_);
  onMessage_ = std::move(onMessage);
  onLost_ = std::move(onLost);
}

void PolledPort::silence() noexcept {
  {
    std::unique_lock lock(mutex_);
    sent_.wait_for(lock, kTimeToGoOut, [this] { return messages_.empty() || closed_; });
  }
  const std::scoped_lock lock(listenersMutex_);
  onMessage_ = nullptr;
  onLost_ = nullptr;
}

void PolledPort::close() {
  std::map<std::uint64_t, Transport::Done> failed;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    slices_.clear();
    messages_.clear();
    failed.swap(underWay_);
  }
  sent_.notify_all();
  for (auto& [number, tell] : failed) {
    tell(std::make_exception_ptr(CollectiveError("the job ends")));
  }
}

} // namespace hvd_order
