#include "planning/network/all_reduce.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/error.h"

// A slice's path through this file:
// - `ready` marks its tensors in the agreement halves of the device.
// - `drive` asks one half for decisions, posts its messages and counts its issues. A half sends
//   its messages one after the other (`post`), and issues without waiting for that.
// - A slice that all halves have issued takes a lane of the transport (`startWaiting`), waits for
//   its latency, and becomes a flow on the link (`carry`).
// - `flowEnded` returns the credit on all halves, reports arrivals to the devices (`done`), and
//   drives all halves.
//
// In this file a half is a rank's half of the agreement, not one of a split all-reduce.
//
// There is one link, since a ring or tree uses every rank's link, in both directions, at the same
// time. A flow's work is the time for which it alone occupies the link.
//
// Invariant: slices take lanes in the order in which the last half issued them, which is the
// agreed order, and at most `lanes` slices have a lane (0: no limit).

namespace hvd_order::simulate {

namespace {

void check(const AllReduceCost& cost) {
  for (const double number :
       {cost.latencyS, cost.sliceCostS, cost.secondsPerByte, cost.sentPerByte}) {
    if (!std::isfinite(number) || number < 0) {
      throw InvalidUsage(concat("an all-reduce with a cost of ", number, "; at least 0 is needed"));
    }
  }
}

} // namespace

AllReduce::AllReduce(
    std::shared_ptr<const SliceLayout> layout,
    const AllReduceOptions& options,
    const AllReduceCost& cost,
    const Roles& roles,
    Clock& clock,
    std::vector<Device>& devices)
    : layout_(std::move(layout)),
      options_(options),
      clock_(clock),
      devices_(devices),
      rounds_(layout_->slices().size()),
      cost_(cost),
      splitCost_(halfOf(cost)),
      halvesOf_(roles.slowness.size()),
      issues_(layout_->slices().size()),
      waiting_(layout_->slices().size()) {
  check(cost);
  const std::size_t recorded = options.steps - std::min(options.recordFrom, options.steps);
  records_.resize(recorded * layout_->slices().size());
  reservation_.addModel(kModel, *layout_);
  reservation_.retune(
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::duration<double>(options.reservationLeadS)),
      options.creditBytes);
  const auto size = static_cast<int>(roles.agreements.size());
  for (Rank rank = 0; rank < size; ++rank) {
    const DeviceIndex device = roles.agreements[static_cast<std::size_t>(rank)];
    auto agreement = Agreement::create(
        options.agreement, rank, size, options.policy, options.creditBytes, options.fanOut);
    agreement->addModel(kModel, layout_, options.plan);
    if (layout_->isSplit()) {
      agreement->tensorReady({kModel, layout_->squaresTensor()}); // see `done`
    }
    halves_.push_back({std::move(agreement), device, halvesOf_[device].empty()});
    halvesOf_[device].push_back(halves_.size() - 1);
  }
  agreementTraffic_.resize(halves_.size());
}

void AllReduce::ready(DeviceIndex device, const std::vector<TensorId>& tensors) {
  for (const std::size_t half : halvesOf_[device]) {
    for (const TensorId tensor : tensors) {
      const std::vector<SliceKey>& slices = halves_[half].agreement->tensorReady({kModel, tensor});
      if (half == 0) {
        for (const SliceKey slice : slices) {
          record(slice.index).readyS = clock_.nowS();
        }
        heldReady(tensor, slices);
      }
    }
  }
  for (const std::size_t half : halvesOf_[device]) {
    drive(half);
  }
}

// Same as in Engine::tensorReady.
void AllReduce::heldReady(TensorId tensor, const std::vector<SliceKey>& slices) {
  const std::chrono::duration<double> now(clock_.nowS());
  const LinkReservation::Clock::time_point at(
      std::chrono::duration_cast<LinkReservation::Clock::duration>(now));
  if (!reservation_.ready({kModel, tensor}, slices, at)) {
    return;
  }
  reservationChanged();
  if (reservation_.until() != LinkReservation::Clock::time_point::max()) {
    const std::chrono::duration<double> left = reservation_.until() - at;
    clock_.announce(left.count(), EventKind::kReservationExpires, rounds_[0]);
  }
}

void AllReduce::reservationChanged() {
  halves_[0].agreement->reserve(reservation_.largestBytes());
}

// Same as in Engine::wait.
void AllReduce::deviceWaits(DeviceIndex device) {
  if (halves_[0].device == device && reservation_.someoneWaits()) {
    reservationChanged();
    drive(0);
  }
}

void AllReduce::drive(std::size_t half) {
  Agreement& agreement = *halves_[half].agreement;
  if (!agreement.mayDecide()) {
    return;
  }
  decisions_.clear();
  agreement.decide(decisions_);
  for (SliceMessage& message : decisions_.messages) {
    post(half, std::move(message));
  }
  for (const SliceKey slice : decisions_.issue) {
    issued(slice);
  }
  startWaiting();
}

void AllReduce::post(std::size_t from, SliceMessage&& message) {
  std::uint32_t place = 0;
  if (freeMessages_.empty()) {
    place = static_cast<std::uint32_t>(messages_.size());
    messages_.emplace_back();
  } else {
    place = freeMessages_.back();
    freeMessages_.pop_back();
  }
  ++agreementTraffic_[from].sentMessages;
  agreementTraffic_[from].sentSlices += message.slices.size();
  messages_[place] = {from, static_cast<std::size_t>(message.to), std::move(message.slices)};
  double& sendsUntilS = halves_[from].sendsUntilS;
  sendsUntilS = std::max(sendsUntilS, clock_.nowS()) + options_.controlSendS;
  clock_.announceAt(sendsUntilS + options_.controlLatencyS, EventKind::kMessage, place);
}

void AllReduce::issued(SliceKey slice) {
  if (++issues_[slice.index] == halves_.size()) {
    issues_[slice.index] = 0;
    record(slice.index).issuedS = clock_.nowS();
    waiting_[(waitingHead_ + waitingCount_++) % waiting_.size()] = slice.index;
  }
}

void AllReduce::startWaiting() {
  while (waitingCount_ > 0 && (cost_.lanes == 0 || lanesTaken_ < cost_.lanes)) {
    const SliceIndex slice = waiting_[waitingHead_];
    waitingHead_ = (waitingHead_ + 1) % waiting_.size();
    --waitingCount_;
    ++lanesTaken_;
    if (const double latencyS = costOf(slice).latencyS; latencyS > 0) {
      clock_.announce(latencyS, EventKind::kLatencyOver, slice);
    } else {
      carry(slice);
    }
  }
}

void AllReduce::carry(SliceIndex slice) {
  const auto bytes = static_cast<double>(bytesOf(slice));
  const AllReduceCost& cost = costOf(slice);
  record(slice).startedS = clock_.nowS();
  flows_.start(clock_.nowS(), slice, cost.sliceCostS + bytes * cost.secondsPerByte);
}

const AllReduceCost& AllReduce::costOf(SliceIndex slice) const {
  return layout_->slices()[slice].operation == Operation::kAllReduce ? cost_ : splitCost_;
}

void AllReduce::happened(const Event& event) {
  if (event.kind == EventKind::kLatencyOver) {
    carry(event.a);
    return;
  }
  if (event.kind == EventKind::kReservationExpires) {
    // Not the clock's time: rounded to whole nanoseconds it may be one nanosecond too early.
    if (rounds_[0] == event.a && reservation_.expire(reservation_.until())) {
      reservationChanged();
      drive(0);
    }
    return;
  }
  HVDO_CHECK(event.kind == EventKind::kMessage, "an event of another simulation");
  const Message message = std::move(messages_[event.a]);
  freeMessages_.push_back(event.a);
  ++agreementTraffic_[message.to].receivedMessages;
  agreementTraffic_[message.to].receivedSlices += message.slices.size();
  halves_[message.to].agreement->received(static_cast<Rank>(message.from), message.slices);
  drive(message.to);
}

void AllReduce::flowEnded() {
  const SliceIndex slice = flows_.finish();
  --lanesTaken_;
  if (reservation_.done({kModel, slice})) {
    reservationChanged();
  }
  record(slice).finishedS = clock_.nowS();
  ++rounds_[slice];
  sentBytes_ += static_cast<double>(bytesOf(slice)) * costOf(slice).sentPerByte;
  for (std::size_t half = 0; half < halves_.size(); ++half) {
    done(half, slice);
  }
  startWaiting();
  for (std::size_t half = 0; half < halves_.size(); ++half) {
    drive(half);
  }
}

void AllReduce::done(std::size_t half, SliceIndex slice) {
  Agreement& agreement = *halves_[half].agreement;
  const std::vector<TensorKey>& complete = agreement.sliceDone({kModel, slice});
  if (half == 0) {
    for (const SliceKey next : agreement.scheduler().becameReady()) {
      record(next.index).readyS = clock_.nowS();
    }
  }
  const bool isSquares = layout_->isSplit() && slice == SliceLayout::kSquares;
  if (halves_[half].speaks) {
    Device& device = devices_[halves_[half].device];
    if (isSquares) {
      device.normKnown();
    } else {
      for (const TensorKey tensor : complete) {
        device.arrived(tensor.tensor);
      }
    }
  }
  if (isSquares) {
    // Those of the next step: no program makes them ready, only the reduce-scatters that they need.
    agreement.tensorReady({kModel, layout_->squaresTensor()});
  }
}

SliceRecord& AllReduce::record(SliceIndex slice) {
  const std::uint32_t step = rounds_[slice];
  if (step < options_.recordFrom) {
    return unrecorded_;
  }
  return records_[(step - options_.recordFrom) * layout_->slices().size() + slice];
}

std::string AllReduce::describe(TensorId tensor) const {
  const auto gradientOf = [this](TensorId id) { return "'" + layout_->tensors()[id].name + "'"; };
  for (std::size_t half = 0; half < halves_.size(); ++half) {
    const Agreement& agreement = *halves_[half].agreement;
    for (const SliceIndex slice : layout_->slicesOf(tensor)) {
      const std::string name = concat("slice '", layout_->sliceName(slice), "'");
      if (agreement.scheduler().isReady({kModel, slice})) {
        if (const auto head = agreement.head(); head && head->index != slice) {
          return concat(
              name, " is ready, but slice '", layout_->sliceName(head->index), "' has to go first");
        }
        continue;
      }
      for (const TensorId part : layout_->tensorsOf(slice)) {
        if (!agreement.scheduler().isPending({kModel, part})) {
          return concat(name, " lacks the gradient of ", gradientOf(part));
        }
      }
    }
  }
  return concat("the gradient of ", gradientOf(tensor), " does not come");
}

} // namespace hvd_order::simulate
