#pragma once

#include <deque>

#include "scheduler/agreement.h"
#include "scheduler/subtree.h"

namespace hvd_order {

/// Every rank except 0 under AgreementKind::kLeader and kNegotiated. Issues slices in the order of
/// rank 0's decisions; waits for slices that are not ready on this rank and for its own credit.
/// Decisions come from its parent in the tree and go on to its children.
///
/// A rank that is late by more than the transfer time of the bytes in flight delays all ranks:
/// slices that rank 0 has decided and this rank lacks take the credit, while slices that all ranks
/// have wait. After kHoldUps such hold-ups in a backward pass, the follower asks its parent to hear
/// it (subtree.h) and reports its ready slices for kPassesHeard backward passes. Then it stops
/// reporting until the next hold-ups. A follower that hears a child asks as well, and reports until
/// it hears no child.
class Follower final : public Agreement {
 public:
  static constexpr int kHoldUps = 3;
  static constexpr int kPassesHeard = 64;

  /// @param alwaysReports report ready slices from the start, as kNegotiated requires.
  Follower(
      Rank rank,
      int size,
      int fanOut,
      Policy policy,
      ByteCount creditBytes,
      bool alwaysReports);

  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;
  [[nodiscard]] std::optional<SliceKey> head() const override;

 private:
  void sliceReady(SliceKey slice) override;
  void decided(std::span<const SliceKey> slices);
  void answered();
  [[nodiscard]] bool holdsUp() const;
  [[nodiscard]] bool wantsChange() const;

  Subtree subtree_;
  const bool alwaysReports_;
  std::deque<SliceKey> decided_;    // by rank 0, not yet issued on this rank
  std::vector<SliceKey> undecided_; // ready here but not decided, in order of readiness
  bool asked_ = false;              // a request to start or stop reports awaits the parent's answer
  std::optional<SliceKey> heldUpBy_;
  int holdUps_ = 0; // in this backward pass
  int passes_ = 0;  // since reports began or ended
  std::vector<SliceKey> unreported_;
};

} // namespace hvd_order
