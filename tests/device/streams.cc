#include "streams.h"

#include <utility>

namespace test_device {

Stream::Stream(std::int64_t id, unsigned seed) : random_(seed + static_cast<unsigned>(id) * 7919U) {
  std::thread([this] { run(); }).detach(); // until the process ends
}

std::uint64_t Stream::enqueue(Task task) {
  const std::scoped_lock lock(mutex_);
  queue_.push_back({std::move(task), Clock::now()});
  changed_.notify_all();
  return ++enqueued_;
}

std::uint64_t Stream::enqueued() {
  const std::scoped_lock lock(mutex_);
  return enqueued_;
}

bool Stream::reached(std::uint64_t number) {
  const std::scoped_lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  return done_ >= number;
}

void Stream::await(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ != nullptr || done_ >= number; });
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void Stream::setDelays(Delays delays) {
  const std::scoped_lock lock(mutex_);
  delays_ = delays;
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    const bool failed = error_ != nullptr;
    const std::int64_t atMost = delays_.random.count();
    const std::chrono::microseconds extra(
        atMost == 0 ? 0 : std::uniform_int_distribution<std::int64_t>(0, atMost)(random_));
    const auto start =
        std::max(Clock::now(), entry.enqueued + delays_.launch) + delays_.constant + extra;
    lock.unlock();
    std::exception_ptr error;
    if (!failed) {
      std::this_thread::sleep_until(start);
      try {
        entry.task();
      } catch (...) {
        error = std::current_exception();
      }
    }
    entry.task = nullptr; // what it holds goes before anybody learns that it has run
    lock.lock();
    error_ = error_ ? error_ : error;
    ++done_;
    changed_.notify_all();
  }
}

Device& Device::get() {
  static auto* device = new Device; // never destroyed: its threads run until the process ends
  return *device;
}

Stream& Device::stream(std::int64_t id) {
  const std::scoped_lock lock(mutex_);
  std::unique_ptr<Stream>& stream = streams_[id];
  if (!stream) {
    stream = std::make_unique<Stream>(id, seed_);
    stream->setDelays(delays_);
  }
  return *stream;
}

std::int64_t Device::newStream() {
  const std::scoped_lock lock(mutex_);
  return next_++;
}

std::int64_t Device::poolStream() {
  ++counts().poolStreamsTaken;
  return 1 + inPool_++ % kPool;
}

void Device::synchronize() {
  std::map<Stream*, std::uint64_t> all;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [id, stream] : streams_) {
      all[stream.get()] = stream->enqueued();
    }
  }
  for (const auto& [stream, number] : all) {
    stream->await(number);
  }
}

void Device::setDelays(std::int64_t id, Delays delays) {
  if (id >= 0) {
    stream(id).setDelays(delays);
    return;
  }
  const std::scoped_lock lock(mutex_);
  delays_ = delays;
  for (const auto& [each, stream] : streams_) {
    stream->setDelays(delays);
  }
}

void Device::seed(unsigned value) {
  const std::scoped_lock lock(mutex_);
  seed_ = value;
}

std::int64_t& currentStream() {
  thread_local std::int64_t current = 0;
  return current;
}

Counts& counts() {
  static Counts all;
  return all;
}

namespace {

struct Gates {
  std::mutex mutex;
  std::condition_variable opened;
  int number = 0; // of the times that gates were opened
};

Gates& gates() {
  static auto* all = new Gates; // tasks may wait until the process ends
  return *all;
}

} // namespace

void closeGate(std::int64_t stream) {
  const std::scoped_lock lock(gates().mutex);
  Device::get().stream(stream).enqueue([closed = gates().number] {
    std::unique_lock inside(gates().mutex);
    gates().opened.wait(inside, [&] { return gates().number > closed; });
  });
}

void openGates() {
  const std::scoped_lock lock(gates().mutex);
  ++gates().number;
  gates().opened.notify_all();
}

void record(Event& event, std::int64_t stream) {
  Stream& on = Device::get().stream(stream);
  event = {&on, on.enqueue([] {})};
}

void wait(const Event& event, std::int64_t stream) {
  if (event.stream != nullptr) {
    Device::get().stream(stream).enqueue([event] { event.stream->await(event.number); });
  }
}

bool query(const Event& event) {
  return event.stream == nullptr || event.stream->reached(event.number);
}

void synchronize(const Event& event) {
  if (event.stream != nullptr) {
    event.stream->await(event.number);
  }
}

} // namespace test_device
