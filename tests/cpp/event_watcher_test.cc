#include "transport/event_watcher.h"

#include <atomic>
#include <future>
#include <latch>

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

/// An event that the test lets happen.
struct Switch {
  std::atomic<bool> on = false;
  std::atomic<int> looks = 0;
};

class SwitchedEvent final : public DeviceEvent {
 public:
  explicit SwitchedEvent(std::shared_ptr<Switch> state) : state_(std::move(state)) {}
  bool happened() override {
    ++state_->looks;
    return state_->on;
  }

 private:
  std::shared_ptr<Switch> state_;
};

class BrokenEvent final : public DeviceEvent {
 public:
  bool happened() override {
    throw Error("the device is lost");
  }
};

std::unique_ptr<DeviceEvent> event(const std::shared_ptr<Switch>& state) {
  return std::make_unique<SwitchedEvent>(state);
}

} // namespace

TEST(anEventOfAnEarlierQueueThatHappensMeanwhileComesFirst) {
  //   queue 0: done          happens while the function of `first` runs
  //   queue 1: first, second have happened
  EventWatcher watcher;
  const auto done = std::make_shared<Switch>();
  const auto ready = std::make_shared<Switch>();
  std::string log; // written by the watcher's thread only
  std::promise<void> end;
  watcher.add(0, event(done), [&](std::exception_ptr) { log += "done "; });
  watcher.add(1, event(ready), [&](std::exception_ptr) {
    log += "first ";
    done->on = true;
  });
  watcher.add(1, event(ready), [&](std::exception_ptr) {
    log += "second";
    end.set_value();
  });
  ready->on = true;
  end.get_future().wait();
  CHECK_EQUAL(log, std::string("first done second"));
}

TEST(theFunctionIsCalledWhenTheEventHasHappened) {
  EventWatcher watcher;
  const auto state = std::make_shared<Switch>();
  std::promise<std::exception_ptr> called;
  auto result = called.get_future();
  watcher.add(0, event(state), [&](std::exception_ptr error) { called.set_value(error); });
  while (state->looks < 3) { // it was asked and did not pretend
    std::this_thread::yield();
  }
  CHECK(result.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  state->on = true;
  CHECK(result.get() == nullptr);
}

TEST(aQueueKeepsItsOrderAndQueuesDoNotWaitForEachOther) {
  // queue 0: a (late), b (has happened)     b comes after a
  // queue 5: c (has happened)               c does not wait
  EventWatcher watcher;
  const auto late = std::make_shared<Switch>();
  const auto now = std::make_shared<Switch>();
  now->on = true;
  std::string log; // written by the watcher's thread only, read after b
  std::promise<void> sawC;
  std::promise<void> sawB;
  watcher.add(0, event(late), [&](std::exception_ptr) { log += 'a'; });
  watcher.add(0, event(now), [&](std::exception_ptr) {
    log += 'b';
    sawB.set_value();
  });
  watcher.add(5, event(now), [&](std::exception_ptr) {
    log += 'c';
    sawC.set_value();
  });
  sawC.get_future().wait();
  late->on = true;
  sawB.get_future().wait();
  CHECK_EQUAL(log, std::string("cab"));
}

TEST(onlyTheOldestOfAQueueIsAsked) {
  EventWatcher watcher;
  const auto first = std::make_shared<Switch>();
  const auto second = std::make_shared<Switch>();
  second->on = true;
  std::promise<void> done;
  watcher.add(0, event(first), [](std::exception_ptr) {});
  watcher.add(0, event(second), [&](std::exception_ptr) { done.set_value(); });
  while (first->looks < 3) {
    std::this_thread::yield();
  }
  CHECK_EQUAL(second->looks.load(), 0);
  first->on = true;
  done.get_future().wait();
  CHECK_EQUAL(second->looks.load(), 1);
}

TEST(aDeviceErrorIsPassedOnAndTheNextEventIsServed) {
  EventWatcher watcher;
  const auto now = std::make_shared<Switch>();
  now->on = true;
  std::promise<std::exception_ptr> broken;
  std::promise<std::exception_ptr> next;
  watcher.add(
      0, std::make_unique<BrokenEvent>(), [&](std::exception_ptr e) { broken.set_value(e); });
  watcher.add(0, event(now), [&](std::exception_ptr e) { next.set_value(e); });
  CHECK_CONTAINS(
      CHECK_THROWS(Error, std::rethrow_exception(broken.get_future().get())), "device is lost");
  CHECK(next.get_future().get() == nullptr);
}

TEST(manyThreadsAddAndFunctionsAddMore) {
  constexpr int kThreads = 4;
  constexpr int kEvents = 200;
  const auto now = std::make_shared<Switch>();
  now->on = true;
  std::latch all(2 * kThreads * kEvents);
  EventWatcher watcher; // after what its functions use
  test::onThreads(kThreads, [&](int thread) {
    const auto queue = static_cast<std::size_t>(thread);
    for (int i = 0; i < kEvents; ++i) {
      watcher.add(queue, event(now), [&, queue](std::exception_ptr) {
        watcher.add(queue + kThreads, event(now), [&](std::exception_ptr) { all.count_down(); });
        all.count_down();
      });
    }
  });
  all.wait();
}

TEST(whatAFunctionHoldsDiesWithoutTheLock) {
  // The last reference to an object whose destructor uses the watcher.
  struct AddsWhenItDies {
    ~AddsWhenItDies() {
      watcher.add(0, event(state), [&done = done](std::exception_ptr) { done.set_value(); });
    }
    EventWatcher& watcher;
    std::shared_ptr<Switch> state;
    std::promise<void>& done;
  };
  const auto now = std::make_shared<Switch>();
  now->on = true;
  std::promise<void> done;
  EventWatcher watcher;
  std::shared_ptr<AddsWhenItDies> object(new AddsWhenItDies{watcher, now, done});
  watcher.add(0, event(now), [object](std::exception_ptr) {});
  object.reset();
  done.get_future().wait();
}

TEST(aFunctionMayHoldTheLastReferenceToTheWatcher) {
  const auto now = std::make_shared<Switch>();
  std::promise<void> gone;
  struct Owner {
    explicit Owner(std::promise<void>& promise) : gone(promise) {}
    ~Owner() {
      watcher.reset();
      gone.set_value();
    }
    std::promise<void>& gone;
    std::unique_ptr<EventWatcher> watcher = std::make_unique<EventWatcher>();
  };
  auto owner = std::make_shared<Owner>(gone);
  EventWatcher& watcher = *owner->watcher;
  watcher.add(0, event(now), [owner](std::exception_ptr) {});
  watcher.add(0, event(now), [](std::exception_ptr) { std::abort(); });
  owner.reset();
  now->on = true;
  gone.get_future().wait();
}

TEST(theDestructorDropsWhatIsOutstanding) {
  const auto never = std::make_shared<Switch>();
  std::atomic<int> calls = 0;
  {
    EventWatcher watcher;
    watcher.add(0, event(never), [&](std::exception_ptr) { ++calls; });
    watcher.add(1, event(never), [&](std::exception_ptr) { ++calls; });
  }
  CHECK_EQUAL(calls.load(), 0);
  CHECK_EQUAL(never.use_count(), 1L);
}

} // namespace hvd_order
