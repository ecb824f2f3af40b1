#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "scheduler/agreement_sequence.h"

namespace hvd_order::checker {

/// Sizes of tensors, slices and credits are given in units.
inline constexpr ByteCount kUnit = SliceLayout::kCutAlignment;

inline constexpr int kMaxRanks = 5;

/// Tensors that are registered together.
struct TensorSet {
  std::vector<int> tensorUnits; ///< by tensor, in consumption order
  int sliceUnits = 1;
  std::vector<SliceIndex> plan; ///< for Policy::kPlanned only
  bool split = false;           ///< see SliceLayout
};

/// What is explored: ranks, what they exchange, and what may happen beside that.
struct Setup {
  std::string name;
  AgreementKind agreement = AgreementKind::kLeader;
  Policy policy = Policy::kPriority;
  int ranks = 2;
  int fanOut = kFanOut; ///< of the tree of ranks
  int steps = 2;
  int creditUnits = 1;
  std::vector<TensorSet> models;
  HearingLimits hearing = {.holdUps = 1, .passesHeard = 1};

  /// A tensor becomes ready again only when the whole model has been exchanged, not as soon as the
  /// tensor has.
  bool wholeSteps = false;
  /// Ranks that register the last model at any time; the other ranks have all models at once.
  std::set<Rank> registerLater;
  /// Rank 0 makes a link reservation at any time, and ends it at any time: meanwhile only slices of
  /// one unit start.
  bool reserves = false;
  /// Policy and credit from the second step on; needs `wholeSteps`, because ranks change both
  /// between two steps.
  struct Retuned {
    Policy policy;
    int creditUnits;
  };
  std::optional<Retuned> retuned;
  /// All ranks leave the plan for kLeader, each at any time, in the middle of a step or not. Then
  /// they register the last model, which has no plan.
  bool leavesPlan = false;
  /// A rank whose events stop at any time.
  std::optional<Rank> dies;
  /// A rank whose tensors become ready only when nothing else can happen.
  std::optional<Rank> lags;
  /// Every rank decides at any time after an event, as the engine does while another thread has
  /// the processor; otherwise at once.
  bool decidesLater = false;
};

} // namespace hvd_order::checker
