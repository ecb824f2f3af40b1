#include "planning/device.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/error.h"

// Counts blockers: an op can run when it has none left.
//
// The blockers of an op are its inputs, the gradients that it awaits, and the parameters that it
// uses and that are not updated yet. Each event removes blockers (`release`). `proceed` then
// starts a task on every free stream that has one to run, and ends the step when its condition
// holds.
//
// A stream without an op to run updates parameters whose gradients of earlier steps have arrived,
// the oldest and most urgent first. An update is not interrupted. The update of a parameter runs
// on the stream of the first op that uses the parameter.
//
// `arrivals_` and `applied_` count per tensor instead of using flags, because under
// StepEnd::kNothing a gradient of one step may arrive in the next step. A tensor's parameter is
// up to date in step n when `applied_` is n. `norms_` counts for the same reason: with `awaitsNorm`
// a gradient that arrives before its norm is held, and `normKnown` finds those by their count.
//
// Invariant: each blocker is removed exactly once per step; `release` checks this.

namespace hvd_order::simulate {

Device::Device(
    const Workload& workload,
    DeviceIndex index,
    double slowness,
    const ComputeOptions& options,
    Clock& clock)
    : workload_(workload),
      index_(index),
      slowness_(slowness),
      options_(options),
      clock_(clock),
      streams_(workload.streams()) {
  const std::size_t ops = workload.ops().size();
  const std::size_t tensors = workload.parameters().size();
  for (OpIndex i = 0; i < ops; ++i) {
    const Op& op = workload.ops()[i];
    streams_[op.stream].program.push_back(i);
    inputsAndAwaits_.push_back(static_cast<std::uint32_t>(op.inputs.size() + op.awaits.size()));
  }
  for (Stream& stream : streams_) {
    stream.ready.reserve(stream.program.size());
    stream.updates.reserve(2 * tensors);
  }
  for (TensorId tensor = 0; tensor < tensors; ++tensor) {
    updateStream_.push_back(workload.ops()[workload.usersOf(tensor).front()].stream);
    allUpdatesSeconds_ += workload.parameters()[tensor].updateSeconds;
  }
  blockers_.resize(ops);
  inputsEndedS_.resize(ops);
  ended_.resize(ops);
  producersToGo_.resize(tensors);
  arrivals_.resize(tensors);
  applied_.resize(tensors);
  readyGradients_.reserve(tensors);
  startsS_.reserve(options.steps + 1);
  const std::size_t recorded = options.steps - std::min(options.recordFrom, options.steps);
  opRecords_.resize(recorded * ops);
  updateRecords_.reserve(recorded * (tensors + 1));
}

void Device::begin() {
  beginStep();
  proceed();
}

void Device::beginStep() {
  startsS_.push_back(clock_.nowS());
  opsToGo_ = workload_.ops().size();
  tensorsToCome_ = workload_.parameters().size();
  blockers_ = inputsAndAwaits_;
  std::fill(ended_.begin(), ended_.end(), 0);
  std::fill(inputsEndedS_.begin(), inputsEndedS_.end(), clock_.nowS());
  for (TensorId tensor = 0; tensor < applied_.size(); ++tensor) {
    producersToGo_[tensor] = static_cast<std::uint32_t>(workload_.producersOf(tensor).size());
    const bool costs = workload_.parameters()[tensor].updateSeconds > 0;
    if (arrivals_[tensor] == step_ && !costs && (!options_.awaitsNorm || norms_ >= step_)) {
      applied_[tensor] = step_;
    }
    if (applied_[tensor] < step_) {
      for (const OpIndex op : workload_.usersOf(tensor)) {
        ++blockers_[op];
      }
    }
  }
  for (Stream& stream : streams_) {
    stream.next = 0;
    stream.ready.clear();
  }
  if (options_.order == ComputeOrder::kReady) {
    for (OpIndex op = 0; op < blockers_.size(); ++op) {
      if (blockers_[op] == 0) {
        streams_[workload_.ops()[op].stream].ready.push_back(op); // ascending order is a heap
      }
    }
  }
}

void Device::release(OpIndex op) {
  HVDO_CHECK(blockers_[op] > 0, "op '", workload_.ops()[op].name, "' was released twice");
  if (--blockers_[op] == 0 && options_.order == ComputeOrder::kReady) {
    std::vector<OpIndex>& ready = streams_[workload_.ops()[op].stream].ready;
    ready.push_back(op);
    std::push_heap(ready.begin(), ready.end(), std::greater<>());
  }
}

void Device::applied(TensorId tensor) {
  applied_[tensor] = step_;
  for (const OpIndex op : workload_.usersOf(tensor)) {
    release(op);
  }
}

void Device::arrived(TensorId tensor) {
  const bool ofThisStep = arrivals_[tensor]++ == step_;
  if (finished()) {
    return;
  }
  if (ofThisStep) {
    --tensorsToCome_;
    for (const OpIndex op : workload_.awaitersOf(tensor)) {
      release(op);
    }
  }
  if (!options_.awaitsNorm || norms_ >= arrivals_[tensor]) {
    mayBeUpdated(tensor);
  }
}

void Device::normKnown() {
  ++norms_;
  if (finished()) {
    return;
  }
  for (TensorId tensor = 0; tensor < arrivals_.size(); ++tensor) {
    if (arrivals_[tensor] == norms_) {
      mayBeUpdated(tensor);
    }
  }
}

void Device::mayBeUpdated(TensorId tensor) {
  if (options_.stepEnd == StepEnd::kArrived) {
    return; // `endStep` counts the update
  }
  if (workload_.parameters()[tensor].updateSeconds > 0) {
    std::vector<Update>& updates = streams_[updateStream_[tensor]].updates;
    updates.push_back({arrivals_[tensor], tensor});
    std::push_heap(updates.begin(), updates.end(), laterUpdate);
  } else if (arrivals_[tensor] <= step_) {
    applied(tensor); // else `beginStep` does so
  }
}

const std::vector<TensorId>& Device::taskEnded(std::uint32_t stream) {
  readyGradients_.clear();
  Stream& s = streams_[stream];
  const double nowS = clock_.nowS();
  const Task task = std::exchange(s.task, Task::kNone);
  const double couldStartS = s.freeS;
  s.busyS += nowS - s.startS;
  s.freeS = nowS;
  if (task == Task::kOp) {
    if (recording()) {
      opRecords_[(step_ - options_.recordFrom) * workload_.ops().size() + s.number] = {
          std::max(couldStartS, inputsEndedS_[s.number]), s.startS, nowS};
    }
    endOp(s.number);
    return readyGradients_;
  }
  if (recording()) {
    updateRecords_.push_back(
        {stream, task == Task::kUpdate ? s.number : kAllTensors, s.startS, nowS});
  }
  if (task == Task::kUpdate) {
    s.freeS = couldStartS; // the next op has waited since then
    applied(s.number);
  } else {
    endStep();
  }
  return readyGradients_;
}

void Device::endOp(OpIndex op) {
  ended_[op] = 1;
  --opsToGo_;
  for (const OpIndex next : workload_.successorsOf(op)) {
    inputsEndedS_[next] = clock_.nowS();
    release(next);
  }
  for (const TensorId tensor : workload_.ops()[op].produces) {
    if (--producersToGo_[tensor] == 0) {
      readyGradients_.push_back(tensor);
    }
  }
}

void Device::endStep() {
  updating_ = false;
  ++step_;
  if (options_.stepEnd == StepEnd::kArrived) {
    std::fill(applied_.begin(), applied_.end(), step_);
  }
  for (Stream& stream : streams_) {
    stream.freeS = clock_.nowS();
  }
  if (finished()) {
    startsS_.push_back(clock_.nowS());
  } else {
    beginStep();
  }
}

void Device::proceed() {
  while (!finished()) {
    for (std::uint32_t stream = 0; stream < streams_.size(); ++stream) {
      while (streams_[stream].task == Task::kNone && startNext(stream)) {
      }
    }
    const bool over = opsToGo_ == 0 && !updating_ &&
        (options_.stepEnd != StepEnd::kArrived ||
         (tensorsToCome_ == 0 && (!options_.awaitsNorm || norms_ > step_)));
    if (!over) {
      return;
    }
    if (options_.stepEnd == StepEnd::kArrived && allUpdatesSeconds_ > 0) {
      updating_ = true;
      start(0, Task::kUpdateAll, 0, allUpdatesSeconds_);
      return;
    }
    endStep();
  }
}

bool Device::startNext(std::uint32_t stream) {
  Stream& s = streams_[stream];
  if (options_.order == ComputeOrder::kProgram) {
    if (s.next < s.program.size() && blockers_[s.program[s.next]] == 0) {
      const OpIndex op = s.program[s.next++];
      start(stream, Task::kOp, op, workload_.ops()[op].seconds);
      return true;
    }
  } else if (!s.ready.empty()) {
    const OpIndex op = s.ready.front();
    std::pop_heap(s.ready.begin(), s.ready.end(), std::greater<>());
    s.ready.pop_back();
    start(stream, Task::kOp, op, workload_.ops()[op].seconds);
    return true;
  }
  if (!s.updates.empty() && s.updates.front().step <= step_) {
    const TensorId tensor = s.updates.front().tensor;
    std::pop_heap(s.updates.begin(), s.updates.end(), laterUpdate);
    s.updates.pop_back();
    start(stream, Task::kUpdate, tensor, workload_.parameters()[tensor].updateSeconds);
    return true;
  }
  return false;
}

void Device::start(std::uint32_t stream, Task task, std::uint32_t number, double seconds) {
  Stream& s = streams_[stream];
  s.task = task;
  s.number = number;
  s.startS = clock_.nowS();
  clock_.announce(seconds * slowness_, EventKind::kTaskEnd, index_, stream);
}

bool Device::laterUpdate(const Update& a, const Update& b) {
  return a.step != b.step ? a.step > b.step : a.tensor > b.tensor;
}

bool Device::waits() const {
  return !finished() && std::all_of(streams_.begin(), streams_.end(), [](const Stream& stream) {
    return stream.task == Task::kNone;
  });
}

Device::Blocked Device::blocked() const {
  // An op that waits for another op is not the cause, unless all waiting ops do so.
  Blocked waitsForOp;
  for (OpIndex i = 0; i < ended_.size(); ++i) {
    if (ended_[i] != 0) {
      continue;
    }
    const Op& op = workload_.ops()[i];
    const auto input = std::find_if(
        op.inputs.begin(), op.inputs.end(), [this](OpIndex other) { return ended_[other] == 0; });
    if (input != op.inputs.end()) {
      if (waitsForOp.op.empty()) {
        waitsForOp = {.op = op.name, .inputOp = workload_.ops()[*input].name};
      }
      continue;
    }
    for (const auto& [tensors, arrivals] :
         {std::pair(&op.reads, step_), std::pair(&op.produces, step_),
          std::pair(&op.awaits, step_ + 1)}) {
      for (const TensorId tensor : *tensors) {
        if (arrivals_[tensor] < arrivals) {
          return {.op = op.name, .tensor = tensor};
        }
      }
    }
  }
  return waitsForOp;
}

} // namespace hvd_order::simulate
