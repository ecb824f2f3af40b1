#include "engine/event_watcher.h"

#include <chrono>

namespace hvd_order {

namespace {

// Between two looks. A slice takes 100 us or more on the fastest links, so this costs little order;
// asking without pause would take a core from the data loader.
constexpr std::chrono::microseconds kPause{20};

} // namespace

EventWatcher::EventWatcher() : thread_([this] { run(); }) {}

EventWatcher::~EventWatcher() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wakeUp_.notify_one();
  thread_.join();
}

void EventWatcher::add(std::size_t queue, std::unique_ptr<DeviceEvent> event, Then then) {
  {
    const std::scoped_lock lock(mutex_);
    if (queues_.size() <= queue) {
      queues_.resize(queue + 1);
    }
    queues_[queue].push_back({std::move(event), std::move(then)});
    ++outstanding_;
  }
  wakeUp_.notify_one();
}

void EventWatcher::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (outstanding_ == 0) {
      wakeUp_.wait(lock, [&] { return stop_ || outstanding_ > 0; });
      continue;
    }
    bool any = false;
    // By index: `add` may make the vector grow while the lock is released.
    for (std::size_t i = 0; i < queues_.size() && !stop_; ++i) {
      while (!queues_[i].empty() && !stop_) {
        std::exception_ptr error;
        bool happened = true;
        try {
          happened = queues_[i].front().event->happened();
        } catch (...) {
          error = std::current_exception();
        }
        if (!happened) {
          break;
        }
        const Entry entry = std::move(queues_[i].front());
        queues_[i].pop_front();
        --outstanding_;
        any = true;
        lock.unlock();
        entry.then(error);
        lock.lock();
      }
    }
    if (!any && !stop_) {
      wakeUp_.wait_for(lock, kPause, [&] { return stop_; });
    }
  }
}

} // namespace hvd_order
