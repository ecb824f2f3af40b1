#include "setups.h"

#include <algorithm>
#include <sstream>
#include <utility>

// What is explored. A setup is small in everything, but all kinds of things meet in some setup.
// Names say it: leader-priority-3r-ab-2s-c1 has 3 ranks, slices a and b, 2 steps, and a credit of
// one slice.

namespace hvd_order::checker {

namespace {

using enum AgreementKind;

const TensorSet kOne{{1}, 1, {0}};
const TensorSet kTwo{{1, 1}, 1, {1, 0}};
const TensorSet kThree{{1, 1, 1}, 1, {2, 0, 1}};
const TensorSet kFour{{1, 1, 1, 1}, 1, {1, 3, 0, 2}};
const TensorSet kParts{{1, 2}, 1, {1, 2, 0}};    // b in two slices
const TensorSet kFused{{2, 1, 1}, 2, {1, 0}};    // b and c in one slice
const TensorSet kUneven{{1, 2}, 2, {1, 0}};      // a half as large as b
const TensorSet kMixed{{4, 1, 1}, 2, {0, 2, 1}}; // a in two slices, b and c in one
// All-reduces are split: slice 0 is the squares, then come the sums, then the parts.
const TensorSet kSplitOne{{1}, 1, {1, 2, 0}, true};
const TensorSet kSplitTwo{{1, 1}, 1, {2, 4, 1, 0, 3}, true};
const TensorSet kSplitThree{{1, 1, 1}, 1, {3, 1, 4, 2, 6, 0, 5}, true};
const TensorSet kSplitParts{{2}, 1, {2, 1, 4, 0, 3}, true};
const TensorSet kSplitFused{{2, 1, 1}, 2, {2, 1, 0, 3, 4}, true};

std::string nameOf(const Setup& setup) {
  std::ostringstream name;
  const char* const agreements[] = {"leader", "negotiated", "planned"};
  name << agreements[static_cast<int>(setup.agreement)];
  if (setup.agreement != kPlanned) {
    name << (setup.policy == Policy::kArrival ? "-arrival" : "-priority");
  }
  name << '-' << setup.ranks << 'r';
  if (setup.fanOut != kFanOut) {
    name << "-fan" << setup.fanOut;
  }
  for (const TensorSet& model : setup.models) {
    name << '-';
    char letter = 'a';
    for (const int units : model.tensorUnits) {
      name << letter++;
      if (units > model.sliceUnits) {
        name << units / model.sliceUnits; // slices of this tensor
      }
    }
    if (model.sliceUnits > 1 && model.tensorUnits.back() < model.sliceUnits) {
      name << "-fused";
    }
    if (model.tensorUnits.front() < model.sliceUnits) {
      name << "-uneven";
    }
    name << (model.split ? "-split" : "");
  }
  name << '-' << setup.steps << "s-c" << setup.creditUnits / setup.models[0].sliceUnits;
  if (setup.hearing.holdUps != 1 || setup.hearing.passesHeard != 1) {
    name << "-hear" << setup.hearing.holdUps << '.' << setup.hearing.passesHeard;
  }
  name << (setup.wholeSteps ? "-whole" : "") << (setup.decidesLater ? "-later" : "")
       << (setup.reserves ? "-reserves" : "") << (setup.leavesPlan ? "-leaves" : "");
  if (setup.retuned) {
    name << "-retuned" << setup.retuned->creditUnits;
  }
  for (const Rank rank : setup.registerLater) {
    name << "-joins" << rank;
  }
  if (setup.dies) {
    name << "-dies" << *setup.dies;
  }
  if (setup.lags) {
    name << "-lags" << *setup.lags;
  }
  return name.str();
}

int roughSize(const Setup& setup) {
  int tensors = 0;
  for (const TensorSet& model : setup.models) {
    tensors += static_cast<int>(model.tensorUnits.size()) + (model.split ? 1 : 0); // the squares
  }
  return setup.ranks * tensors * setup.steps;
}

class Setups final {
 public:
  /// Adds a setup with each credit, of one and two slices.
  void add(AgreementKind kind, const Setup& setup) {
    for (const int slices : {1, 2}) {
      Setup copy = setup;
      copy.agreement = kind;
      copy.policy = kind == kPlanned ? Policy::kPlanned : setup.policy;
      copy.creditUnits = slices * setup.models[0].sliceUnits;
      for (TensorSet& model : copy.models) {
        model.plan = kind == kPlanned ? model.plan : std::vector<SliceIndex>{};
      }
      if (setup.leavesPlan) {
        copy.models.back().plan.clear();
      }
      copy.name = nameOf(copy);
      list_.push_back(std::move(copy));
    }
  }

  /// Adds a setup with both policies.
  void addPolicies(AgreementKind kind, Setup setup) {
    for (const Policy policy : {Policy::kPriority, Policy::kArrival}) {
      setup.policy = policy;
      add(kind, setup);
    }
  }

  /// @return all, the smaller ones first.
  std::vector<Setup> take() {
    std::ranges::stable_sort(list_, {}, roughSize);
    return std::exchange(list_, {});
  }

 private:
  std::vector<Setup> list_;
};

/// All-reduces are split: slices also become ready by the ends of others on their rank.
void addQuickSplits(Setups& all) {
  for (const AgreementKind kind : {kLeader, kNegotiated}) {
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitOne}});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitTwo}});
    all.addPolicies(kind, {.ranks = 2, .models = {kSplitOne}});
    all.addPolicies(kind, {.ranks = 2, .models = {kSplitTwo}});
    all.addPolicies(kind, {.ranks = 3, .models = {kSplitOne}});
    all.add(kind, {.ranks = 2, .models = {kSplitParts}});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitFused}});
    all.add(kind, {.ranks = 3, .fanOut = 1, .steps = 1, .models = {kSplitOne}});
    for (const Rank rank : {0, 1}) {
      all.add(kind, {.ranks = 2, .steps = 1, .models = {kOne, kSplitOne}, .registerLater = {rank}});
      all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitTwo}, .dies = rank});
    }
    all.add(
        kind,
        {.ranks = 2,
         .models = {kSplitTwo},
         .wholeSteps = true,
         .retuned = Setup::Retuned{Policy::kArrival, 2}});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitFused}, .reserves = true});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kSplitTwo}, .decidesLater = true});
    all.add(kind, {.ranks = 2, .steps = 3, .models = {kSplitTwo}, .lags = 1});
    all.add(kind, {.ranks = 3, .models = {kSplitTwo}, .lags = 2});
  }
  for (const TensorSet& model : {kSplitOne, kSplitTwo, kSplitParts, kSplitFused}) {
    all.add(kPlanned, {.ranks = 2, .models = {model}});
  }
  all.add(kPlanned, {.ranks = 3, .models = {kSplitTwo}});
  all.add(kPlanned, {.ranks = 3, .models = {kSplitTwo}, .lags = 2});
  all.add(kPlanned, {.ranks = 2, .steps = 1, .models = {kSplitOne, kOne}, .leavesPlan = true});
}

void addLargeSplits(Setups& all) {
  for (const AgreementKind kind : {kLeader, kNegotiated}) {
    all.addPolicies(kind, {.ranks = 3, .steps = 1, .models = {kSplitTwo}});
    all.add(kind, {.ranks = 3, .models = {kSplitTwo}});
    all.add(kind, {.ranks = 3, .fanOut = 1, .steps = 1, .models = {kSplitTwo}});
    all.add(kind, {.ranks = 2, .models = {kSplitThree}});
    all.add(kind, {.ranks = 2, .models = {kSplitFused}});
    all.add(kind, {.ranks = 4, .models = {kSplitOne}});
    all.add(kind, {.ranks = 3, .steps = 1, .models = {kSplitTwo}, .dies = 1});
    all.add(kind, {.ranks = 2, .models = {kSplitTwo}, .decidesLater = true});
  }
  all.add(kNegotiated, {.ranks = 3, .models = {kSplitThree}, .lags = 2});
  all.add(kPlanned, {.ranks = 3, .models = {kSplitThree}});
  all.add(kPlanned, {.ranks = 2, .models = {kSplitOne, kOne}, .leavesPlan = true});
  for (const TensorSet& model : {kSplitOne, kSplitTwo}) {
    all.add(
        kPlanned,
        {.ranks = model.tensorUnits.size() == 1 ? 3 : 2,
         .steps = 1,
         .models = {model, kOne},
         .leavesPlan = true});
  }
}

} // namespace

std::vector<Setup> quickSetups() {
  Setups all;
  for (const AgreementKind kind : {kLeader, kNegotiated}) {
    all.addPolicies(kind, {.ranks = 2, .models = {kTwo}});
    all.addPolicies(kind, {.ranks = 2, .models = {kThree}, .wholeSteps = true});
    all.addPolicies(kind, {.ranks = 3, .models = {kTwo}, .wholeSteps = true});
    all.add(kind, {.ranks = 2, .models = {kParts}});
    all.add(kind, {.ranks = 2, .models = {kFused}});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kMixed}});
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kFour}});
    all.add(kind, {.ranks = 4, .steps = 1, .models = {kTwo}});
    // Ranks below others in the tree: a chain, and rank 3 below rank 1.
    all.add(kind, {.ranks = 3, .fanOut = 1, .steps = 1, .models = {kTwo}});
    all.add(kind, {.ranks = 4, .fanOut = 2, .steps = 1, .models = {kTwo}});
    // Models registered at other times on other ranks.
    for (const Rank rank : {0, 1}) {
      all.add(kind, {.ranks = 2, .steps = 1, .models = {kTwo, kOne}, .registerLater = {rank}});
      all.add(kind, {.ranks = 2, .models = {kOne, kOne}, .registerLater = {rank}});
    }
    all.add(kind, {.ranks = 3, .steps = 1, .models = {kTwo}, .registerLater = {0, 1, 2}});
    // Slices of two sizes; a reservation; another policy and credit.
    all.add(kind, {.ranks = 2, .models = {kUneven}, .reserves = true});
    all.add(kind, {.ranks = 3, .steps = 1, .models = {kUneven}, .reserves = true});
    for (const int credit : {1, 2}) {
      all.add(
          kind,
          {.ranks = 2,
           .models = {kThree},
           .wholeSteps = true,
           .retuned = Setup::Retuned{Policy::kArrival, credit}});
    }
    // A rank that dies.
    for (const Rank rank : {0, 1}) {
      all.add(kind, {.ranks = 3, .steps = 1, .models = {kTwo}, .dies = rank});
    }
    // Ranks that decide late; a late rank.
    all.add(kind, {.ranks = 2, .models = {kTwo}, .decidesLater = true});
    all.add(kind, {.ranks = 2, .steps = 3, .models = {kThree}, .lags = 1});
    all.add(kind, {.ranks = 3, .steps = 2, .models = {kTwo}, .lags = 2});
  }
  // Ranks that are heard for longer, and that bear more.
  all.add(kLeader, {.ranks = 2, .steps = 3, .models = {kTwo}, .hearing = {1, 2}});
  all.add(kLeader, {.ranks = 2, .steps = 3, .models = {kTwo}, .hearing = {2, 1}});
  all.add(
      kLeader, {.ranks = 2, .steps = 4, .models = {kTwo}, .hearing = {1, 3}, .wholeSteps = true});
  for (const TensorSet& model : {kThree, kParts, kFused, kMixed}) {
    all.add(kPlanned, {.ranks = 2, .models = {model}});
  }
  all.add(kPlanned, {.ranks = 2, .models = {kTwo}, .dies = 1});
  all.add(kPlanned, {.ranks = 3, .steps = 2, .models = {kThree}});
  all.add(kPlanned, {.ranks = 4, .steps = 2, .models = {kTwo}, .registerLater = {3}});
  // Ranks that leave the plan, each where it is.
  for (const TensorSet& model : {kOne, kTwo}) {
    all.add(kPlanned, {.ranks = 2, .models = {model, kOne}, .leavesPlan = true});
  }
  addQuickSplits(all);
  return all.take();
}

std::vector<Setup> largeSetups() {
  Setups all;
  for (const AgreementKind kind : {kLeader, kNegotiated}) {
    all.addPolicies(kind, {.ranks = 2, .models = {kThree}});
    all.addPolicies(kind, {.ranks = 3, .models = {kTwo}});
    all.addPolicies(kind, {.ranks = 3, .steps = 1, .models = {kThree}});
    all.add(kind, {.ranks = 3, .fanOut = 1, .models = {kTwo}, .wholeSteps = true});
    all.add(kind, {.ranks = 3, .fanOut = 1, .steps = 3, .models = {kTwo}, .lags = 2});
    all.add(kind, {.ranks = 4, .fanOut = 1, .models = {kOne}});
    all.add(kind, {.ranks = 2, .models = {kMixed}});
    all.add(kind, {.ranks = 3, .steps = 1, .models = {kParts}});
    all.add(kind, {.ranks = 4, .models = {kTwo}, .wholeSteps = true});
    for (const Rank rank : {0, 1}) {
      all.add(kind, {.ranks = 2, .models = {kTwo, kOne}, .registerLater = {rank}});
      all.add(kind, {.ranks = 3, .steps = 1, .models = {kThree}, .dies = rank});
    }
    all.add(kind, {.ranks = 2, .steps = 1, .models = {kThree}, .decidesLater = true});
    all.add(kind, {.ranks = 2, .steps = 3, .models = {kFour}, .lags = 1});
    all.add(kind, {.ranks = 3, .models = {kThree}, .lags = 1});
  }
  all.add(
      kLeader, {.ranks = 2, .steps = 3, .models = {kThree}, .hearing = {2, 2}, .wholeSteps = true});
  all.add(kNegotiated, {.ranks = 2, .models = {kFour}});
  all.add(kNegotiated, {.ranks = 3, .models = {kThree}});
  all.add(kPlanned, {.ranks = 3, .models = {kFour}});
  all.add(kPlanned, {.ranks = 4, .models = {kThree}});
  all.add(kPlanned, {.ranks = 2, .models = {kParts, kOne}, .leavesPlan = true});
  all.add(kPlanned, {.ranks = 3, .steps = 1, .models = {kTwo, kOne}, .leavesPlan = true});
  all.add(
      kPlanned,
      {.ranks = 3, .fanOut = 1, .models = {kOne, kOne}, .wholeSteps = true, .leavesPlan = true});
  all.add(kPlanned, {.ranks = 2, .models = {kOne, kOne}, .leavesPlan = true, .decidesLater = true});
  addLargeSplits(all);
  return all.take();
}

} // namespace hvd_order::checker
