#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/agreement.h"
#include "scheduler/planned.h"

namespace hvd_order {

/// The agreements of one rank, one after the other. All ranks change them at the same places, but
/// not at the same time. Pure, like the agreements.
///
/// Messages carry the number of the agreement that they belong to. Those of an agreement that this
/// rank has given up are dropped; those of one that it has yet to take up wait.
class AgreementSequence final {
 public:
  /// Same as Agreement::create.
  AgreementSequence(
      AgreementKind kind,
      Rank rank,
      int size,
      Policy policy,
      ByteCount creditBytes,
      int fanOut = kFanOut,
      HearingLimits hearing = {});
  AgreementSequence(const AgreementSequence& other);
  AgreementSequence& operator=(const AgreementSequence&) = delete;

  [[nodiscard]] Agreement& current() const {
    return *current_;
  }
  /// Number of changes so far; messages that `decide` returns belong to it.
  [[nodiscard]] std::uint32_t number() const {
    return number_;
  }

  /// Changes agreement, policy and credit between two steps.
  /// @throws InvalidUsage if the agreement changes while models are registered, and the errors of
  ///   Scheduler::retune.
  void retune(AgreementKind kind, Policy policy, ByteCount creditBytes);

  /// Same as Planned::hold; none if no order is planned.
  std::optional<std::uint64_t> holdPlan();
  /// Follows the plan until so many slices have been issued, the most that `holdPlan` has returned
  /// on any rank, then `kind`. Models without a plan can be added from now on; they wait for that.
  void endPlan(std::uint64_t issued, AgreementKind kind, Policy policy);
  /// Same as Planned::takeHoldUps; 0 if no order is planned.
  std::uint64_t takeHoldUps();

  /// Handles a message from rank `from` that belongs to agreement `number`.
  void received(Rank from, std::uint32_t number, std::span<const SliceKey> slices);
  /// Same as Agreement::decide.
  void decide(Decisions& out);

  /// Same as Agreement::appendState.
  void appendState(StateWords& words) const;

 private:
  struct EarlyMessage {
    Rank from;
    std::uint32_t number;
    std::vector<SliceKey> slices;
  };
  struct Successor {
    AgreementKind kind;
    Policy policy;
  };

  [[nodiscard]] std::unique_ptr<Agreement>
  make(AgreementKind kind, Policy policy, ByteCount creditBytes) const;
  void take(std::unique_ptr<Agreement> next, AgreementKind kind);
  /// @return whether it has.
  bool changeIfPlanHasEnded();

  Rank rank_;
  int size_;
  int fanOut_;
  HearingLimits hearing_;
  AgreementKind kind_;
  std::unique_ptr<Agreement> current_;
  Planned* planned_; // current_, if its order is planned
  std::uint32_t number_ = 0;
  std::vector<EarlyMessage> earlyMessages_;
  std::optional<Successor> successor_; // of a plan that ends
};

} // namespace hvd_order
