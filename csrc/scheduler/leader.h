#pragma once

#include "scheduler/agreement.h"
#include "scheduler/subtree.h"

namespace hvd_order {

/// Rank 0 under AgreementKind::kLeader and kNegotiated. Issues the most urgent of the slices that
/// are ready on rank 0 and on every rank it *hears*, and sends its decisions down the tree. It
/// assumes that a slice is ready, or soon will be, on ranks that it does not hear (subtree.h).
class Leader final : public Agreement {
 public:
  /// @param hearsAll hear all ranks from the start, without a request, as kNegotiated requires.
  Leader(int size, int fanOut, Policy policy, ByteCount creditBytes, bool hearsAll);

  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] bool mayDecide() const override;

 private:
  void sliceReady(SliceKey slice) override;
  void offerComplete();

  Subtree subtree_;
  std::vector<SliceKey> complete_; // to be offered; a member to avoid allocations
};

} // namespace hvd_order
