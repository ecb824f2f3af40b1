#include "scheduler/agreement_sequence.h"

#include <utility>

#include "base/error.h"

// Changes the agreement in two ways.
//
// Between two steps nothing is under way and no model is registered, so a new agreement begins from
// nothing (`retune`). A plan may also end in the middle of a step, because a second model comes.
// Then its successor takes over the scheduler with all models and slices as they are, and handles
// the slices that are ready as if they had become ready now (Agreement::succeed).
//
// A rank changes as soon as it comes to the place, so messages of the next agreement may reach a
// rank that has not come there yet. They wait in `earlyMessages_`. Messages of the agreement
// before, such as a report that rank 0 no longer needs, arrive after the change and are dropped: no
// slice that they speak of is still to be decided.
//
// A successor that comes within `decide` decides at once: what it may issue need not wait for a
// further event. A plan sends no messages, so all messages that `decide` returns belong to
// `number_` also then.
//
// Invariant: `number_` is the number of changes, and all ranks make the same changes in the same
// order, so equal numbers mean the same agreement.

namespace hvd_order {

AgreementSequence::AgreementSequence(
    AgreementKind kind,
    Rank rank,
    int size,
    Policy policy,
    ByteCount creditBytes,
    int fanOut,
    HearingLimits hearing)
    : rank_(rank),
      size_(size),
      fanOut_(fanOut),
      hearing_(hearing),
      kind_(kind),
      current_(make(kind, policy, creditBytes)),
      planned_(dynamic_cast<Planned*>(current_.get())) {}

AgreementSequence::AgreementSequence(const AgreementSequence& other)
    : rank_(other.rank_),
      size_(other.size_),
      fanOut_(other.fanOut_),
      hearing_(other.hearing_),
      kind_(other.kind_),
      current_(other.current_->clone()),
      planned_(dynamic_cast<Planned*>(current_.get())),
      number_(other.number_),
      earlyMessages_(other.earlyMessages_),
      successor_(other.successor_) {}

std::unique_ptr<Agreement>
AgreementSequence::make(AgreementKind kind, Policy policy, ByteCount creditBytes) const {
  return Agreement::create(kind, rank_, size_, policy, creditBytes, fanOut_, hearing_);
}

void AgreementSequence::retune(AgreementKind kind, Policy policy, ByteCount creditBytes) {
  if (kind == kind_) {
    current_->retune(policy, creditBytes);
  } else if (current_->isEmpty()) {
    take(make(kind, policy, creditBytes), kind);
  } else {
    throw InvalidUsage("the agreement can change only while no model is registered");
  }
}

std::optional<std::uint64_t> AgreementSequence::holdPlan() {
  return planned_ ? std::optional(planned_->hold()) : std::nullopt;
}

void AgreementSequence::endPlan(std::uint64_t issued, AgreementKind kind, Policy policy) {
  HVDO_CHECK(planned_, "no order is planned");
  planned_->endAt(issued);
  successor_ = {kind, policy};
  changeIfPlanHasEnded();
}

std::uint64_t AgreementSequence::takeHoldUps() {
  return planned_ ? planned_->takeHoldUps() : 0;
}

void AgreementSequence::received(
    Rank from,
    std::uint32_t number,
    std::span<const SliceKey> slices) {
  if (number == number_) {
    current_->received(from, slices);
  } else if (number > number_) {
    earlyMessages_.push_back({from, number, {slices.begin(), slices.end()}});
  }
}

void AgreementSequence::decide(Decisions& out) {
  current_->decide(out);
  if (changeIfPlanHasEnded()) {
    current_->decide(out);
  }
}

bool AgreementSequence::changeIfPlanHasEnded() {
  if (!planned_ || !planned_->hasEnded()) {
    return false;
  }
  auto next = make(successor_->kind, successor_->policy, current_->scheduler().creditBytes());
  next->succeed(std::move(*planned_), successor_->policy);
  take(std::move(next), successor_->kind);
  return true;
}

void AgreementSequence::take(std::unique_ptr<Agreement> next, AgreementKind kind) {
  current_ = std::move(next);
  kind_ = kind;
  planned_ = dynamic_cast<Planned*>(current_.get());
  successor_.reset();
  ++number_;
  for (EarlyMessage& message : std::exchange(earlyMessages_, {})) {
    received(message.from, message.number, message.slices);
  }
}

void AgreementSequence::appendState(StateWords& words) const {
  current_->appendState(words);
  words.push_back(number_);
  words.push_back(successor_ ? 1 + static_cast<std::uint64_t>(successor_->kind) : 0);
  words.push_back(earlyMessages_.size());
  for (const EarlyMessage& message : earlyMessages_) {
    words.push_back(static_cast<std::uint64_t>(message.from));
    words.push_back(message.number);
    appendSlices(words, message.slices);
  }
}

} // namespace hvd_order
