#include "scheduler/agreement.h"

#include "base/error.h"
#include "check.h"

namespace hvd_order {

namespace {

using Keys = std::vector<SliceKey>;

constexpr ByteCount kUnit = 64;

// Tensors a, b, c, d of one slice each: slice i is tensor i.
std::shared_ptr<const SliceLayout> layout() {
  return std::make_shared<SliceLayout>(
      std::vector<TensorSpec>{{"a", kUnit, 0}, {"b", kUnit, 0}, {"c", kUnit, 0}, {"d", kUnit, 0}},
      kUnit);
}

/// All ranks, and messages that travel when the test says so. Slices of model 0 are written as
/// letters: "ba" is slice 1, then slice 0.
class World {
 public:
  World(AgreementKind kind, int size, ByteCount credit = 4 * kUnit, const std::string& plan = "") {
    const Policy policy = kind == AgreementKind::kPlanned ? Policy::kPlanned : Policy::kPriority;
    std::vector<SliceIndex> order;
    for (const char c : plan) {
      order.push_back(static_cast<SliceIndex>(c - 'a'));
    }
    for (Rank rank = 0; rank < size; ++rank) {
      ranks_.push_back(Agreement::create(kind, rank, size, policy, credit));
      ranks_.back()->addModel(0, layout(), order);
    }
  }

  Agreement& at(Rank rank) {
    return *ranks_[static_cast<std::size_t>(rank)];
  }

  /// The tensors become ready on the rank, in the order of the letters.
  /// @return what the rank issues then.
  std::string ready(Rank rank, const std::string& tensors) {
    for (const char c : tensors) {
      at(rank).tensorReady({0, static_cast<TensorId>(c - 'a')});
    }
    return decide(rank);
  }

  std::string done(Rank rank, const std::string& slices) {
    for (const char c : slices) {
      at(rank).sliceDone({0, static_cast<SliceIndex>(c - 'a')});
    }
    return decide(rank);
  }

  /// All messages of one rank to another arrive. @return what the receiver issues then.
  std::string deliver(Rank from, Rank to) {
    std::erase_if(travelling_, [&](const Message& m) {
      if (m.from != from || m.to != to) {
        return false;
      }
      at(to).received(from, m.slices);
      return true;
    });
    return decide(to);
  }

  std::size_t travelling() const {
    return travelling_.size();
  }

 private:
  struct Message {
    Rank from;
    Rank to;
    Keys slices;
  };

  std::string decide(Rank rank) {
    Decisions decisions;
    at(rank).decide(decisions);
    for (SliceMessage& message : decisions.messages) {
      travelling_.push_back({rank, message.to, std::move(message.slices)});
    }
    std::string letters;
    for (const SliceKey slice : decisions.issue) {
      letters += static_cast<char>('a' + slice.index);
    }
    return letters;
  }

  std::vector<std::unique_ptr<Agreement>> ranks_;
  std::vector<Message> travelling_;
};

} // namespace

TEST(theLeaderDoesNotAskAndTheOthersFollow) {
  //          rank 0            rank 1
  // ready    d                 a
  // issue    d                 -          knows of no decision
  // message  d ------------->
  // issue                      -          d is decided, but not ready here
  // ready                      d
  // issue                      d          a still waits for rank 0
  World world(AgreementKind::kLeader, 2);
  CHECK_EQUAL(world.ready(1, "a"), "");
  CHECK_EQUAL(world.ready(0, "d"), "d");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.ready(1, "d"), "d");
  CHECK_EQUAL(world.ready(0, "a"), "a");
  CHECK_EQUAL(world.deliver(0, 1), "a");
}

TEST(aFollowerKeepsTheOrderAlthoughALaterSliceIsReady) {
  World world(AgreementKind::kLeader, 3);
  CHECK_EQUAL(world.ready(0, "cb"), "bc");
  CHECK_EQUAL(world.ready(0, "a"), "a"); // too late to overtake: b and c are in flight
  CHECK_EQUAL(world.ready(1, "ac"), "");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.ready(1, "b"), "bca");
  CHECK_EQUAL(world.ready(2, "abc"), "");
  CHECK_EQUAL(world.deliver(0, 2), "bca");
}

TEST(aFollowerHasItsOwnCredit) {
  World world(AgreementKind::kLeader, 2, 2 * kUnit);
  CHECK_EQUAL(world.ready(0, "abcd"), "ab");
  CHECK_EQUAL(world.ready(1, "abcd"), "");
  CHECK_EQUAL(world.deliver(0, 1), "ab");
  CHECK_EQUAL(world.done(0, "ab"), "cd"); // both are done at rank 0, not yet at rank 1
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.done(1, "b"), "c");
  CHECK_EQUAL(world.done(1, "a"), "d");
}

TEST(rankZeroFillsTheWindowWhenHalfOfItHasDrained) {
  // Fewer and longer messages: a waits although a quarter of the credit is free.
  World world(AgreementKind::kLeader, 2);
  CHECK_EQUAL(world.ready(0, "d"), "d");
  CHECK_EQUAL(world.ready(0, "c"), "c");
  CHECK_EQUAL(world.ready(0, "b"), "b");
  CHECK_EQUAL(world.ready(0, "a"), "");
  CHECK_EQUAL(world.done(0, "c"), "a");
}

TEST(negotiationPicksTheMostUrgentOfWhatIsReadyEverywhere) {
  //          rank 0       rank 1       rank 2
  // ready    a b d        c d b        d b
  // issue    -            -            -           nobody knows about the others yet
  // reports  <--- c d b, d b ----
  // issue    b d                                   a and c are missing somewhere
  World world(AgreementKind::kNegotiated, 3);
  CHECK_EQUAL(world.ready(0, "abd"), "");
  CHECK_EQUAL(world.ready(1, "cdb"), "");
  CHECK_EQUAL(world.ready(2, "db"), "");
  CHECK_EQUAL(world.deliver(1, 0), "");
  CHECK_EQUAL(world.deliver(2, 0), "bd");
  CHECK_EQUAL(world.deliver(0, 1), "bd");
  CHECK_EQUAL(world.deliver(0, 2), "bd");
  CHECK_EQUAL(world.travelling(), 0U);
}

TEST(negotiationReportsOnceForEveryStep) {
  World world(AgreementKind::kNegotiated, 2);
  for (int step = 0; step < 3; ++step) {
    CHECK_EQUAL(world.ready(1, "a"), "");
    CHECK_EQUAL(world.deliver(1, 0), ""); // a report alone decides nothing
    CHECK_EQUAL(world.ready(0, "a"), "a");
    CHECK_EQUAL(world.deliver(0, 1), "a");
    world.done(0, "a");
    world.done(1, "a");
  }
}

TEST(reportsForAModelThatRankZeroHasNotRegisteredAreKept) {
  World world(AgreementKind::kNegotiated, 2);
  world.at(1).addModel(3, layout(), {});
  world.at(1).tensorReady({3, 2});
  world.ready(1, "");
  CHECK_EQUAL(world.deliver(1, 0), "");
  world.at(0).addModel(3, layout(), {});
  CHECK_EQUAL(world.ready(0, ""), "");
  world.at(0).tensorReady({3, 2});
  CHECK_EQUAL(world.ready(0, ""), "c");
}

TEST(decisionsForAModelThatIsNotRegisteredHereWait) {
  World world(AgreementKind::kLeader, 2);
  world.at(0).addModel(1, layout(), {});
  world.at(0).tensorReady({1, 1});
  CHECK_EQUAL(world.ready(0, ""), "b");
  CHECK_EQUAL(world.deliver(0, 1), "");
  world.at(1).addModel(1, layout(), {});
  CHECK_EQUAL(world.ready(1, ""), "");
  world.at(1).tensorReady({1, 1});
  CHECK_EQUAL(world.ready(1, ""), "b");
}

TEST(aPlanNeedsNoMessages) {
  World world(AgreementKind::kPlanned, 3, 4 * kUnit, "cadb");
  CHECK_EQUAL(world.ready(0, "abd"), "");
  CHECK_EQUAL(world.ready(0, "c"), "cadb");
  CHECK_EQUAL(world.ready(2, "c"), "c");
  CHECK_EQUAL(world.ready(2, "b"), "");
  CHECK_EQUAL(world.ready(2, "a"), "a");
  CHECK_EQUAL(world.travelling(), 0U);
}

TEST(oneRankAgreesWithItself) {
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    World world(kind, 1);
    CHECK_EQUAL(world.ready(0, "db"), "bd");
    CHECK_EQUAL(world.travelling(), 0U);
  }
  World planned(AgreementKind::kPlanned, 1, 4 * kUnit, "abcd");
  CHECK_EQUAL(planned.ready(0, "ba"), "ab");
}

TEST(decisionsAreAdded) {
  const auto one = Agreement::create(AgreementKind::kLeader, 0, 2, Policy::kPriority, 4 * kUnit);
  one->addModel(0, layout(), {});
  Decisions decisions;
  one->tensorReady({0, 3});
  one->decide(decisions);
  one->tensorReady({0, 0});
  one->decide(decisions);
  CHECK_EQUAL(decisions.issue, Keys{{0, 3}, {0, 0}});
  CHECK_EQUAL(decisions.messages.size(), 2U);
  CHECK_EQUAL(decisions.messages[1].slices, Keys{{0, 0}}); // only what is new
  one->decide(decisions);
  CHECK_EQUAL(decisions.messages.size(), 2U);
}

TEST(mistakesAreNamed) {
  const auto make = [](AgreementKind kind, Rank rank, Policy policy) {
    return Agreement::create(kind, rank, 2, policy, kUnit);
  };
  CHECK_THROWS(InvalidUsage, make(AgreementKind::kLeader, 2, Policy::kPriority));
  CHECK_THROWS(InvalidUsage, make(AgreementKind::kLeader, -1, Policy::kPriority));
  CHECK_THROWS(InvalidUsage, make(AgreementKind::kLeader, 0, Policy::kPlanned));
  CHECK_THROWS(InvalidUsage, make(AgreementKind::kPlanned, 0, Policy::kPriority));
  const Keys slices{{0, 0}};
  const auto leader = make(AgreementKind::kLeader, 0, Policy::kPriority);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, leader->received(1, slices)), "rank 1");
  const auto follower = make(AgreementKind::kLeader, 1, Policy::kPriority);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, follower->received(1, slices)), "only rank 0");
  const auto planned = make(AgreementKind::kPlanned, 1, Policy::kPlanned);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, planned->received(0, slices)), "same agreement");
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
