#pragma once

#include <deque>

#include "scheduler/agreement.h"

namespace hvd_order {

/// Rank 0 of AgreementKind::kLeader: issues what is most urgent among the slices ready here and
/// tells everybody.
class Leader : public Agreement {
 public:
  Leader(int size, Policy policy, ByteCount creditBytes)
      : Agreement(policy, creditBytes), size_(size) {}

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;

 private:
  int size_;
};

/// Any other rank: issues in the order in which rank 0's decisions came, waiting for slices that
/// are not ready here yet and for its own credit.
class Follower : public Agreement {
 public:
  Follower(Policy policy, ByteCount creditBytes) : Agreement(policy, creditBytes) {}

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;
  [[nodiscard]] std::optional<SliceKey> head() const override;

 private:
  std::deque<SliceKey> decided_; // by rank 0, not yet issued here
};

} // namespace hvd_order
