#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "planning/clock.h"
#include "planning/sampled/random.h"
#include "planning/sampled/sampled_step.h"
#include "planning/sampled/sampled_training.h"
#include "planning/sampled/step_tables.h"

namespace hvd_order::simulate {

/// The workers: each takes one step after the other, op by op, with durations drawn for each step.
/// Computations are here; what pulls and pushes cost is the listener's to say.
class WorkerSteps final {
 public:
  /// Is told of transfers whose inputs have ended. May call back at once.
  class TransferListener {
   public:
    TransferListener() = default;
    TransferListener(const TransferListener&) = delete;
    TransferListener& operator=(const TransferListener&) = delete;
    /// Not with PullStart::kAnswer, where servers start pulls.
    virtual void wantsPull(const Transfer& pull) = 0;
    virtual void wantsPush(const Transfer& push) = 0;

   protected:
    ~TransferListener() = default;
  };

  /// All arguments must outlive this object.
  ///
  /// @param result gets the ends of steps and ops.
  WorkerSteps(
      const SampledStep& step,
      const SampledTraining& training,
      const StepTables& tables,
      Clock& clock,
      TransferListener& listener,
      SampledResult& result);

  /// An event of `begin` for each worker.
  void announceStarts();
  /// A worker begins its next step.
  void begin(std::uint32_t number);
  /// The computation of a worker's stream has ended.
  void taskEnded(std::uint32_t number, std::uint32_t stream);
  /// A pull or a push has ended.
  void transferEnded(std::uint32_t number, OpIndex op);
  /// The parameter is there for the step that the transfer names.
  void pulled(const Transfer& transfer);

  /// Whether there are workers that have not ended their steps.
  [[nodiscard]] bool isUnderWay() const {
    return unfinished_ > 0;
  }
  /// The transfer of an op, in the worker's present step.
  [[nodiscard]] Transfer transferOf(std::uint32_t number, OpIndex op) const {
    Transfer transfer = tables_.transfers[op];
    transfer.worker = number;
    transfer.step = workers_[number].step;
    return transfer;
  }
  /// For an error: an op that has not run.
  [[nodiscard]] std::string whatWaits() const;

 private:
  struct StreamProgress {
    bool busy = false;
    std::size_t next = 0; // ComputeOrder::kProgram: place of the next op
    std::priority_queue<OpIndex, std::vector<OpIndex>, std::greater<>> ready;
    OpIndex running = 0;
  };
  struct WorkerProgress {
    std::uint32_t step = 0;
    std::size_t sample = 0;
    std::size_t toGo = 0; // ops of the step that have not ended
    std::vector<std::uint32_t> inputsToGo;
    std::vector<bool> ready; // ComputeOrder::kProgram
    std::vector<StreamProgress> streams;
    std::vector<std::uint32_t> answers; // by tensor: steps for which the parameter is here
    bool begun = false;
  };

  void start(std::uint32_t number, OpIndex index);
  void proceed(std::uint32_t number);
  void ended(std::uint32_t number, OpIndex index);

  const SampledStep& step_;
  const SampledTraining& training_;
  const StepTables& tables_;
  Clock& clock_;
  TransferListener& listener_;
  SampledResult& result_;
  Random random_;
  std::vector<WorkerProgress> workers_;
  std::size_t unfinished_; // workers that have not ended their steps
};

} // namespace hvd_order::simulate
