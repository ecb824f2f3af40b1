#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "simulate/clock.h"
#include "simulate/workload.h"

namespace hvd_order::simulate {

/// A device's number. Ranks of one speed that do the same at the same time share one device.
using DeviceIndex = std::uint32_t;

/// Which op a stream runs next.
enum class ComputeOrder {
  kProgram, ///< as listed, waiting for each in turn: an eager framework, a device's stream
  kReady,   ///< the first listed of those that could run: a dataflow executor
};

/// What the end of a step waits for.
enum class StepEnd {
  kNothing, ///< the next step begins at once; whoever reads a parameter waits for it and updates it
  kArrived, ///< all gradients of this step have arrived; then all parameters are updated
  kSummed,  ///< all gradients are with the parameter servers, which update; pulls come afterwards
};

/// How every rank computes.
struct ComputeOptions {
  ComputeOrder order = ComputeOrder::kProgram;
  StepEnd stepEnd = StepEnd::kNothing;
  bool updatesHere = true; ///< false: parameter servers update
  std::uint32_t steps = 1;
  std::uint32_t recordFrom = 0; ///< first step to keep records of
};

/// An op's run in one step; seconds since the start.
struct OpRecord {
  double couldStartS; ///< its inputs had ended and its stream was free
  double startS;      ///< what it read had arrived and was updated
  double endS;
};

/// An update's run.
struct UpdateRecord {
  std::uint32_t stream;
  TensorId tensor; ///< kAllTensors: all parameters at the end of a step
  double startS;
  double endS;
};
constexpr TensorId kAllTensors = ~TensorId{0};

/// Runs one rank's ops in virtual time, step after step: streams, waits and updates.
///
/// Events go in (`taskEnded`, `arrived`, `allSummed`, then `proceed`), ends of tasks are announced
/// to the clock, ready gradients come out. The first step waits for no parameter.
class Device final {
 public:
  /// @param slowness every op and update takes this many times as long.
  Device(
      const Workload& workload,
      DeviceIndex index,
      double slowness,
      const ComputeOptions& options,
      Clock& clock);

  /// Begins the first step.
  void begin();
  /// An op or update of `stream` has ended.
  /// @return gradients that became ready through it; valid until the next call.
  const std::vector<TensorId>& taskEnded(std::uint32_t stream);
  /// The summed gradient, or the parameter pulled from a server, is here.
  void arrived(TensorId tensor);
  /// The parameter servers have all gradients of the step; for StepEnd::kSummed.
  void allSummed();
  /// Starts whatever can run now. Call it after each of the above.
  void proceed();

  [[nodiscard]] bool finished() const {
    return step_ == options_.steps;
  }
  /// Whether nothing runs though there is something to do.
  [[nodiscard]] bool waits() const;
  /// The step that is being computed.
  [[nodiscard]] std::uint32_t step() const {
    return step_;
  }
  /// When each step began, and when the last one ended.
  [[nodiscard]] const std::vector<double>& stepStartsS() const {
    return startsS_;
  }
  /// How long the stream has computed or updated, in all.
  [[nodiscard]] double busyS(std::uint32_t stream) const {
    return streams_[stream].busyS;
  }
  /// By recorded step and op, flattened.
  [[nodiscard]] const std::vector<OpRecord>& opRecords() const {
    return opRecords_;
  }
  [[nodiscard]] const std::vector<UpdateRecord>& updateRecords() const {
    return updateRecords_;
  }

  /// What holds the device up.
  struct Blocked {
    std::string op;                 ///< "" when the end of the step waits
    std::string inputOp;            ///< that has not ended; "" if no op is waited for
    std::optional<TensorId> tensor; ///< that has not arrived
  };
  [[nodiscard]] Blocked blocked() const;
  /// Whether the step's gradient of the tensor has not arrived.
  [[nodiscard]] bool missing(TensorId tensor) const {
    return arrivals_[tensor] <= step_;
  }

 private:
  enum class Task : std::uint8_t { kNone, kOp, kUpdate, kUpdateAll };

  struct Update {
    std::uint32_t step; // whose gradient it applies
    TensorId tensor;
  };

  struct Stream {
    std::vector<OpIndex> program;
    std::size_t next = 0;        // place in `program`; kProgram only
    std::vector<OpIndex> ready;  // heap, first listed in front; kReady only
    std::vector<Update> updates; // heap, oldest and most urgent in front
    Task task = Task::kNone;
    std::uint32_t number = 0; // of the op or tensor
    double startS = 0;
    double freeS = 0; // since when it has no task
    double busyS = 0;
  };

  void beginStep();
  void release(OpIndex op);
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
  bool summed_ = false;
  bool updating_ = false; // all parameters, at the end of the step
  std::vector<Stream> streams_;
  std::vector<std::uint32_t> inputsAndAwaits_; // by op
  std::vector<std::uint32_t> blockers_;        // by op: what it still waits for in this step
  std::vector<double> inputsEndedS_;           // by op
  std::vector<std::uint8_t> ended_;            // by op
  std::vector<std::uint32_t> producersToGo_;   // by tensor
  std::vector<std::uint32_t> arrivals_;        // by tensor
  std::vector<std::uint32_t> applied_;         // by tensor: updates
  std::vector<std::uint32_t> updateStream_;    // by tensor: of its first user
  std::vector<TensorId> readyGradients_;
  std::vector<double> startsS_;
  std::vector<OpRecord> opRecords_;
  std::vector<UpdateRecord> updateRecords_;
};

} // namespace hvd_order::simulate
