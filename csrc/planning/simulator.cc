#include "planning/simulator.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.h"
#include "planning/network/all_reduce.h"

// Steps of synchronous ranks in virtual time: devices, a network, and the engine's own scheduler.
//
// A device runs the ops of a rank (device.h); ranks that behave alike share one (`rolesOf`). The
// exchange (network/) carries gradients, and decides by the same Scheduler, agreements and link
// reservation as a real engine: the simulated order is the real one. `run` goes to the next event
// or end of a transfer, whichever is first, and then lets each device start what it can.
//
// Invariant: the result follows from workload and scenario alone (clock.h).

namespace hvd_order::simulate {

namespace {

constexpr ByteCount kTensorAlignment = 16; // as in slice_layout.cc; real buffers are padded too

StepEnd stepEndOf(const Workload& workload, const Scenario& scenario) {
  if (workload.parameters().empty()) {
    return StepEnd::kNothing;
  }
  const bool mayOverlap = scenario.crossIteration && (scenario.split || !scenario.clipped);
  return mayOverlap ? StepEnd::kNothing : StepEnd::kArrived;
}

void check(const Scenario& scenario) {
  if (scenario.steps == 0) {
    throw InvalidUsage("no steps to simulate; ask for at least 1");
  }
  if (!std::isfinite(scenario.controlLatencyS) || scenario.controlLatencyS < 0) {
    throw InvalidUsage(
        concat("control messages take ", scenario.controlLatencyS, " s; at least 0 is needed"));
  }
  if (!std::isfinite(scenario.controlSendS) || scenario.controlSendS < 0) {
    throw InvalidUsage(concat(
        "the sender of a control message takes ", scenario.controlSendS,
        " s; at least 0 is needed"));
  }
  if (!(scenario.reservationLeadS >= 0 && scenario.reservationLeadS < 1e6)) {
    throw InvalidUsage(concat(
        "slices are held back ", scenario.reservationLeadS,
        " s before the first gradient; at least 0 is "
        "needed"));
  }
  if (scenario.split && !scenario.clipped) {
    throw InvalidUsage(
        "all-reduces are split for a program that clips gradients by their norm, and this one does "
        "not; simulate it with clipping, or with whole all-reduces");
  }
}

class Simulator final {
 public:
  Simulator(const Workload& workload, const Scenario& scenario)
      : workload_(workload),
        roles_(rolesOf(
            scenario.slowness,
            scenario.agreement,
            scenario.everyRank,
            scenario.everyAgreement)),
        recordFrom_(scenario.steps - std::min(scenario.recorded, scenario.steps)) {
    const ComputeOptions compute{
        .order = scenario.order,
        .stepEnd = stepEndOf(workload, scenario),
        .awaitsNorm = scenario.split && !workload.parameters().empty(),
        .steps = scenario.steps,
        .recordFrom = recordFrom_};
    devices_.reserve(roles_.slowness.size());
    for (const double slowness : roles_.slowness) {
      const auto index = static_cast<DeviceIndex>(devices_.size());
      devices_.emplace_back(workload_, index, slowness, compute, clock_);
    }
    const AllReduceOptions options{
        .agreement = scenario.agreement,
        .policy = scenario.policy,
        .creditBytes = scenario.creditBytes,
        .plan = scenario.plan,
        .controlLatencyS = scenario.controlLatencyS,
        .controlSendS = scenario.controlSendS,
        .fanOut = scenario.fanOut,
        .reservationLeadS = scenario.reservationLeadS,
        .steps = scenario.steps,
        .recordFrom = recordFrom_};
    exchange_.emplace(
        layoutOf(workload, scenario.sliceBytes, scenario.split), options, scenario.network, roles_,
        clock_, devices_);
    stepsSeen_.resize(devices_.size());
  }

  Result run() {
    if (recordFrom_ == 0) {
      exchange_->startRecording();
    }
    for (Device& device : devices_) {
      device.begin();
    }
    while (!clock_.empty() || std::isfinite(exchange_->flows().nextEndS())) {
      if (const std::optional<Event> event = clock_.advance(exchange_->flows().nextEndS())) {
        happened(*event);
      } else {
        exchange_->flowEnded();
      }
      for (Device& device : devices_) {
        device.proceed();
      }
      for (DeviceIndex device = 0; device < devices_.size(); ++device) {
        noteStep(device);
        if (devices_[device].waits() || devices_[device].finished()) { // finished devices wait too
          exchange_->deviceWaits(device);
        }
      }
    }
    for (const Device& device : devices_) {
      if (!device.finished()) {
        throw InvalidUsage(standstill(device));
      }
    }
    return result();
  }

 private:
  void happened(const Event& event) {
    if (event.kind != EventKind::kTaskEnd) {
      exchange_->happened(event);
      return;
    }
    const std::vector<TensorId>& gradients = devices_[event.a].taskEnded(event.b);
    if (!gradients.empty()) {
      exchange_->ready(event.a, gradients);
    }
  }

  void noteStep(DeviceIndex device) {
    if (stepsSeen_[device] == devices_[device].step()) {
      return;
    }
    stepsSeen_[device] = devices_[device].step();
    if (device == 0 && stepsSeen_[device] == recordFrom_) {
      exchange_->startRecording();
    }
  }

  [[nodiscard]] std::string standstill(const Device& device) const {
    const Device::Blocked blocked = device.blocked();
    std::string text = concat("the simulation stands still in step ", device.step(), ": ");
    text += blocked.op.empty() ? "the end of the step" : concat("op '", blocked.op, "'");
    if (blocked.tensor) {
      const std::string& name = workload_.parameters()[*blocked.tensor].name;
      return concat(text, " waits for '", name, "': ", exchange_->describe(*blocked.tensor));
    }
    if (!blocked.inputOp.empty()) {
      return concat(
          text, " waits for op '", blocked.inputOp,
          "', which cannot run before it: change the order of the ops or of the streams");
    }
    for (TensorId tensor = 0; tensor < workload_.parameters().size(); ++tensor) {
      if (device.missing(tensor)) {
        const std::string& name = workload_.parameters()[tensor].name;
        return concat(text, " waits for '", name, "': ", exchange_->describe(tensor));
      }
    }
    return text + " waits";
  }

  [[nodiscard]] Result result() const {
    Result out{.endS = clock_.nowS(), .sentBytes = exchange_->sentBytes()};
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const Device& device = devices_[i];
      DeviceResult one{
          .slowness = roles_.slowness[i],
          .ranks = static_cast<int>(roles_.ranksOf[i]),
          .stepStartsS = device.stepStartsS(),
          .ops = device.opRecords(),
          .updates = device.updateRecords()};
      for (std::uint32_t stream = 0; stream < workload_.streams(); ++stream) {
        one.busyS.push_back(device.busyS(stream));
      }
      out.stepS.resize(one.stepStartsS.size() - 1);
      for (std::size_t step = 0; step < out.stepS.size(); ++step) {
        out.stepS[step] =
            std::max(out.stepS[step], one.stepStartsS[step + 1] - one.stepStartsS[step]);
      }
      out.devices.push_back(std::move(one));
    }
    out.linkBusyS = exchange_->flows().busyS();
    out.linkBusy = exchange_->flows().busy();
    out.slices = exchange_->records();
    out.agreement = exchange_->agreementTraffic();
    return out;
  }

  const Workload& workload_;
  Roles roles_;
  std::uint32_t recordFrom_;
  Clock clock_;
  std::vector<Device> devices_;
  std::optional<AllReduce> exchange_;
  std::vector<std::uint32_t> stepsSeen_; // by device
};

} // namespace

std::shared_ptr<const SliceLayout>
layoutOf(const Workload& workload, ByteCount sliceBytes, bool split) {
  std::vector<TensorSpec> tensors;
  for (const Parameter& parameter : workload.parameters()) {
    const ByteCount padded =
        (parameter.sizeBytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    tensors.push_back({parameter.name, padded, parameter.buffer});
  }
  constexpr bool kSmallFront = true;
  return std::make_shared<SliceLayout>(std::move(tensors), sliceBytes, kSmallFront, split);
}

Result simulate(const Workload& workload, const Scenario& scenario) {
  check(scenario);
  return Simulator(workload, scenario).run();
}

} // namespace hvd_order::simulate
