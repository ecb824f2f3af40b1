#include "scheduler/agreement.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "check.h"
#include "scheduler/agreement_sequence.h"
#include "scheduler/follower.h"
#include "scheduler/planned.h"

namespace hvd_order {

namespace {

using Keys = std::vector<SliceKey>;

constexpr ByteCount kUnit = 64;

// Tensors a, b, c ... of one slice each: slice i is tensor i.
std::shared_ptr<const SliceLayout> layout(int slices = 4, bool split = false) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < slices; ++i) {
    tensors.push_back({std::string(1, static_cast<char>('a' + i)), kUnit, 0});
  }
  return std::make_shared<SliceLayout>(std::move(tensors), kUnit, true, split);
}

// The letters of all slices by number, see World.
std::string letters(const SliceLayout& layout) {
  std::string all;
  for (SliceIndex i = 0; i < layout.slices().size(); ++i) {
    const Slice& slice = layout.slices()[i];
    const char letter = static_cast<char>('a' + slice.firstTensor);
    all += layout.isSplit() && i == SliceLayout::kSquares ? '#'
        : slice.operation == Operation::kAllGather        ? static_cast<char>(std::toupper(letter))
                                                          : letter;
  }
  return all;
}

/// All ranks, and messages that travel when the test says so. Slices of model 0 are written as
/// letters: "ba" is slice 1, then slice 0. In a split layout, "a" is the reduce-scatter of tensor
/// a, "A" its all-gather, and "#" the squares, both slice and tensor.
class World {
 public:
  World(
      AgreementKind kind,
      int size,
      ByteCount credit = 4 * kUnit,
      const std::string& plan = "",
      int slices = 4,
      int fanOut = kFanOut,
      bool split = false)
      : layout_(layout(slices, split)), letters_(letters(*layout_)) {
    const Policy policy = kind == AgreementKind::kPlanned ? Policy::kPlanned : Policy::kPriority;
    std::vector<SliceIndex> order;
    for (const char c : plan) {
      order.push_back(sliceOf(c).index);
    }
    for (Rank rank = 0; rank < size; ++rank) {
      ranks_.push_back(Agreement::create(kind, rank, size, policy, credit, fanOut));
      ranks_.back()->addModel(0, layout_, order);
    }
  }

  Agreement& at(Rank rank) {
    return *ranks_[static_cast<std::size_t>(rank)];
  }

  /// The tensors become ready on the rank, in the order of the letters.
  /// @return what the rank issues then.
  std::string ready(Rank rank, const std::string& tensors) {
    for (const char c : tensors) {
      at(rank).tensorReady(
          {0, c == '#' ? layout_->squaresTensor() : static_cast<TensorId>(c - 'a')});
    }
    return decide(rank);
  }

  std::string done(Rank rank, const std::string& slices) {
    for (const char c : slices) {
      at(rank).sliceDone(sliceOf(c));
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

  /// Questions and answers of ranks that want to be heard, or no more, so far.
  std::size_t empty() const {
    return empty_;
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
      empty_ += message.slices.empty() ? 1 : 0;
      travelling_.push_back({rank, message.to, std::move(message.slices)});
    }
    std::string issued;
    for (const SliceKey slice : decisions.issue) {
      issued += letters_.at(slice.index);
    }
    return issued;
  }

  SliceKey sliceOf(char letter) const {
    return {0, static_cast<SliceIndex>(letters_.find(letter))};
  }

  std::shared_ptr<const SliceLayout> layout_;
  std::string letters_;
  std::vector<std::unique_ptr<Agreement>> ranks_;
  std::vector<Message> travelling_;
  std::size_t empty_ = 0;
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

TEST(rankZeroFillsTheWindowWhenHalfOfItHasDrained) {
  // Fewer and longer messages: a waits although a quarter of the credit is free.
  World world(AgreementKind::kLeader, 2);
  CHECK_EQUAL(world.ready(0, "d"), "d");
  CHECK_EQUAL(world.ready(0, "c"), "c");
  CHECK_EQUAL(world.ready(0, "b"), "b");
  CHECK_EQUAL(world.ready(0, "a"), "");
  CHECK_EQUAL(world.done(0, "c"), "a");
}

TEST(aRankThatHoldsUpTheOthersIsHeard) {
  World world(AgreementKind::kLeader, 2, kUnit, "", 6); // one slice fits the credit
  const auto exchange = [&](const std::string& slice) {
    const auto index = static_cast<SliceIndex>(slice[0] - 'a');
    world.at(0).sliceDone({0, index});
    world.at(1).sliceDone({0, index});
  };
  CHECK_EQUAL(world.ready(0, "def"), "d");
  CHECK_EQUAL(world.ready(1, "def"), "");
  CHECK_EQUAL(world.deliver(0, 1), "d");
  exchange("d");
  // Each of these is decided where it is ready, and holds up e and f.
  for (const std::string late : {"c", "b"}) {
    CHECK_EQUAL(world.ready(0, late), late);
    CHECK_EQUAL(world.deliver(0, 1), "");
    CHECK_EQUAL(world.empty(), 0U);
    CHECK_EQUAL(world.ready(1, late), late);
    exchange(late);
  }
  CHECK_EQUAL(world.ready(0, "a"), "a");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.empty(), 1U); // the third time it asks
  CHECK_EQUAL(world.deliver(1, 0), "");
  CHECK_EQUAL(world.empty(), 2U);
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.ready(1, "a"), "a"); // decided before it was heard
  exchange("a");
  CHECK_EQUAL(world.ready(0, ""), "e"); // offered before: its report, on the way, is for nothing
  CHECK_EQUAL(world.deliver(0, 1), "e");
  exchange("e");
  CHECK_EQUAL(world.ready(0, ""), "f");
  CHECK_EQUAL(world.deliver(0, 1), "f");
  exchange("f");
  CHECK_EQUAL(world.deliver(1, 0), "");
  // From now on what rank 1 lacks holds up nothing.
  CHECK_EQUAL(world.ready(0, "fa"), "");
  CHECK_EQUAL(world.ready(1, "f"), "");
  CHECK_EQUAL(world.deliver(1, 0), "f");
  CHECK_EQUAL(world.deliver(0, 1), "f");
  exchange("f");
  CHECK_EQUAL(world.ready(0, ""), "");
  CHECK_EQUAL(world.ready(1, "a"), "");
  CHECK_EQUAL(world.deliver(1, 0), "a");
  CHECK_EQUAL(world.deliver(0, 1), "a");
}

TEST(aHeadThatWaitsForASumInFlightHoldsUpNobody) {
  // Otherwise every rank on which transfers end later than on rank 0 would ask to be heard.
  World world(AgreementKind::kLeader, 2, 8 * kUnit, "", 5, kFanOut, true);
  CHECK_EQUAL(world.ready(1, "#edcba"), ""); // e is not ready on rank 0: it could be sent
  CHECK_EQUAL(world.ready(0, "#dcba"), "abcd");
  CHECK_EQUAL(world.deliver(0, 1), "abcd");
  for (const std::string sum : {"a", "b", "c", "d"}) {
    const std::string parts(1, static_cast<char>(std::toupper(sum[0])));
    CHECK_EQUAL(world.done(0, sum), parts);
    CHECK_EQUAL(world.deliver(0, 1), ""); // the sum is in flight here
    CHECK_EQUAL(world.done(1, sum), parts);
    CHECK_EQUAL(world.done(0, parts), "");
    CHECK_EQUAL(world.done(1, parts), "");
  }
  CHECK_EQUAL(world.empty(), 0U);
}

TEST(whoSucceedsAPlanTakesOverWhatIsBetweenTheHalves) {
  AgreementSequence agreements(AgreementKind::kPlanned, 0, 1, Policy::kPlanned, 4 * kUnit);
  const auto split = layout(2, true); // 0 squares, 1 and 2 sums, 3 and 4 parts
  agreements.current().addModel(0, split, {2, 4, 1, 3, 0});
  const auto decide = [&] {
    Decisions decisions;
    agreements.decide(decisions);
    return decisions.issue;
  };
  agreements.current().tensorReady({0, split->squaresTensor()});
  agreements.current().tensorReady({0, 1});
  agreements.current().tensorReady({0, 0});
  CHECK_EQUAL(decide(), Keys{{0, 2}});
  agreements.endPlan(agreements.holdPlan().value(), AgreementKind::kLeader, Policy::kPriority);
  CHECK_EQUAL(decide(), Keys{{0, 1}}); // was ready under the plan
  agreements.current().sliceDone({0, 2});
  CHECK_EQUAL(decide(), Keys{{0, 4}}); // becomes ready under the successor
  agreements.current().sliceDone({0, 1});
  CHECK_EQUAL(decide(), Keys{{0, 0}, {0, 3}});
}

TEST(whoSucceedsAPlanDecidesAtOnce) {
  // Slice c is ready when the plan ends with d, and no event may follow for long.
  AgreementSequence agreements(AgreementKind::kPlanned, 0, 1, Policy::kPlanned, 4 * kUnit);
  agreements.current().addModel(0, layout(), {3, 0, 1, 2});
  agreements.current().tensorReady({0, 2});
  agreements.current().tensorReady({0, 3});
  CHECK_EQUAL(agreements.holdPlan().value(), 0U);
  agreements.endPlan(1, AgreementKind::kLeader, Policy::kPriority); // another rank has issued d
  Decisions decisions;
  agreements.decide(decisions);
  CHECK_EQUAL(decisions.issue, Keys{{0, 3}, {0, 2}});
}

TEST(noRankSendsADecisionMoreThanFourTimes) {
  constexpr int kSize = 1000;
  World world(AgreementKind::kLeader, kSize);
  CHECK_EQUAL(world.ready(0, "a"), "a");
  std::size_t most = world.travelling();
  for (Rank rank = 1; rank < kSize; ++rank) {
    world.ready(rank, "a");
    const std::size_t before = world.travelling();
    CHECK_EQUAL(world.deliver(placeInTree(rank, kSize).parent, rank), "a");
    most = std::max(most, world.travelling() + 1 - before); // one has arrived
  }
  CHECK_EQUAL(most, 4U);
  CHECK_EQUAL(world.travelling(), 0U);
  int depth = 0;
  for (Rank rank = kSize - 1; rank > 0; rank = placeInTree(rank, kSize).parent) {
    ++depth;
  }
  CHECK_EQUAL(depth, 5);
}

TEST(aRequestToBeHeardClimbsTheTree) {
  // A chain of three; rank 2 is late. One slice fits the credit.
  World world(AgreementKind::kLeader, 3, kUnit, "", 6, 1);
  const auto exchange = [&](const std::string& slice) {
    for (const Rank rank : {0, 1, 2}) {
      world.at(rank).sliceDone({0, static_cast<SliceIndex>(slice[0] - 'a')});
    }
  };
  const auto pass = [&](const std::string& slice) { // rank 0 decides it; rank 2 lacks it at first
    CHECK_EQUAL(world.ready(1, slice), "");
    CHECK_EQUAL(world.ready(0, slice), slice);
    CHECK_EQUAL(world.deliver(0, 1), slice);
    CHECK_EQUAL(world.deliver(1, 2), "");
    CHECK_EQUAL(world.ready(2, slice), slice);
    exchange(slice);
  };
  CHECK_EQUAL(world.ready(2, "f"), ""); // could be sent while rank 2 lacks the others
  pass("e");
  pass("d");
  CHECK_EQUAL(world.empty(), 0U);
  pass("c"); // the third hold-up: rank 2 asks
  CHECK_EQUAL(world.empty(), 1U);
  CHECK_EQUAL(world.deliver(2, 1), "");
  CHECK_EQUAL(world.empty(), 3U); // an answer, and rank 1 asks as well
  CHECK_EQUAL(world.deliver(1, 2), "");
  // Rank 2 reports b. Rank 0 has decided it, because rank 1 is not heard yet.
  CHECK_EQUAL(world.ready(1, "b"), "");
  CHECK_EQUAL(world.ready(0, "b"), "b");
  CHECK_EQUAL(world.deliver(0, 1), "b");
  CHECK_EQUAL(world.deliver(1, 2), "");
  CHECK_EQUAL(world.ready(2, "b"), "b");
  exchange("b");
  CHECK_EQUAL(world.deliver(1, 0), "");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.deliver(2, 1), ""); // the reports of f and b: rank 1 lacks f, b is over
  CHECK_EQUAL(world.travelling(), 0U);
  // From now on what rank 2 lacks holds up nothing.
  CHECK_EQUAL(world.ready(0, "fb"), "");
  CHECK_EQUAL(world.ready(1, "fb"), "");
  CHECK_EQUAL(world.deliver(1, 0), "f");
  CHECK_EQUAL(world.deliver(0, 1), "f");
  CHECK_EQUAL(world.deliver(1, 2), "f");
  exchange("f");
  CHECK_EQUAL(world.ready(0, ""), "");
  CHECK_EQUAL(world.ready(2, "b"), "");
  CHECK_EQUAL(world.deliver(2, 1), "");
  CHECK_EQUAL(world.deliver(1, 0), "b");
  CHECK_EQUAL(world.deliver(0, 1), "b");
  CHECK_EQUAL(world.deliver(1, 2), "b");
  exchange("b");
  CHECK_EQUAL(world.empty(), 4U);
  // After 64 passes rank 2 asks to be heard no more; rank 1, which hears no child then, as well.
  for (int passes = 0; passes < HearingLimits{}.passesHeard; ++passes) {
    CHECK_EQUAL(world.empty(), 4U);
    for (const Rank rank : {0, 1, 2}) {
      CHECK_EQUAL(world.ready(rank, "a"), "");
    }
    CHECK_EQUAL(world.deliver(2, 1), "");
    CHECK_EQUAL(world.deliver(1, 0), "a");
    CHECK_EQUAL(world.deliver(0, 1), "a");
    CHECK_EQUAL(world.deliver(1, 2), "a");
    exchange("a");
  }
  CHECK_EQUAL(world.deliver(1, 2), ""); // the answer
  CHECK_EQUAL(world.deliver(1, 0), "");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.empty(), 8U);
  CHECK_EQUAL(world.ready(0, "a"), "a");
  CHECK_EQUAL(world.travelling(), 1U);
}

TEST(aPlanCountsHoldUpsOfTheSameSliceInEachStep) {
  World world(AgreementKind::kPlanned, 1, 4 * kUnit, "ab", 2);
  auto& planned = dynamic_cast<Planned&>(world.at(0));
  for (int step = 0; step < 3; ++step) {
    CHECK_EQUAL(world.ready(0, "b"), "");
    CHECK_EQUAL(world.ready(0, ""), ""); // still the same
    CHECK_EQUAL(planned.takeHoldUps(), 1U);
    CHECK_EQUAL(world.ready(0, "a"), "ab");
    CHECK_EQUAL(world.done(0, "ab"), "");
  }
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
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, leader->received(2, slices)), "rank 2");
  const auto follower = make(AgreementKind::kLeader, 1, Policy::kPriority);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, follower->received(1, slices)), "only rank 0");
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, follower->received(0, {})), "not asked");
  const auto planned = make(AgreementKind::kPlanned, 1, Policy::kPlanned);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, planned->received(0, slices)), "same agreement");
}

} // namespace hvd_order
