#include "servers/admission/push_windows.h"

#include "check.h"

namespace hvd_order {

namespace {

struct Slice final : PushWindows::WaitingSlice {
  void admit() override {}
};

} // namespace

TEST(aSenderHasRoomForTwoPushes) {
  PushWindows windows;
  CHECK(windows.take(1, 100, 0));
  CHECK(windows.take(1, 100, 0));
  CHECK(!windows.take(1, 100, 0));
  CHECK(windows.take(2, 100, 0));
  windows.giveBack(1, 100, false, 1);
  CHECK(windows.take(1, 100, 1));
}

TEST(theSpeedOfABusyLineIsThatOfWhatArrives) {
  PushWindows windows;
  CHECK(windows.take(1, 100, 0));
  for (int second = 1; second <= 20; ++second) { // one push on the line, and one behind it
    CHECK(windows.take(1, 100, second - 0.5));
    windows.giveBack(1, 100, true, second);
  }
  CHECK_EQUAL(windows.expectedSeconds(1, 100), 2.0);
  // What comes after a pause was not under way all the time.
  windows.giveBack(1, 100, true, 21);
  CHECK(windows.take(1, 100, 1000));
  windows.giveBack(1, 100, true, 1001);
  CHECK_EQUAL(windows.expectedSeconds(1, 100), 1.0);
}

TEST(theMostUrgentSliceIsNext) {
  PushWindows windows;
  const auto late = std::make_shared<Slice>();
  const auto urgent = std::make_shared<Slice>();
  windows.await({1, 2}, {7, 0, 0}, late);
  windows.await({1}, {3, 0, 0}, urgent);
  CHECK(windows.next(1) == urgent);
  CHECK(windows.next(1) == late);
  CHECK(windows.next(1) == nullptr);
  CHECK(windows.next(2) == late);
  CHECK(windows.take(2, 1, 0) && windows.take(2, 1, 0));
  windows.await({2}, {3, 0, 0}, urgent);
  CHECK(windows.next(2) == nullptr); // no room
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
