#include "transport/polled.h"

#include <array>
#include <thread>

#include "base/error.h"
#include "check.h"

// The moving thread is the test itself.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;

constexpr Slice kSecondHalf{
    .buffer = 0,
    .offsetBytes = 64,
    .sizeBytes = 64,
    .firstTensor = 1,
    .lastTensor = 1};

struct Outcome {
  int times = 0;
  std::exception_ptr error;

  Transport::Done done() {
    return [this](std::exception_ptr e) {
      ++times;
      error = std::move(e);
    };
  }
};

TEST(aSliceGoesOutAndItsEndComesBack) {
  const auto port = PolledPort::create();
  std::array<std::byte, 128> memory{};
  port->setBuffers(3, {memory.data()});
  Outcome outcome;
  port->transport()->issue({3, 1}, kSecondHalf, outcome.done());
  port->wait(100s); // returns at once: there is something to do
  const auto slice = port->nextSlice();
  CHECK(slice.has_value());
  CHECK_EQUAL(slice->model, 3U);
  CHECK(slice->memory == memory.data() + 64);
  CHECK_EQUAL(slice->sizeBytes, 64U);
  CHECK(!port->nextSlice().has_value());
  CHECK_EQUAL(outcome.times, 0);
  port->done(slice->number, "");
  port->done(slice->number, "said twice");
  CHECK_EQUAL(outcome.times, 1);
  CHECK(!outcome.error);
}

TEST(anErrorOfTheLibraryFailsTheSlice) {
  const auto port = PolledPort::create();
  std::array<std::byte, 128> memory{};
  port->setBuffers(0, {memory.data()});
  Outcome outcome;
  port->transport()->issue({0, 0}, kSecondHalf, outcome.done());
  port->done(port->nextSlice()->number, "truncated");
  CHECK_CONTAINS(CHECK_THROWS(CollectiveError, std::rethrow_exception(outcome.error)), "truncated");
}

TEST(closingFailsWhatIsUnderWayAndTakesNothingMore) {
  const auto port = PolledPort::create();
  std::array<std::byte, 128> memory{};
  port->setBuffers(0, {memory.data()});
  Outcome taken;
  Outcome queued;
  port->transport()->issue({0, 0}, kSecondHalf, taken.done());
  const auto number = port->nextSlice()->number;
  port->transport()->issue({0, 1}, kSecondHalf, queued.done());
  port->close();
  CHECK(taken.error && queued.error);
  port->done(number, ""); // MPI is done after all
  CHECK_EQUAL(taken.times, 1);
  CHECK_THROWS(
      CollectiveError, port->transport()->issue(SliceKey{0, 1}, kSecondHalf, queued.done()));
  const ControlMessage leave{ControlMessage::Kind::kLeave, {}};
  CHECK_CONTAINS(CHECK_THROWS(PeerLost, port->control()->send(0, leave)), "rank 0");
}

TEST(messagesGoBothWays) {
  const auto port = PolledPort::create();
  const auto control = port->control();
  std::vector<std::uint32_t> heard;
  Rank gone = -1;
  control->start(
      [&](Rank from, const ControlMessage& message) {
        heard = message.words;
        heard.push_back(static_cast<std::uint32_t>(from));
        heard.push_back(static_cast<std::uint32_t>(message.kind));
      },
      [&](Rank peer, const std::exception_ptr&) { gone = peer; });
  control->send(2, {ControlMessage::Kind::kQuery, {7, 8}});
  const auto message = port->nextMessage();
  CHECK(message.has_value());
  CHECK_EQUAL(message->to, 2);
  port->received(1, message->words);
  CHECK(
      heard ==
      (std::vector<std::uint32_t>{
          7, 8, 1, static_cast<std::uint32_t>(ControlMessage::Kind::kQuery)}));
  port->lost(2, "gone");
  CHECK_EQUAL(gone, 2);
  control->stop();
  gone = -1;
  port->lost(1, "after the end");
  CHECK_EQUAL(gone, -1);
}

TEST(theEndWaitsUntilMessagesAreOut) {
  const auto port = PolledPort::create();
  const auto control = port->control();
  control->start([](Rank, const ControlMessage&) {}, [](Rank, const std::exception_ptr&) {});
  control->send(0, {ControlMessage::Kind::kLeave, {}});
  bool taken = false;
  std::thread mover([&] {
    port->wait(100s);
    taken = port->nextMessage().has_value();
  });
  control->stop();
  mover.join();
  CHECK(taken);
}

} // namespace

} // namespace hvd_order
