#include "planning/sampled/worker_steps.h"

#include <algorithm>

#include "base/error.h"

// The steps of each worker as graphs of ops in virtual time: computations, pushes, pulls.
//
// A step begins with the draw of a measured sample, which has the duration of every op. An op
// starts when all its inputs have ended (`start`); a computation also waits for its stream
// (`proceed`). Pushes and pulls go to the listener and end when it calls back: this class knows
// neither links nor servers. A pull may also stand for the answer to the push of the step before,
// which may come before its step has begun; so the step of each tensor's answer is kept
// (`answers`).

namespace hvd_order::simulate {

WorkerSteps::WorkerSteps(
    const SampledStep& step,
    const SampledTraining& training,
    const StepTables& tables,
    Clock& clock,
    TransferListener& listener,
    SampledResult& result)
    : step_(step),
      training_(training),
      tables_(tables),
      clock_(clock),
      listener_(listener),
      result_(result),
      random_(training.seed),
      workers_(training.slowness.size()),
      unfinished_(workers_.size()) {
  if (tables.awaited == 0) {
    throw InvalidUsage("a step that waits for nothing");
  }
  result.stepEndsS.resize(workers_.size());
  result.opEndsS.resize(workers_.size());
}

void WorkerSteps::announceStarts() {
  for (std::uint32_t number = 0; number < workers_.size(); ++number) {
    WorkerProgress& worker = workers_[number];
    worker.streams.resize(step_.streams());
    worker.answers.assign(step_.tensorBytes().size(), 1); // of the first step
    worker.ready.resize(step_.ops().size());
    const double startS = training_.startsS.empty() ? training_.spreadS * random_.fraction()
                                                    : training_.startsS[number];
    clock_.announce(startS, EventKind::kWorkerBegins, number);
  }
}

void WorkerSteps::begin(std::uint32_t number) {
  WorkerProgress& worker = workers_[number];
  worker.begun = true;
  worker.sample = random_.below(step_.samples());
  worker.toGo = tables_.awaited;
  worker.inputsToGo = tables_.inputs;
  std::fill(worker.ready.begin(), worker.ready.end(), false);
  for (StreamProgress& stream : worker.streams) {
    stream.next = 0;
  }
  if (worker.step < training_.recorded) {
    result_.opEndsS[number].resize(result_.opEndsS[number].size() + step_.ops().size());
  }
  for (const OpIndex index : step_.firstOps(worker.sample)) {
    start(number, index);
  }
  proceed(number);
}

void WorkerSteps::taskEnded(std::uint32_t number, std::uint32_t stream) {
  StreamProgress& each = workers_[number].streams[stream];
  each.busy = false;
  ended(number, each.running);
  proceed(number);
}

void WorkerSteps::transferEnded(std::uint32_t number, OpIndex op) {
  ended(number, op);
  proceed(number);
}

void WorkerSteps::pulled(const Transfer& transfer) {
  WorkerProgress& worker = workers_[transfer.worker];
  worker.answers[transfer.tensor] = transfer.step + 1;
  // An answer may come before its step has begun.
  if (worker.begun && worker.step == transfer.step) {
    const OpIndex op = step_.pullOf(transfer.tensor);
    if (worker.inputsToGo[op] == 0) {
      transferEnded(transfer.worker, op);
    }
  }
}

/// All inputs of an op have ended.
void WorkerSteps::start(std::uint32_t number, OpIndex index) {
  WorkerProgress& worker = workers_[number];
  switch (tables_.kinds[index]) {
    case SampledKind::kCompute:
      if (training_.order == ComputeOrder::kReady) {
        worker.streams[step_.ops()[index].stream].ready.push(index);
      } else {
        worker.ready[index] = true;
      }
      return;
    case SampledKind::kPull:
      if (training_.pullStart == PullStart::kAnswer) {
        if (worker.answers[tables_.transfers[index].tensor] > worker.step) {
          ended(number, index);
        }
        return;
      }
      listener_.wantsPull(transferOf(number, index));
      return;
    case SampledKind::kPush:
      listener_.wantsPush(transferOf(number, index));
      return;
  }
}

/// Starts the computations that can run.
void WorkerSteps::proceed(std::uint32_t number) {
  WorkerProgress& worker = workers_[number];
  for (std::uint32_t i = 0; i < worker.streams.size(); ++i) {
    StreamProgress& stream = worker.streams[i];
    if (stream.busy) {
      continue;
    }
    if (training_.order == ComputeOrder::kReady) {
      if (stream.ready.empty()) {
        continue;
      }
      stream.running = stream.ready.top();
      stream.ready.pop();
    } else {
      const auto ops = step_.opsOfStream(i);
      if (stream.next == ops.size() || !worker.ready[ops[stream.next]]) {
        continue;
      }
      stream.running = ops[stream.next++];
    }
    stream.busy = true;
    const double seconds =
        step_.seconds(worker.sample)[stream.running] * training_.slowness[number];
    clock_.announce(seconds, EventKind::kTaskEnd, number, i);
  }
}

/// An op has ended; with the last one the step ends.
void WorkerSteps::ended(std::uint32_t number, OpIndex index) {
  WorkerProgress& worker = workers_[number];
  if (worker.step < training_.recorded) {
    const std::size_t first = std::size_t{worker.step} * step_.ops().size();
    result_.opEndsS[number][first + index] = clock_.nowS();
  }
  for (const OpIndex next : step_.successorsOf(index)) {
    if (--worker.inputsToGo[next] == 0) {
      start(number, next);
    }
  }
  if (!tables_.isAwaited(index) || --worker.toGo > 0) {
    return;
  }
  result_.stepEndsS[number].push_back(clock_.nowS());
  if (++worker.step == training_.steps) {
    --unfinished_;
  }
  begin(number);
}

std::string WorkerSteps::whatWaits() const {
  for (std::uint32_t number = 0; number < workers_.size(); ++number) {
    const WorkerProgress& worker = workers_[number];
    for (OpIndex i = 0; i < step_.ops().size(); ++i) {
      if (worker.begun && worker.inputsToGo[i] > 0) {
        return concat("op '", step_.ops()[i].name, "' of worker ", number, " waits");
      }
    }
  }
  return "no op waits for another";
}

} // namespace hvd_order::simulate
