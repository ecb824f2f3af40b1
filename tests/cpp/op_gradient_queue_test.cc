#include "engine/op_gradient_queue.h"

#include <future>
#include <numeric>

#include "base/error.h"
#include "check.h"
#include "loopback.h"

// Two engines in one process, joined by a LoopbackWorld; each rank posts and takes as operators do.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;

constexpr auto kForever = 60s;      // far beyond what any test here takes
constexpr std::size_t kFloats = 16; // each tensor is a slice of its own
const std::vector<TensorSpec> kTensors{
    {"front", kFloats * sizeof(float), 0},
    {"back", kFloats * sizeof(float), 0}};

using Values = std::vector<float>;

/// Keeps what it was given; the promise ends with the sum or the error.
class Keeper final : public OpGradientQueue::Taker {
 public:
  explicit Keeper(std::promise<Values> result) : result_(std::move(result)) {}

  void receive(const std::byte* sum, std::size_t sizeBytes) override {
    const auto* values = reinterpret_cast<const float*>(sum);
    values_.assign(values, values + sizeBytes / sizeof(float));
  }
  void finish(const std::exception_ptr& error) override {
    if (error) {
      result_.set_exception(error);
    } else {
      result_.set_value(values_);
    }
  }

 private:
  std::promise<Values> result_;
  Values values_;
};

class Ranks {
 public:
  explicit Ranks(bool split = false) : world_(LoopbackWorld::create(2)) {
    const auto layout =
        std::make_shared<SliceLayout>(kTensors, 64, true, split, false, 0, /*byNeed=*/split);
    for (Rank rank = 0; rank < 2; ++rank) {
      EngineOptions options;
      options.rank = rank;
      options.size = 2;
      engines_.push_back(
          std::make_shared<Engine>(options, world_->transport(rank), world_->control(rank)));
      engines_.back()->start();
      memory_.emplace_back(4 * kFloats, 0.0F); // also for squares
    }
    for (Rank rank = 0; rank < 2; ++rank) {
      float* memory = memory_[static_cast<std::size_t>(rank)].data();
      world_->setBuffers(rank, 0, {memory, memory + 2 * kFloats});
      engine(rank)->addModel(0, layout, {});
      std::vector<OpGradientQueue::Place> places;
      for (TensorId tensor = 0; tensor < 2; ++tensor) {
        places.push_back(
            {tensor, reinterpret_cast<std::byte*>(memory + tensor * kFloats),
             kFloats * sizeof(float), kTensors[tensor].name});
      }
      queues_.push_back(
          OpGradientQueue::create(
              engine(rank), 0, std::move(places),
              split ? std::optional(layout->squaresTensor()) : std::nullopt));
    }
  }
  ~Ranks() {
    for (const auto& engine : engines_) {
      engine->shutdown();
    }
    for (const auto& queue : queues_) {
      queue->close();
    }
    engines_.clear();
    world_.reset(); // joins its thread: only then the buffers may go
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  std::shared_ptr<Engine>& engine(Rank rank) {
    return engines_[static_cast<std::size_t>(rank)];
  }
  OpGradientQueue& at(Rank rank) {
    return *queues_[static_cast<std::size_t>(rank)];
  }
  LoopbackWorld& world() {
    return *world_;
  }

  void post(Rank rank, std::size_t position, float value) {
    const Values gradient(kFloats, value);
    at(rank).post(position, gradient.data(), kFloats * sizeof(float));
  }
  std::future<Values> take(Rank rank, std::size_t position) {
    std::promise<Values> promise;
    auto result = promise.get_future();
    at(rank).take(position, std::make_unique<Keeper>(std::move(promise)));
    return result;
  }

 private:
  std::shared_ptr<LoopbackWorld> world_;
  std::vector<std::shared_ptr<Engine>> engines_;
  std::vector<Values> memory_;
  std::vector<std::shared_ptr<OpGradientQueue>> queues_;
};

Values get(std::future<Values>& result) {
  CHECK(result.wait_for(kForever) == std::future_status::ready);
  return result.get();
}

} // namespace

namespace {

void takeAgainAndAgain(bool split) {
  Ranks ranks(split);
  test::onThreads(2, [&](int rank) {
    for (int step = 0; step < 50; ++step) {
      std::vector<std::future<Values>> sums;
      for (const std::size_t position : {1U, 0U}) {
        ranks.post(
            rank, position, static_cast<float>(step + rank + 10 * static_cast<int>(position)));
      }
      for (const std::size_t position : {0U, 1U}) {
        sums.push_back(ranks.take(rank, position));
      }
      for (int position = 0; position < 2; ++position) {
        const auto expected = static_cast<float>(2 * step + 1 + 20 * position);
        CHECK_EQUAL(get(sums[static_cast<std::size_t>(position)]), Values(kFloats, expected));
      }
    }
  });
  CHECK_EQUAL(ranks.at(0).posts(), 100U);
}

} // namespace

TEST(everyRankTakesTheSumAgainAndAgain) {
  takeAgainAndAgain(false);
}

TEST(everyRankTakesTheSumOfHalves) {
  takeAgainAndAgain(true);
}

TEST(aGradientWaitsForTheSquaresOfThePassBefore) {
  Ranks ranks(true);
  std::vector<std::future<Values>> sums;
  for (int pass = 1; pass <= 2; ++pass) { // the second one while the other gradient is awaited
    for (Rank rank = 0; rank < 2; ++rank) {
      ranks.post(rank, 0, static_cast<float>(pass));
      sums.push_back(ranks.take(rank, 0));
    }
    if (pass == 1) {
      CHECK_EQUAL(get(sums[0]), Values(kFloats, 2.0F));
      CHECK_EQUAL(get(sums[1]), Values(kFloats, 2.0F));
    }
  }
  CHECK(sums[2].wait_for(0s) == std::future_status::timeout);
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks.post(rank, 1, 7.0F);
  }
  CHECK_EQUAL(get(sums[2]), Values(kFloats, 4.0F));
  CHECK_EQUAL(get(sums[3]), Values(kFloats, 4.0F));
}

TEST(mistakesAreSaid) {
  Ranks ranks;
  const Values gradient(kFloats, 1.0F);
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, ranks.at(0).post(0, gradient.data(), 4)), "4 bytes, expected 64");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, ranks.at(0).post(9, gradient.data(), 64)), "number 9");
  auto early = ranks.take(0, 0);
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, get(early)), "before its gradient came");
  ranks.post(0, 0, 1.0F);
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, ranks.post(0, 0, 1.0F)), "'front' came again");
  auto first = ranks.take(0, 0);
  auto second = ranks.take(0, 0);
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, get(second)), "twice");
  ranks.post(1, 0, 2.0F);
  CHECK_EQUAL(get(first), Values(kFloats, 3.0F));
}

TEST(aTakerIsToldOfALostRank) {
  Ranks ranks;
  ranks.post(0, 1, 1.0F);
  auto sum = ranks.take(0, 1);
  ranks.world().killRank(1);
  CHECK_CONTAINS(CHECK_THROWS(PeerLost, get(sum)), "rank 1 is gone");
  CHECK_THROWS(PeerLost, ranks.post(0, 0, 1.0F));
}

TEST(aPostThatFailsIsNotAwaited) {
  Ranks ranks;
  ranks.engine(0)->shutdown();
  for (int step = 0; step < 2; ++step) {
    CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, ranks.post(0, 0, 1.0F)), "has been shut down");
  }
  auto idle = std::async(std::launch::async, [&] { ranks.at(0).waitUntilIdle(); });
  CHECK(idle.wait_for(kForever) == std::future_status::ready);
}

TEST(aTakerIsToldOfAShutdown) {
  Ranks ranks;
  ranks.post(0, 1, 1.0F);
  auto sum = ranks.take(0, 1);
  ranks.engine(0)->shutdown();
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, get(sum)), "shut down");
}

TEST(closingEndsWhoWaits) {
  Ranks ranks;
  ranks.post(0, 0, 1.0F);
  auto sum = ranks.take(0, 0);
  ranks.at(0).close();
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, get(sum)), "has ended");
  CHECK_THROWS(InvalidUsage, ranks.post(0, 1, 1.0F));
  auto late = ranks.take(0, 1);
  CHECK_THROWS(InvalidUsage, get(late));
  ranks.at(0).close();
}

namespace {

void standIn(bool split) {
  Ranks ranks(split);
  ranks.post(1, 0, 0.0F); // of a step that this rank does not finish
  test::onThreads(2, [&](int rank) {
    for (std::uint64_t known = 0; rank == 1 && known < 20;) {
      known = ranks.at(0).waitForPass(known).value();
      ranks.at(1).standIn(known);
      ranks.at(1).standIn(known); // as often as one likes
      CHECK_EQUAL(ranks.at(1).passes(), known);
    }
    for (int step = 1; rank == 0 && step <= 20; ++step) {
      std::vector<std::future<Values>> sums;
      for (const std::size_t position : {1U, 0U}) {
        ranks.post(0, position, static_cast<float>(step));
        sums.push_back(ranks.take(0, position));
      }
      for (auto& sum : sums) {
        CHECK_EQUAL(get(sum), Values(kFloats, static_cast<float>(step)));
      }
    }
  });
  for (Rank rank = 0; rank < 2; ++rank) { // and everybody is back
    ranks.at(rank).waitUntilIdle();
    ranks.post(rank, 0, 2.0F);
  }
  auto sum = ranks.take(1, 0);
  CHECK_EQUAL(get(sum), Values(kFloats, 4.0F));
}

} // namespace

TEST(aRankWithoutGradientsStandsIn) {
  standIn(false);
}

TEST(aRankWithoutGradientsStandsInForHalves) {
  standIn(true);
}

TEST(zerosFollowWhenASlotIsBack) {
  Ranks ranks;
  ranks.post(1, 0, 5.0F);
  auto last = ranks.take(1, 0);
  ranks.at(1).standIn(3);
  for (int step = 1; step <= 3; ++step) {
    ranks.post(0, 0, 1.0F);
    ranks.post(0, 1, 1.0F);
    auto front = ranks.take(0, 0);
    auto back = ranks.take(0, 1);
    CHECK_EQUAL(get(front), Values(kFloats, step == 1 ? 6.0F : 1.0F));
    CHECK_EQUAL(get(back), Values(kFloats, 1.0F));
  }
  CHECK_EQUAL(get(last), Values(kFloats, 6.0F));
  ranks.at(1).waitUntilIdle();
}

TEST(standingInEndsWithAFailureAndWithClosing) {
  Ranks ranks;
  ranks.at(1).standIn(2);
  ranks.world().killRank(0);
  ranks.at(1).waitUntilIdle(); // nothing comes any more
  CHECK_THROWS(PeerLost, ranks.at(1).standIn(3));
  ranks.at(1).waitUntilIdle();
  auto waiting = std::async(std::launch::async, [&] { return ranks.at(0).waitForPass(0); });
  ranks.at(0).close();
  CHECK(waiting.wait_for(kForever) == std::future_status::ready);
  CHECK(!waiting.get().has_value());
  CHECK_THROWS(InvalidUsage, ranks.at(0).standIn(1));
}

} // namespace hvd_order
