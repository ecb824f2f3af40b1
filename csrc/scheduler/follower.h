#pragma once

#include <deque>

#include "scheduler/agreement.h"

namespace hvd_order {

/// Any other rank than 0 of AgreementKind::kLeader and kNegotiated: issues in the order in which
/// rank 0's decisions came, waiting for slices that are not ready here yet and for its own credit.
///
/// A rank that is late by more than what is in flight takes holds up all others so: what rank 0 has
/// decided and this rank does not have takes the credit, while slices that all have wait. When that
/// happens kHoldUps times in a backward pass, it asks rank 0 to be heard (leader.h) and reports
/// what is ready here, for kPassesHeard passes; then it tries again without.
class Follower final : public Agreement {
 public:
  static constexpr int kHoldUps = 3;
  static constexpr int kPassesHeard = 64;

  /// @param alwaysReports and rank 0 hears all ranks: kNegotiated.
  Follower(Policy policy, ByteCount creditBytes, bool alwaysReports)
      : Agreement(policy, creditBytes), alwaysReports_(alwaysReports), reports_(alwaysReports) {}

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;
  [[nodiscard]] std::optional<SliceKey> head() const override;

 private:
  void answered();
  [[nodiscard]] bool holdsUp() const;
  [[nodiscard]] bool wantsChange() const;

  const bool alwaysReports_;
  std::deque<SliceKey> decided_;    // by rank 0, not yet issued here
  std::vector<SliceKey> undecided_; // ready here, in the order in which they became so
  bool reports_;
  bool asked_ = false; // rank 0, to change that
  std::optional<SliceKey> heldUpBy_;
  int holdUps_ = 0;                // in this pass
  std::size_t decidedUnheard_ = 0; // of decided_, from the front: from before it began to hear
  int passes_ = 0;
  std::vector<SliceKey> unreported_;
};

} // namespace hvd_order
