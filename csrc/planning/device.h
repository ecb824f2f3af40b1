#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "planning/clock.h"
#include "planning/workload.h"

namespace hvd_order::simulate {

/// Number of a device. Ranks of one speed behave identically and share one device.
using DeviceIndex = std::uint32_t;

/// Rule by which a stream picks its next op.
enum class ComputeOrder {
  kProgram, ///< program order, each op waited for in turn: an eager framework, a device's stream
  kReady,   ///< the first listed op that could run: a dataflow executor
};

/// The condition for the end of a step.
enum class StepEnd {
  kNothing, ///< the next step begins at once; readers of a parameter wait for its update
  kArrived, ///< all gradients of this step have arrived; then all parameters are updated
};

/// Options of the computation, equal on all ranks.
struct ComputeOptions {
  ComputeOrder order = ComputeOrder::kProgram;
  StepEnd stepEnd = StepEnd::kNothing;
  bool awaitsNorm = false; ///< updates wait for the norm of all gradients of their step
  std::uint32_t steps = 1;
  std::uint32_t recordFrom = 0; ///< first recorded step
};

/// Times of an op in one step, in seconds since the start.
struct OpRecord {
  double couldStartS; ///< its inputs had ended, and its stream was free
  double startS;      ///< its gradients had arrived, and its parameters were updated
  double endS;
};

/// Times of an update.
struct UpdateRecord {
  std::uint32_t stream;
  TensorId tensor; ///< kAllTensors: all parameters at the end of a step
  double startS;
  double endS;
};
constexpr TensorId kAllTensors = ~TensorId{0};

/// Runs one rank's ops in virtual time, step after step: streams, waits and updates.
///
/// Events go in (`taskEnded`, `arrived`, `normKnown`, then `proceed`); ready gradients come out.
/// The device announces the ends of its tasks to the clock. The first step waits for no parameter.
class Device final {
 public:
  /// @param slowness factor on the time of every op and update.
  Device(
      const Workload& workload,
      DeviceIndex index,
      double slowness,
      const ComputeOptions& options,
      Clock& clock);

  /// Begins the first step.
  void begin();
  /// An op or update of `stream` has ended.
  /// @return the gradients that became ready by its end; valid until the next call.
  const std::vector<TensorId>& taskEnded(std::uint32_t stream);
  /// The summed gradient has arrived.
  void arrived(TensorId tensor);
  /// The norm of all gradients of a step is known; for ComputeOptions::awaitsNorm.
  void normKnown();
  /// Starts all tasks that can run now. Must be called after each of the methods above.
  void proceed();

  [[nodiscard]] bool finished() const {
    return step_ == options_.steps;
  }
  /// Whether no task runs although the device has not finished.
  [[nodiscard]] bool waits() const;
  /// Number of the current step.
  [[nodiscard]] std::uint32_t step() const {
    return step_;
  }
  /// Start time of each step, and the end of the last step.
  [[nodiscard]] const std::vector<double>& stepStartsS() const {
    return startsS_;
  }
  /// Total time for which the stream has run ops or updates.
  [[nodiscard]] double busyS(std::uint32_t stream) const {
    return streams_[stream].busyS;
  }
  /// Records of ops by recorded step and op, flattened.
  [[nodiscard]] const std::vector<OpRecord>& opRecords() const {
    return opRecords_;
  }
  [[nodiscard]] const std::vector<UpdateRecord>& updateRecords() const {
    return updateRecords_;
  }

  /// The cause for which the device waits.
  struct Blocked {
    std::string op;                 ///< op that waits; "" if the end of the step waits
    std::string inputOp;            ///< input op that has not ended; "" if none
    std::optional<TensorId> tensor; ///< tensor that has not arrived
  };
  [[nodiscard]] Blocked blocked() const;
  /// Whether the step's gradient of the tensor has not arrived.
  [[nodiscard]] bool missing(TensorId tensor) const {
    return arrivals_[tensor] <= step_;
  }

 private:
  enum class Task : std::uint8_t { kNone, kOp, kUpdate, kUpdateAll };

  struct Update {
    std::uint32_t step; // step whose gradient it applies
    TensorId tensor;
  };

  struct Stream {
    std::vector<OpIndex> program;
    std::size_t next = 0;        // place in `program`; kProgram only
    std::vector<OpIndex> ready;  // heap, first listed op in front; kReady only
    std::vector<Update> updates; // heap, oldest and most urgent in front
    Task task = Task::kNone;
    std::uint32_t number = 0; // number of the op or tensor
    double startS = 0;
    double freeS = 0; // time since which it has no task
    double busyS = 0;
  };

  void beginStep();
  void release(OpIndex op);
  void mayBeUpdated(TensorId tensor);
  void applied(TensorId tensor);
  void endStep();
  bool startNext(std::uint32_t stream);
  void start(std::uint32_t stream, Task task, std::uint32_t number, double seconds);
  void endOp(OpIndex op);
  [[nodiscard]] bool recording() const {
    return step_ >= options_.recordFrom;
  }
  static bool laterUpdate(const Update& a, const Update& b);

  const Workload& workload_;
  DeviceIndex index_;
  double slowness_;
  ComputeOptions options_;
  Clock& clock_;
  double allUpdatesSeconds_ = 0;

  std::uint32_t step_ = 0;
  std::size_t opsToGo_ = 0;
  std::size_t tensorsToCome_ = 0; // gradients of this step that have not arrived
  bool updating_ = false;         // updates all parameters at the end of the step
  std::vector<Stream> streams_;
  std::vector<std::uint32_t> inputsAndAwaits_; // by op
  std::vector<std::uint32_t> blockers_;        // by op: number of blockers left in this step
  std::vector<double> inputsEndedS_;           // by op
  std::vector<std::uint8_t> ended_;            // by op
  std::vector<std::uint32_t> producersToGo_;   // by tensor
  std::vector<std::uint32_t> arrivals_;        // by tensor
  std::uint32_t norms_ = 0;                    // number of norms known
  std::vector<std::uint32_t> applied_;         // by tensor: number of updates
  std::vector<std::uint32_t> updateStream_;    // by tensor: the stream of its first user
  std::vector<TensorId> readyGradients_;
  std::vector<double> startsS_;
  std::vector<OpRecord> opRecords_;
  std::vector<UpdateRecord> updateRecords_;
};

} // namespace hvd_order::simulate
