#include "scheduler/agreement.h"

#include <algorithm>
#include <cctype>
#include <random>
#include <set>

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

const std::string kTensors = "hgfedcba"; // as backward makes them

/// Some ranks, which make a tensor ready only when rank 0 is ahead by so many slices.
struct Late {
  std::set<Rank> ranks;
  int slices;
};

/// Training steps in which everything happens in a random order.
///
/// Slice i is tensor i; a slice is done, on one rank after the other, when all have issued it.
class RandomTraining {
 public:
  /// @param credit in slices.
  RandomTraining(
      AgreementKind kind,
      int size,
      unsigned seed,
      Late late,
      std::size_t credit = 2,
      int fanOut = kFanOut,
      bool split = false)
      : world_(
            kind,
            size,
            static_cast<ByteCount>(credit) * kUnit,
            "",
            static_cast<int>(kTensors.size()),
            fanOut,
            split),
        tensors_(split ? "#" + kTensors : kTensors), // a step begins with the squares
        slices_(letters(*layout(static_cast<int>(kTensors.size()), split))),
        size_(size),
        fanOut_(fanOut),
        credit_(credit),
        random_(seed),
        late_(std::move(late)),
        ready_(static_cast<std::size_t>(size)),
        issued_(static_cast<std::size_t>(size)),
        done_(static_cast<std::size_t>(size), 0) {}

  /// Every tensor becomes ready once and is summed once, in an order of its own on each rank.
  void step(int number) {
    for (std::string& tensors : ready_) {
      tensors = tensors_;
      if (number % 3 == 0) {
        std::shuffle(tensors.begin(), tensors.end(), random_);
      }
    }
    const std::size_t total = slices_.size() * static_cast<std::size_t>(number + 1);
    for (int event = 0; std::ranges::any_of(done_, [=](auto n) { return n < total; }); ++event) {
      CHECK(event < 20000 * size_); // nothing hangs
      const auto rank = static_cast<Rank>(random_() % issued_.size());
      switch (random_() % 3) {
        case 0:
          makeReady(rank);
          break;
        case 1:
          note(rank, world_.deliver(neighbour(rank), rank));
          break;
        default:
          finish(rank);
      }
    }
  }

  /// All ranks issued the same, each slice once a step.
  void check(int steps) const {
    for (const std::string& issued : issued_) {
      CHECK_EQUAL(issued, issued_[0]);
    }
    for (const char slice : slices_) {
      CHECK_EQUAL(std::ranges::count(issued_[0], slice), steps);
    }
  }

  std::size_t empty() const {
    return world_.empty();
  }

 private:
  Rank neighbour(Rank rank) {
    const TreePlace place = placeInTree(rank, size_, fanOut_);
    const int first = rank == 0 ? 1 : 0; // rank 0 has no parent
    const int choice =
        first + static_cast<int>(random_() % static_cast<unsigned>(place.children + 1 - first));
    return choice == 0 ? place.parent : place.firstChild + choice - 1;
  }

  void makeReady(Rank rank) {
    const auto at = static_cast<std::size_t>(rank);
    const auto lead = static_cast<int>(ready_[at].size()) - static_cast<int>(ready_[0].size());
    if (ready_[at].empty() ||
        (late_.ranks.contains(rank) && !ready_[0].empty() && lead < late_.slices)) {
      return;
    }
    const std::string tensor = ready_[at].substr(0, 1);
    ready_[at].erase(0, 1);
    note(rank, world_.ready(rank, tensor));
  }

  void finish(Rank rank) {
    const auto at = static_cast<std::size_t>(rank);
    const std::size_t next = done_[at];
    if (std::ranges::all_of(issued_, [=](const std::string& s) { return s.size() > next; })) {
      ++done_[at];
      note(rank, world_.done(rank, issued_[at].substr(next, 1)));
    }
  }

  void note(Rank rank, const std::string& issued) {
    const auto at = static_cast<std::size_t>(rank);
    const auto done = [&](char slice) {
      return std::count(issued_[at].begin(), issued_[at].begin() + endOf(done_[at]), slice);
    };
    for (const char slice : issued) {
      issued_[at] += slice;
      const auto times = std::ranges::count(issued_[at], slice);
      for (const char sum : kTensors) { // each half and the squares wait for what is before them
        if (slice == '#' || slice == std::toupper(sum)) {
          CHECK_EQUAL(done(sum), times);
        }
      }
    }
    // Squares take no credit.
    const auto inFlight = std::count_if(
        issued_[at].begin() + endOf(done_[at]), issued_[at].end(),
        [](char slice) { return slice != '#'; });
    CHECK(static_cast<std::size_t>(inFlight) <= credit_);
  }

  static std::ptrdiff_t endOf(std::size_t count) {
    return static_cast<std::ptrdiff_t>(count);
  }

  World world_;
  const std::string tensors_; // in the order in which a backward pass makes them
  const std::string slices_;
  int size_;
  int fanOut_;
  std::size_t credit_;
  std::mt19937 random_;
  Late late_;
  std::vector<std::string> ready_; // by rank: tensors to come
  std::vector<std::string> issued_;
  std::vector<std::size_t> done_;
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

TEST(whateverTheTimingAllRanksIssueTheSame) {
  constexpr int kSteps = 400;
  std::size_t heard = 0;
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    for (const int size : {2, 3, 5}) {
      for (const int late : {0, 2, 4}) {
        RandomTraining training(kind, size, static_cast<unsigned>(10 * size + late), {{1}, late});
        for (int step = 0; step < kSteps; ++step) {
          training.step(step);
        }
        training.check(kSteps);
        CHECK(kind == AgreementKind::kLeader || training.empty() == 0);
        heard += training.empty();
      }
    }
  }
  CHECK(heard >= 8); // ranks were heard, and no more, and again
}

TEST(whateverTheTimingATreeOfRanksIssuesTheSame) {
  constexpr int kSteps = 100;
  struct Tree {
    int size;
    int fanOut;
    std::set<Rank> late; // in several subtrees, inner ranks and leaves
  };
  const std::vector<Tree> trees{{4, 1, {3}},      {4, 1, {1, 2, 3}},   {7, 2, {2, 3}},
                                {13, 3, {5, 12}}, {15, 2, {3, 9, 14}}, {20, 4, {1, 7, 19}}};
  std::size_t heard = 0;
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    for (const Tree& tree : trees) {
      for (const int late : {0, 4, 6}) {
        RandomTraining training(
            kind, tree.size, static_cast<unsigned>(10 * tree.size + late), {tree.late, late}, 4,
            tree.fanOut);
        for (int step = 0; step < kSteps; ++step) {
          training.step(step);
        }
        training.check(kSteps);
        CHECK(kind == AgreementKind::kLeader || training.empty() == 0);
        heard += training.empty();
      }
    }
  }
  CHECK(heard >= 100); // requests climbed, and ended, and began again
}

TEST(whateverTheTimingHalvesGoInOneOrder) {
  constexpr int kSteps = 60;
  struct Ranks {
    int size;
    int fanOut;
    std::set<Rank> late;
  };
  const std::vector<Ranks> all{{2, 4, {1}}, {3, 4, {1}}, {4, 1, {3}}, {7, 2, {2, 5}}};
  std::size_t heard = 0;
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    for (const Ranks& ranks : all) {
      for (const int late : {0, 4, 6}) {
        for (const std::size_t credit : {1, 3}) {
          RandomTraining training(
              kind, ranks.size, static_cast<unsigned>(10 * ranks.size + late), {ranks.late, late},
              credit, ranks.fanOut, true);
          for (int step = 0; step < kSteps; ++step) {
            training.step(step);
          }
          training.check(kSteps);
          heard += training.empty();
        }
      }
    }
  }
  CHECK(heard >= 20); // ranks were heard, and no more, and again
}

TEST(aGatherGoesWhenItsSumIsDoneOnTheRank) {
  // Rank 0 decides A when a is done there; on rank 1, a is still in flight.
  World world(AgreementKind::kLeader, 2, 4 * kUnit, "", 2, kFanOut, true);
  CHECK_EQUAL(world.ready(0, "#a"), "a");
  CHECK_EQUAL(world.ready(1, "#ba"), "");
  CHECK_EQUAL(world.deliver(0, 1), "a");
  CHECK_EQUAL(world.done(0, "a"), "A");
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.ready(0, "b"), "b");
  CHECK_EQUAL(world.deliver(0, 1), ""); // b is ready, but A comes first
  CHECK_EQUAL(world.done(1, "a"), "Ab");
  CHECK_EQUAL(world.done(0, "A"), "");
  CHECK_EQUAL(world.done(0, "b"), "#B"); // all sums: the squares are the most urgent
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.done(1, "b"), "#B");
  CHECK_EQUAL(world.done(1, "A"), "");
  CHECK_EQUAL(world.done(0, "#B"), "");
  CHECK_EQUAL(world.done(1, "B#"), "");
  CHECK(world.at(0).scheduler().idle(0) && world.at(1).scheduler().idle(0));
}

TEST(negotiationReportsHalvesWhenTheyAreReady) {
  World world(AgreementKind::kNegotiated, 2, 4 * kUnit, "", 1, kFanOut, true);
  for (int step = 0; step < 2; ++step) {
    CHECK_EQUAL(world.ready(0, "#a"), "");
    CHECK_EQUAL(world.ready(1, "#a"), "");
    CHECK_EQUAL(world.deliver(1, 0), "a");
    CHECK_EQUAL(world.deliver(0, 1), "a");
    CHECK_EQUAL(world.done(0, "a"), ""); // rank 1 has not reported A and the squares
    CHECK_EQUAL(world.deliver(1, 0), "");
    CHECK_EQUAL(world.done(1, "a"), "");
    CHECK_EQUAL(world.deliver(1, 0), "#A");
    CHECK_EQUAL(world.deliver(0, 1), "#A");
    CHECK_EQUAL(world.done(0, "#A"), "");
    CHECK_EQUAL(world.done(1, "#A"), "");
    CHECK_EQUAL(world.travelling(), 0U);
  }
}

TEST(aPlanOfHalvesNeedsNoMessages) {
  World world(AgreementKind::kPlanned, 2, 2 * kUnit, "baB#A", 2, kFanOut, true);
  for (int step = 0; step < 2; ++step) {
    CHECK_EQUAL(world.ready(0, "#ab"), "ba");
    CHECK_EQUAL(world.ready(1, "a"), "");
    CHECK_EQUAL(world.ready(1, "b#"), "ba");
    CHECK_EQUAL(world.done(0, "a"), ""); // A would fit, but it is the turn of B
    CHECK_EQUAL(world.done(0, "b"), "B#A");
    CHECK_EQUAL(world.done(1, "b"), "B"); // the squares wait for a
    CHECK_EQUAL(world.done(1, "a"), "#A");
    CHECK_EQUAL(world.done(0, "B#A"), "");
    CHECK_EQUAL(world.done(1, "#BA"), "");
  }
  CHECK_EQUAL(world.travelling(), 0U);
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

TEST(decisionsGoDownTheTree) {
  // A chain of three. Rank 1 passes on what it cannot issue yet.
  World world(AgreementKind::kLeader, 3, 4 * kUnit, "", 4, 1);
  CHECK_EQUAL(world.ready(2, "d"), "");
  CHECK_EQUAL(world.ready(0, "d"), "d");
  CHECK_EQUAL(world.travelling(), 1U);
  CHECK_EQUAL(world.deliver(0, 1), "");
  CHECK_EQUAL(world.deliver(1, 2), "d");
  CHECK_EQUAL(world.ready(1, "d"), "d");
  CHECK_EQUAL(world.travelling(), 0U);
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

TEST(negotiationMergesTheReportsOfASubtree) {
  // Ranks 1 and 2 are below 0, ranks 3 and 4 below 1, which reports what is ready on all three.
  World world(AgreementKind::kNegotiated, 5, 4 * kUnit, "", 4, 2);
  CHECK_EQUAL(world.ready(0, "abcd"), "");
  CHECK_EQUAL(world.ready(2, "abcd"), "");
  CHECK_EQUAL(world.ready(1, "dc"), "");
  CHECK_EQUAL(world.ready(3, "dcb"), "");
  CHECK_EQUAL(world.ready(4, "c"), "");
  CHECK_EQUAL(world.deliver(2, 0), "");
  CHECK_EQUAL(world.deliver(1, 0), ""); // nothing was sent
  CHECK_EQUAL(world.deliver(3, 1), "");
  CHECK_EQUAL(world.deliver(1, 0), "");
  CHECK_EQUAL(world.deliver(4, 1), "");
  CHECK_EQUAL(world.deliver(1, 0), "c");
  CHECK_EQUAL(world.ready(1, "b"), "");
  CHECK_EQUAL(world.ready(4, "b"), "");
  CHECK_EQUAL(world.deliver(4, 1), "");
  CHECK_EQUAL(world.deliver(1, 0), "b");
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
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, leader->received(2, slices)), "rank 2");
  const auto follower = make(AgreementKind::kLeader, 1, Policy::kPriority);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, follower->received(1, slices)), "only rank 0");
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, follower->received(0, {})), "not asked");
  const auto planned = make(AgreementKind::kPlanned, 1, Policy::kPlanned);
  CHECK_CONTAINS(CHECK_THROWS(BrokenInvariant, planned->received(0, slices)), "same agreement");
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
