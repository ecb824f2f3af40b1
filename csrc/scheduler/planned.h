#pragma once

#include "scheduler/agreement.h"

namespace hvd_order {

/// Every rank of AgreementKind::kPlanned: the plan is the agreement.
class Planned final : public Agreement {
 public:
  explicit Planned(ByteCount creditBytes) : Agreement(Policy::kPlanned, creditBytes) {}

  const std::vector<SliceKey>& tensorReady(TensorKey tensor) override;
  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] std::optional<SliceKey> head() const override {
    return scheduler_.turn();
  }
  [[nodiscard]] std::unique_ptr<Agreement> clone() const override {
    return std::make_unique<Planned>(*this);
  }
};

} // namespace hvd_order
