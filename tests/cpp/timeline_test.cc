#include "engine/timeline.h"

#include "check.h"

namespace hvd_order {

namespace {

void journey(Timeline& timeline, SliceKey slice) {
  timeline.ready(slice);
  timeline.issued(slice);
  timeline.done(slice);
}

} // namespace

TEST(nothingIsRecordedWhileItIsOff) {
  Timeline timeline;
  journey(timeline, {0, 0});
  CHECK_EQUAL(timeline.take().size(), 0U);
}

TEST(aJourneyIsOneEventWithItsTimesInOrder) {
  Timeline timeline;
  const TimeNs before = nowNs();
  timeline.start();
  timeline.ready({1, 7});
  timeline.ready({0, 3});
  timeline.issued({0, 3});
  timeline.done({0, 3});
  timeline.issued({1, 7});
  CHECK_EQUAL(timeline.take().size(), 1U); // 1:7 is still travelling
  timeline.done({1, 7});
  const std::vector<SliceEvent> events = timeline.take();
  CHECK_EQUAL(events.size(), 1U);
  CHECK_EQUAL(events[0].slice, SliceKey{1, 7});
  CHECK(before <= events[0].readyNs);
  CHECK(events[0].readyNs <= events[0].issuedNs);
  CHECK(events[0].issuedNs <= events[0].doneNs);
  CHECK(events[0].doneNs <= nowNs());
  CHECK_EQUAL(timeline.take().size(), 0U);
}

TEST(whatWasUnderWayAtTheStartIsLeftOut) {
  Timeline timeline;
  timeline.ready({0, 0});
  timeline.start();
  timeline.issued({0, 0});
  timeline.done({0, 0});
  CHECK_EQUAL(timeline.take().size(), 0U);
  journey(timeline, {0, 0});
  CHECK_EQUAL(timeline.take().size(), 1U);
}

TEST(aPauseDoesNotMixTwoJourneys) {
  Timeline timeline;
  timeline.start();
  timeline.ready({0, 0});
  timeline.stop();
  timeline.issued({0, 0});
  timeline.done({0, 0});
  timeline.ready({0, 0}); // the next journey begins unseen
  timeline.start();
  timeline.issued({0, 0});
  timeline.done({0, 0});
  CHECK_EQUAL(timeline.take().size(), 0U);
}

TEST(theLastTransferOfEachSliceIsKnownWithoutARecording) {
  Timeline timeline;
  CHECK_EQUAL(timeline.last(1).size(), 0U);
  journey(timeline, {1, 2});
  const SliceEvent first = timeline.last(1)[2];
  CHECK_EQUAL(timeline.last(1)[0].doneNs, 0);
  CHECK(first.readyNs <= first.issuedNs && first.issuedNs <= first.doneNs);
  journey(timeline, {1, 2});
  CHECK(first.doneNs <= timeline.last(1)[2].readyNs);
  timeline.ready({1, 2}); // under way
  CHECK_EQUAL(timeline.last(1)[2].doneNs, 0);
  timeline.forget(1);
  CHECK_EQUAL(timeline.last(1).size(), 0U);
}

TEST(manyThreadsRecord) {
  Timeline timeline;
  timeline.start();
  std::atomic<std::size_t> taken = 0;
  test::onThreads(4, [&](int thread) {
    for (SliceIndex i = 0; i < 100; ++i) {
      journey(timeline, {static_cast<ModelId>(thread), i});
      taken += timeline.take().size();
    }
  });
  CHECK_EQUAL(taken + timeline.take().size(), 400U);
}

} // namespace hvd_order
