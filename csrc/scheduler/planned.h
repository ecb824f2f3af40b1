#pragma once

#include <cstdint>
#include <limits>

#include "scheduler/agreement.h"

namespace hvd_order {

/// Every rank of AgreementKind::kPlanned: the plan is the agreement.
///
/// To leave the plan in the middle of a step, all ranks call `hold`, tell each other the returned
/// numbers, and call `endAt` with the largest. Once it `hasEnded`, another agreement succeeds it
/// (agreement_sequence.h).
class Planned final : public Agreement {
 public:
  explicit Planned(ByteCount creditBytes) : Agreement(Policy::kPlanned, creditBytes) {}

  /// Issues no further slice. @return the number of slices issued so far.
  std::uint64_t hold();
  /// Ends the plan after so many slices in all, at least as many as `hold` returned.
  void endAt(std::uint64_t issued);
  [[nodiscard]] bool hasEnded() const {
    return ending_ && issued_ == limit_;
  }
  /// The number of times since the last call that this rank held up the others: the slice whose
  /// turn it was lacked here, while nothing was in flight and another slice was ready.
  std::uint64_t takeHoldUps();

  void received(Rank from, std::span<const SliceKey> slices) override;
  void decide(Decisions& out) override;
  [[nodiscard]] std::optional<SliceKey> head() const override {
    return scheduler_.turn();
  }
  [[nodiscard]] bool isSilent() const override {
    return true;
  }
  [[nodiscard]] std::unique_ptr<Agreement> clone() const override {
    return std::make_unique<Planned>(*this);
  }
  void appendState(StateWords& words) const override;

 private:
  void sliceReady(SliceKey slice) override;

  std::uint64_t issued_ = 0;
  std::uint64_t limit_ = std::numeric_limits<std::uint64_t>::max(); // of issued_
  bool ending_ = false;
  std::uint64_t offered_ = 0; // ready slices whose turn has not come
  std::optional<SliceKey> heldUpBy_;
  std::uint64_t holdUps_ = 0;
};

} // namespace hvd_order
