#pragma once

#include <deque>

#include "scheduler/agreement.h"

namespace hvd_order {

/// Every rank except 0 under AgreementKind::kLeader and kNegotiated. Issues slices in the order of
/// rank 0's decisions; waits for slices that are not ready on this rank and for its own credit.
///
/// A rank that is late by more than the transfer time of the bytes in flight delays all ranks:
/// slices that rank 0 has decided and this rank lacks take the credit, while slices that all ranks
/// have wait. After HearingLimits::holdUps such hold-ups in a backward pass, the follower asks
/// rank 0 to hear it (leader.h) and reports its ready slices for HearingLimits::passesHeard
/// backward passes. Then it stops reporting until the next hold-ups.
class Follower final : public Agreement {
 public:
  /// @param alwaysReports report ready slices from the start, as kNegotiated requires.
  Follower(Policy policy, ByteCount creditBytes, bool alwaysReports, HearingLimits hearing)
      : Agreement(policy, creditBytes),
        alwaysReports_(alwaysReports),
        hearing_(hearing),
        reports_(alwaysReports) {}

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;
  [[nodiscard]] std::optional<SliceKey> head() const override;
  [[nodiscard]] std::unique_ptr<Agreement> clone() const override {
    return std::make_unique<Follower>(*this);
  }
  void appendState(StateWords& words) const override;

 private:
  void answered();
  [[nodiscard]] bool holdsUp() const;
  [[nodiscard]] bool wantsChange() const;

  const bool alwaysReports_;
  const HearingLimits hearing_;
  std::deque<SliceKey> decided_;    // by rank 0, not yet issued on this rank
  std::vector<SliceKey> undecided_; // ready here but not decided, in order of readiness
  bool reports_;
  bool asked_ = false; // a request to change reports_ awaits rank 0's answer
  std::optional<SliceKey> heldUpBy_;
  int holdUps_ = 0;                // in this backward pass
  std::size_t decidedUnheard_ = 0; // leading elements of decided_ from before reports began
  int passes_ = 0;
  std::vector<SliceKey> unreported_;
};

} // namespace hvd_order
