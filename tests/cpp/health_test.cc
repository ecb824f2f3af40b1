#include "engine/health.h"

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

// Slices of 64 bytes: weight and bias share the first, embedding has two of its own.
std::shared_ptr<const SliceLayout> layout() {
  return std::make_shared<SliceLayout>(
      std::vector<TensorSpec>{{"weight", 48, 0}, {"bias", 16, 0}, {"embedding", 128, 0}}, 64);
}

/// Some ranks with a star of messages between them; `mute` ranks neither hear nor answer.
struct World {
  explicit World(int size, std::set<Rank> muteRanks = {}) : mute(std::move(muteRanks)) {
    for (Rank rank = 0; rank < size; ++rank) {
      schedulers.emplace_back(Policy::kPriority, 1 << 20);
      schedulers.back().addModel(0, layout());
      healths.emplace_back(rank, size);
    }
  }

  Scheduler& scheduler(Rank rank) {
    return schedulers[static_cast<std::size_t>(rank)];
  }
  Health& health(Rank rank) {
    return healths[static_cast<std::size_t>(rank)];
  }

  void deliver(Rank from, const std::vector<Health::Addressed>& messages) {
    for (const Health::Addressed& m : messages) {
      CHECK((from == 0) != (m.to == 0)); // along the star
      if (!mute.contains(m.to)) {
        deliver(m.to, health(m.to).received(scheduler(m.to), from, m.message, activities[m.to]));
      }
    }
  }

  /// The rank asks everybody about these tensors; its report when all messages have been carried.
  std::string inquire(Rank rank, const std::vector<TensorId>& tensors) {
    std::vector<TensorKey> waiting;
    for (const TensorId tensor : tensors) {
      waiting.push_back({0, tensor});
    }
    deliver(rank, health(rank).ask(scheduler(rank), waiting));
    return health(rank).report(scheduler(rank));
  }

  std::vector<Scheduler> schedulers;
  std::vector<Health> healths;
  std::set<Rank> mute;
  std::map<Rank, std::string> activities; // what the ranks wait in
};

} // namespace

TEST(theRanksThatLackATensorAreNamed) {
  for (const Rank asking : {0, 2}) {
    World world(4);
    world.scheduler(0).tensorReady({0, 2});
    world.scheduler(2).tensorReady({0, 2});
    CHECK_EQUAL(
        world.inquire(asking, {2}),
        concat(
            "rank ", asking,
            " waits for the all-reduce of 'embedding'; 'embedding' has not been "
            "produced on ranks 1, 3"));
  }
}

TEST(whatAnotherRankWaitsInIsNamed) {
  for (const auto& [asking, busy] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{1, 2}}) {
    World world(3);
    world.scheduler(asking).tensorReady({0, 2});
    world.activities[busy] = "registers parameters";
    CHECK_CONTAINS(
        world.inquire(asking, {2}), concat("; meanwhile rank ", busy, " registers parameters"));
    world.activities.clear();
    CHECK(world.inquire(asking, {2}).find("meanwhile") == std::string::npos);
  }
}

TEST(whatAnotherRankWaitsInIsCutBetweenCharacters) {
  for (std::size_t before = 316; before < 322; ++before) {
    const std::string start(before, 'x');
    World world(2);
    world.scheduler(0).tensorReady({0, 2});
    world.activities[1] = start + "\U0001F3D6"; // four bytes
    const std::string kept = before <= 316 ? world.activities[1] : start.substr(0, 320);
    const std::string report = world.inquire(0, {2});
    const std::size_t at = report.find('x');
    CHECK_EQUAL(report.substr(at, report.find_first_of(";", at) - at), kept);
  }
}

TEST(anEarlierStepDoesNotCount) {
  World world(2);
  for (const Rank rank : {0, 1}) {
    world.scheduler(rank).tensorReady({0, 2});
    for (const SliceKey slice : {SliceKey{0, 1}, SliceKey{0, 2}}) {
      world.scheduler(rank).take(slice);
      world.scheduler(rank).sliceDone(slice);
    }
  }
  world.scheduler(0).tensorReady({0, 2});
  CHECK_CONTAINS(world.inquire(0, {2}), "'embedding' has not been produced on rank 1");
}

TEST(aMissingNeighbourInTheSameSliceIsNamedToo) {
  World world(2);
  for (const Rank rank : {0, 1}) {
    world.scheduler(rank).tensorReady({0, 0});
  }
  CHECK_EQUAL(
      world.inquire(1, {0}),
      "rank 1 waits for the all-reduce of 'weight'; 'bias' has not been produced on ranks 0, 1");
}

TEST(aGradientThatHoldsUpTheSquaresIsNamed) {
  // Both ranks lack bias, so no gradient is pending that waits for it: only the squares are.
  World world(0);
  const auto split = std::make_shared<SliceLayout>(
      std::vector<TensorSpec>{{"weight", 64, 0}, {"bias", 64, 0}}, 64, true, true);
  for (Rank rank = 0; rank < 2; ++rank) {
    world.schedulers.emplace_back(Policy::kPriority, 1 << 20).addModel(0, split);
    world.healths.emplace_back(rank, 2);
    Scheduler& scheduler = world.scheduler(rank);
    scheduler.tensorReady({0, split->squaresTensor()});
    scheduler.tensorReady({0, 0});
    for (const SliceIndex half : {1U, 3U}) {
      scheduler.take({0, half});
      scheduler.sliceDone({0, half});
    }
  }
  CHECK_EQUAL(
      world.inquire(1, {split->squaresTensor()}),
      "rank 1 waits for the all-reduce of 'squares'; 'bias' has not been produced on ranks 0, 1");
  world.scheduler(1).tensorReady({0, 1});
  CHECK_EQUAL(
      world.inquire(1, {1, split->squaresTensor()}),
      "rank 1 waits for the all-reduce of 'bias', 'squares'; 'bias' has not been produced on rank "
      "0");
}

TEST(aRankThatDoesNotAnswerIsNamed) {
  World world(4, {1, 3});
  for (const Rank rank : {0, 2}) {
    world.scheduler(rank).tensorReady({0, 2});
  }
  CHECK_EQUAL(
      world.inquire(2, {2}),
      "rank 2 waits for the all-reduce of 'embedding'; no answer from ranks 1, 3");
}

TEST(whenEveryRankHasItTheNetworkIsSuspected) {
  World world(2);
  for (const Rank rank : {0, 1}) {
    world.scheduler(rank).tensorReady({0, 2});
  }
  CHECK_CONTAINS(world.inquire(0, {2}), "the network or the backend is stuck");
}

TEST(oneRankHasNobodyToAsk) {
  World world(1);
  world.scheduler(0).tensorReady({0, 0});
  CHECK_EQUAL(
      world.inquire(0, {0}),
      "rank 0 waits for the all-reduce of 'weight'; 'bias' has not been produced on rank 0");
}

TEST(aModelThatIsUnknownElsewhereIsMissingThere) {
  World world(2);
  world.scheduler(0).addModel(9, layout());
  world.scheduler(0).tensorReady({9, 2});
  world.deliver(0, world.health(0).ask(world.scheduler(0), {{9, 2}}));
  CHECK_CONTAINS(
      world.health(0).report(world.scheduler(0)), "'embedding' has not been produced on rank 1");
}

TEST(aNewInquiryForgetsTheOldOne) {
  World world(2);
  world.scheduler(0).tensorReady({0, 2});
  CHECK_CONTAINS(world.inquire(0, {2}), "on rank 1");
  world.scheduler(1).tensorReady({0, 2});
  CHECK_CONTAINS(world.inquire(0, {2}), "every rank has produced");
}

TEST(aRankNamesWhatItLacksItselfAtTheHeadOfTheOrder) {
  World world(2);
  for (const Rank rank : {0, 1}) {
    world.scheduler(rank).tensorReady({0, 2});
  }
  world.scheduler(0).tensorReady({0, 0});
  world.scheduler(0).tensorReady({0, 1});
  world.scheduler(1).tensorReady({0, 1});
  world.deliver(1, world.health(1).ask(world.scheduler(1), {{0, 2}}, SliceKey{0, 0}));
  CHECK_EQUAL(
      world.health(1).report(world.scheduler(1)),
      "rank 1 waits for the all-reduce of 'embedding'; 'weight' has not been produced on rank 1");
  // A slice that is ready lacks nothing, and a model that is still to come has no names.
  for (const SliceKey head : {SliceKey{0, 1}, SliceKey{7, 0}}) {
    world.deliver(1, world.health(1).ask(world.scheduler(1), {{0, 2}}, head));
    CHECK_CONTAINS(world.health(1).report(world.scheduler(1)), "every rank has produced");
  }
}

TEST(anAnswerToAnOldInquiryDoesNotCount) {
  World world(2);
  world.scheduler(0).tensorReady({0, 2});
  const auto query = world.health(0).ask(world.scheduler(0), {{0, 2}});
  const auto late = world.health(1).received(world.scheduler(1), 0, query.at(0).message);
  world.health(0).ask(world.scheduler(0), {{0, 2}});
  world.deliver(1, late);
  const std::string report = world.health(0).report(world.scheduler(0));
  CHECK_CONTAINS(report, "no answer from rank 1");
  CHECK(report.find("has not been produced") == std::string::npos);
}

TEST(longListsAreCut) {
  std::vector<TensorSpec> tensors;
  std::vector<TensorKey> all;
  for (TensorId i = 0; i < 100; ++i) {
    tensors.push_back({concat("t", i), 64, 0});
    all.push_back({0, i});
  }
  const auto many = std::make_shared<SliceLayout>(tensors, 64);
  std::vector<Scheduler> schedulers;
  for (int rank = 0; rank < 2; ++rank) {
    schedulers.emplace_back(Policy::kPriority, 1 << 20).addModel(0, many);
  }
  for (const TensorKey tensor : all) {
    schedulers[0].tensorReady(tensor);
  }
  Health asking(0, 2);
  Health asked(1, 2);
  const auto query = asking.ask(schedulers[0], all);
  CHECK_EQUAL(query.size(), 1U);
  const auto reply = asked.received(schedulers[1], 0, query[0].message);
  asking.received(schedulers[0], 1, reply.at(0).message);
  const std::string report = asking.report(schedulers[0]);
  CHECK_CONTAINS(report, "'t4' and 95 more");
  CHECK_CONTAINS(report, "'t4' has not been produced on rank 1; 27 more are missing");
}

TEST(aMessageThatIsTooShortOrNamesNoRankIsRefused) {
  World world(2);
  const auto refused = [&](Rank rank, const ControlMessage& message) {
    const Rank from = 1 - rank;
    return CHECK_THROWS(
        MalformedMessage, world.health(rank).received(world.scheduler(rank), from, message));
  };
  for (const MessageKind kind : {MessageKind::kQuery, MessageKind::kReply}) {
    CHECK_CONTAINS(refused(0, {kind, {}}), "rank 1 sent a malformed control message");
    CHECK_CONTAINS(refused(0, {kind, {77, 1, 0}}), "the asking rank is 77");
    CHECK_CONTAINS(refused(0, {kind, {1, 1, 1, 0, 0, 0}}), "words are left");
  }
  CHECK_CONTAINS(refused(0, {MessageKind::kQuery, {0, 1}}), "it asks for rank 0");
  CHECK_CONTAINS(refused(1, {MessageKind::kReply, {1, 0, 9}}), "the answering rank is 9");
}

TEST(tensorsOfAnotherShapeAreMissingAndHaveNoName) {
  World world(2);
  world.scheduler(1).tensorReady({0, 0});
  world.health(1).ask(world.scheduler(1), {{0, 0}});
  world.health(1).received(
      world.scheduler(1), 0, {MessageKind::kReply, {1, 1, 0, 0, 50, 9, 0}}); // and model 9
  const std::string report = world.health(1).report(world.scheduler(1));
  CHECK_CONTAINS(report, "tensor 50 of model 0 has not been produced on rank 0");
  const auto answers =
      world.health(0).received(world.scheduler(0), 1, {MessageKind::kQuery, {1, 1, 0, 50, 1}});
  CHECK_EQUAL(answers.at(0).message.words.size(), std::size_t{5});
}

} // namespace hvd_order
