#include "transport/event_watcher.h"

#include "base/thread_name.h"

namespace hvd_order {

EventWatcher::EventWatcher(std::chrono::microseconds pause)
    : thread_([state = state_, pause] { run(*state, pause); }) {}

EventWatcher::~EventWatcher() {
  {
    const std::scoped_lock lock(state_->mutex);
    state_->stop = true;
  }
  state_->wakeUp.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void EventWatcher::add(std::size_t queue, std::shared_ptr<DeviceEvent> event, Then then) {
  {
    const std::scoped_lock lock(state_->mutex);
    if (state_->queues.size() <= queue) {
      state_->queues.resize(queue + 1);
    }
    state_->queues[queue].push_back({std::move(event), std::move(then)});
    ++state_->outstanding;
  }
  state_->wakeUp.notify_one();
}

void EventWatcher::run(WatcherState& state, std::chrono::microseconds pause) {
  nameThisThread("hvdo events");
  std::unique_lock lock(state.mutex);
  while (!state.stop) {
    if (state.outstanding == 0) {
      state.wakeUp.wait(lock, [&] { return state.stop || state.outstanding > 0; });
      continue;
    }
    bool any = false;
    // By index: `add` may enlarge the vector while the lock is released.
    for (std::size_t i = 0; i < state.queues.size() && !state.stop;) {
      if (state.queues[i].empty()) {
        ++i;
        continue;
      }
      std::exception_ptr error;
      bool happened = true;
      try {
        happened = state.queues[i].front().event->happened();
      } catch (...) {
        error = std::current_exception();
      }
      if (!happened) {
        ++i;
        continue;
      }
      WatchedEvent entry = std::move(state.queues[i].front());
      state.queues[i].pop_front();
      --state.outstanding;
      any = true;
      lock.unlock();
      entry.then(error);
      entry = {}; // destroys the function without the lock: its captures may call `add`
      lock.lock();
      i = 0; // meanwhile an event of an earlier queue may have happened
    }
    if (!any && !state.stop) {
      state.wakeUp.wait_for(lock, pause, [&] { return state.stop; });
    }
  }
}

} // namespace hvd_order
