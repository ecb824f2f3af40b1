#include "engine/completion.h"

#include <atomic>
#include <latch>

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Clock = Completion::Clock;

constexpr auto kForever = 60s; // far beyond what any test here takes

std::exception_ptr errorOf(const std::string& text) {
  return std::make_exception_ptr(PeerLost(text));
}

// Models 0 (three tensors) and 2 (one tensor).
void addModels(Completion& completion) {
  completion.addModel(0, 3);
  completion.addModel(2, 1);
}

} // namespace

TEST(nothingUnderWayIsNothingToWaitFor) {
  Completion completion;
  addModels(completion);
  CHECK(completion.wait({0, 2}, Clock::time_point::min()));
  CHECK_EQUAL(completion.pendingCount(), 0U);
}

TEST(aWaitEndsWithItsTensor) {
  Completion completion;
  addModels(completion);
  completion.announce({0, 1});
  completion.announce({2, 0});
  test::onThreads(3, [&](int thread) {
    if (thread == 0) {
      CHECK(completion.wait({0, 1}, Clock::now() + kForever));
      CHECK(completion.isPending({2, 0}));
      completion.complete({{2, 0}});
    } else if (thread == 1) {
      CHECK(completion.wait({2, 0}, Clock::now() + kForever));
      CHECK_EQUAL(completion.pendingCount(), 0U);
    } else {
      completion.complete({{0, 1}});
    }
  });
}

TEST(manyThreadsWaitForOneTensor) {
  Completion completion;
  addModels(completion);
  for (int round = 0; round < 100; ++round) {
    completion.announce({0, 0});
    test::onThreads(4, [&](int thread) {
      if (thread == 0) {
        completion.complete({{0, 0}});
      } else {
        CHECK(completion.wait({0, 0}, Clock::now() + kForever));
      }
    });
  }
}

TEST(aWaitEndsAtItsDeadline) {
  Completion completion;
  addModels(completion);
  completion.announce({0, 0});
  CHECK(!completion.wait({0, 0}, Clock::now()));
  CHECK(!completion.wait({0, 0}, Clock::now() + 1ms));
  completion.complete({{0, 0}}); // and nobody is told who no longer waits
  CHECK(completion.wait({0, 0}, Clock::now()));
}

TEST(stagesShowWhatIsUnderWay) {
  Completion completion;
  addModels(completion);
  completion.announce({0, 2});
  completion.announce({0, 0});
  CHECK_EQUAL(completion.stages(0), std::vector<std::uint8_t>{1, 0, 1});
  CHECK_EQUAL(completion.stages(2), std::vector<std::uint8_t>{0});
  completion.complete({{0, 0}, {0, 2}});
  CHECK_EQUAL(completion.stages(0), std::vector<std::uint8_t>{0, 0, 0});
}

TEST(aFailureWakesEveryWaiterAndStays) {
  Completion completion;
  addModels(completion);
  completion.announce({0, 0});
  completion.announce({2, 0});
  std::latch started(2);
  test::onThreads(3, [&](int thread) {
    if (thread == 2) {
      started.wait();
      CHECK(completion.fail(errorOf("rank 1 is gone")));
      return;
    }
    started.count_down();
    const TensorKey tensor = thread == 0 ? TensorKey{0, 0} : TensorKey{2, 0};
    CHECK_CONTAINS(
        CHECK_THROWS(PeerLost, completion.wait(tensor, Clock::now() + kForever)), "rank 1");
  });
  CHECK(completion.failed());
  CHECK_THROWS(PeerLost, completion.check());
  CHECK_THROWS(PeerLost, completion.announce({0, 1}));
  CHECK_THROWS(PeerLost, completion.stages(0));
  CHECK_THROWS(PeerLost, completion.wait({0, 1}, Clock::now()));
}

TEST(theFirstFailureDecides) {
  Completion completion;
  std::atomic<int> first = 0;
  test::onThreads(4, [&](int thread) {
    first += completion.fail(errorOf(std::to_string(thread))) ? thread + 1 : 0;
  });
  CHECK_EQUAL(CHECK_THROWS(PeerLost, completion.check()), std::to_string(first - 1));
  CHECK(!completion.fail(errorOf("later")));
}

TEST(listenersAreToldOnce) {
  Completion completion;
  addModels(completion);
  std::vector<int> told;
  const auto note = [&](int number) {
    return
        [&told, number](const std::exception_ptr& error) { told.push_back(error ? -1 : number); };
  };
  completion.then({0, 1}, note(1)); // nothing is under way
  CHECK_EQUAL(told, std::vector<int>{1});
  completion.announce({0, 1});
  completion.announce({0, 2});
  completion.then({0, 1}, note(2));
  completion.then({0, 1}, note(3));
  completion.then({0, 2}, note(4));
  completion.complete({{0, 1}});
  CHECK_EQUAL(told, (std::vector<int>{1, 2, 3}));
  completion.fail(errorOf("rank 1 is gone"));
  CHECK_EQUAL(told, (std::vector<int>{1, 2, 3, -1}));
  completion.complete({{0, 2}});    // a transfer may still end
  completion.then({0, 0}, note(5)); // after the failure
  CHECK_EQUAL(told, (std::vector<int>{1, 2, 3, -1, -1}));
}

TEST(aReaderMayGoOnWhenItsTensorIsEnqueued) {
  Completion completion;
  addModels(completion);
  completion.announce({0, 0});
  CHECK(!completion.wait({0, 0}, Clock::now(), Stage::kEnqueued));
  completion.enqueue({{0, 0}});
  CHECK(completion.wait({0, 0}, Clock::now(), Stage::kEnqueued));
  CHECK(!completion.wait({0, 0}, Clock::now()));
  CHECK_EQUAL(completion.stages(0), std::vector<std::uint8_t>{2, 0, 0});
  completion.complete({{0, 0}});
  CHECK_EQUAL(completion.stages(0), std::vector<std::uint8_t>{0, 0, 0});
}

TEST(theEndOfAnEarlierExchangeIsNotTakenForThisOne) {
  // On a device: the hook of the next step runs while the sum of this one is still on its way.
  Completion completion;
  addModels(completion);
  completion.announce({0, 0});
  completion.ready({0, 0}, Clock::now()); // as announced: no exchange of its own
  completion.enqueue({{0, 0}});
  completion.announce({0, 0});
  int told = 0;
  completion.then({0, 0}, [&](const std::exception_ptr&) { ++told; });
  completion.complete({{0, 0}});
  CHECK(!completion.wait({0, 0}, Clock::now(), Stage::kEnqueued));
  CHECK(completion.isPending({0, 0}));
  CHECK_EQUAL(told, 0);
  completion.ready({0, 0}, Clock::now());
  completion.complete({{0, 0}});
  CHECK(completion.wait({0, 0}, Clock::now()));
  CHECK_EQUAL(told, 1);
  CHECK_EQUAL(completion.pendingCount(), 0U);
}

TEST(aRemovedModelHasNothingUnderWay) {
  Completion completion;
  addModels(completion);
  completion.removeModel(0);
  CHECK(completion.wait({0, 1}, Clock::now())); // as a waiter finds it that wakes too late
  CHECK(!completion.isPending({0, 1}));
  completion.addModel(0, 1);
  completion.announce({0, 0});
  CHECK_EQUAL(completion.stages(0), std::vector<std::uint8_t>{1});
}

} // namespace hvd_order
