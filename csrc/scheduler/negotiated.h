#pragma once

#include "scheduler/leader.h"

namespace hvd_order {

/// Rank 0 of AgreementKind::kNegotiated: a leader whose candidates are the slices that every rank
/// has reported ready. No rank ever waits at the head of its queue for a slice it does not have.
class Negotiator final : public Leader {
 public:
  Negotiator(int size, Policy policy, ByteCount creditBytes)
      : Leader(size, policy, creditBytes), size_(size) {}

  void addModel(
      ModelId model,
      std::shared_ptr<const SliceLayout> layout,
      std::vector<SliceIndex> plan) override;
  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;

 private:
  void count(SliceKey slice);

  int size_;
  std::vector<std::vector<int>> reports_; // by model and slice: ranks that have it ready
  std::vector<SliceKey> early_;           // reported for models not registered here yet
};

/// Any other rank: a follower that reports what became ready.
class Negotiating final : public Follower {
 public:
  using Follower::Follower;

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override {
    return true; // there is something to report
  }

 private:
  std::vector<SliceKey> unreported_;
};

} // namespace hvd_order
