#include "engine/shutdown_barrier.h"

#include <algorithm>
#include <deque>
#include <random>

#include "base/error.h"
#include "check.h"

// Several ranks without threads: their messages are delivered in random order, as far as the order
// between two ranks allows it.

namespace hvd_order {

namespace {

class World {
 public:
  explicit World(int size) : size_(size), done(static_cast<std::size_t>(size), 0) {
    for (Rank rank = 0; rank < size; ++rank) {
      ranks.emplace_back(rank, size);
    }
  }

  void finish(Rank rank) {
    ++done[static_cast<std::size_t>(rank)];
    post(rank, at(rank).sliceDone());
  }
  void leave(Rank rank) {
    post(rank, at(rank).begin());
  }
  /// Rank 0 and, for rank 0, all others hear that it has gone, behind all that it has said.
  void go(Rank rank) {
    for (Rank other = 0; other < size_; ++other) {
      if (other != rank && (rank == 0 || other == 0)) {
        lines_[{rank, other}].push_back({MessageKind::kLeave, {}});
      }
    }
  }
  /// @return whether there was a message to deliver.
  bool deliver(std::mt19937& random) {
    std::vector<std::pair<Rank, Rank>> filled;
    for (const auto& [line, messages] : lines_) {
      if (!messages.empty()) {
        filled.push_back(line);
      }
    }
    if (filled.empty()) {
      return false;
    }
    const auto line = filled[random() % filled.size()];
    const ControlMessage message = lines_[line].front();
    lines_[line].pop_front();
    if (message.kind == MessageKind::kLeave) {
      post(line.second, at(line.second).gone(line.first));
    } else {
      post(line.second, at(line.second).received(line.first, message));
    }
    ++delivered;
    return true;
  }
  ShutdownBarrier& at(Rank rank) {
    return ranks[static_cast<std::size_t>(rank)];
  }

 private:
  void post(Rank from, const std::vector<ShutdownBarrier::Addressed>& messages) {
    for (const ShutdownBarrier::Addressed& message : messages) {
      CHECK(message.to != from);
      CHECK(message.to == 0 || from == 0); // a star
      lines_[{from, message.to}].push_back(message.message);
    }
  }

  const int size_;
  std::map<std::pair<Rank, Rank>, std::deque<ControlMessage>> lines_;

 public:
  std::vector<ShutdownBarrier> ranks;
  std::vector<std::uint64_t> done;
  std::size_t delivered = 0;
};

TEST(nobodyLeavesBeforeTheOthersHaveFinishedAndThenEverybodyMay) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    const int size = 1 + static_cast<int>(random() % 6);
    const std::uint64_t slices = random() % 5;
    World world(size);
    std::set<Rank> leaving;
    std::set<Rank> gone;
    while (gone.size() < static_cast<std::size_t>(size)) {
      const auto rank = static_cast<Rank>(random() % static_cast<unsigned>(size));
      std::uint64_t& done = world.done[static_cast<std::size_t>(rank)];
      if (gone.contains(rank)) {
        world.deliver(random);
      } else if (done < slices && random() % 2 == 0) {
        world.finish(rank);
      } else if (done == slices && leaving.insert(rank).second) {
        world.leave(rank);
      } else if (leaving.contains(rank) && world.at(rank).mayLeave()) {
        for (Rank other = 0; other < size; ++other) {
          CHECK_EQUAL(world.done[static_cast<std::size_t>(other)], slices);
        }
        world.go(rank);
        gone.insert(rank);
      } else {
        world.deliver(random);
      }
    }
  }
}

TEST(ranksThatAllWantToLeaveWaitForNothing) {
  // Rank 1 has not finished what the others have, and will not.
  std::mt19937 random(1);
  World world(3);
  world.finish(0);
  world.finish(2);
  for (Rank rank = 0; rank < 3; ++rank) {
    CHECK(!world.at(rank).mayLeave());
    world.leave(rank);
  }
  while (world.deliver(random)) {
  }
  for (Rank rank = 0; rank < 3; ++rank) {
    CHECK(world.at(rank).mayLeave());
  }
}

TEST(aRankThatIsGoneIsNotAwaited) {
  std::mt19937 random(1);
  World world(3);
  world.finish(0);
  world.finish(1);
  world.leave(1);
  while (world.deliver(random)) {
  }
  CHECK(!world.at(1).mayLeave());
  CHECK(world.at(1).ask().size() == 1);
  world.go(2);
  while (world.deliver(random)) {
  }
  CHECK(world.at(1).mayLeave());
}

TEST(aRankThatWentWithoutWaitingDoesNotCountTwice) {
  std::mt19937 random(1);
  World world(3);
  const auto deliverAll = [&] {
    while (world.deliver(random)) {
    }
  };
  world.finish(1);
  world.finish(2);
  world.leave(2);
  deliverAll();
  world.go(2);
  world.leave(1);
  deliverAll();
  CHECK(!world.at(1).mayLeave()); // rank 0 is still to finish the slice
  world.finish(0);
  deliverAll();
  CHECK(world.at(1).mayLeave());
}

TEST(theMissingRanksAreNamed) {
  std::mt19937 random(1);
  World world(4);
  for (const Rank rank : {0, 2}) {
    world.finish(rank);
    world.leave(rank);
  }
  while (world.deliver(random)) {
  }
  for (const Rank rank : {0, 2}) {
    for (const ShutdownBarrier::Addressed& question : world.at(rank).ask()) {
      for (const auto& answer : world.at(0).received(rank, question.message)) {
        world.at(answer.to).received(0, answer.message);
      }
    }
    CHECK(world.at(rank).isAnswered());
    CHECK(world.at(rank).missing() == (std::vector<Rank>{1, 3}));
  }
}

TEST(aFarewellTakesAFewMessagesForEachRank) {
  constexpr int kSize = 50;
  std::mt19937 random(1);
  World world(kSize);
  for (Rank rank = 0; rank < kSize; ++rank) {
    world.finish(rank);
  }
  for (Rank rank = 0; rank < kSize; ++rank) {
    world.leave(rank);
  }
  while (world.deliver(random)) {
  }
  for (Rank rank = 0; rank < kSize; ++rank) {
    CHECK(world.at(rank).mayLeave());
  }
  CHECK(world.delivered <= 4 * kSize);
}

} // namespace

TEST(aMessageThatIsTooShortOrNamesNoRankIsRefused) {
  ShutdownBarrier leader(0, 2);
  ShutdownBarrier other(1, 2);
  for (const MessageKind kind : {MessageKind::kBarrier, MessageKind::kFinished}) {
    CHECK_CONTAINS(
        CHECK_THROWS(MalformedMessage, leader.received(1, {kind, {7}})),
        "rank 1 sent a malformed control message");
    CHECK_THROWS(MalformedMessage, other.received(0, {kind, {}}));
    CHECK_THROWS(MalformedMessage, other.received(0, {kind, {0, 1, 2}}));
  }
  CHECK_THROWS(MalformedMessage, other.received(0, {MessageKind::kMissing, {2}}));
  CHECK_THROWS(MalformedMessage, leader.received(1, {MessageKind::kMissing, {2}}));
  CHECK(!other.isAnswered());
  CHECK(!other.mayLeave());
}

} // namespace hvd_order
