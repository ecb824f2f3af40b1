#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planning/device.h"
#include "planning/sampled/links/connections.h"
#include "planning/sampled/sampled_step.h"

namespace hvd_order::simulate {

/// When a server applies what it has received.
enum class ServerMode : std::uint8_t {
  kAsync, ///< each push on arrival
  kSync,  ///< a tensor, when all workers have pushed it in this step
};

/// What starts a pull.
enum class PullStart : std::uint8_t {
  kRequest, ///< the worker, when the inputs of the pull have ended (TensorFlow)
  kAnswer,  ///< the server, once it has applied the worker's push of the step before (hvd_order)
};

/// What a worker's next step waits for, beside its computations and pulls.
enum class SampledStepEnd : std::uint8_t {
  kComputed, ///< nothing
  kPushed,   ///< its pushes have left
  kUpdated,  ///< its pushes have been applied
};

/// Workers and servers of a simulated training.
struct SampledTraining {
  std::vector<double> slowness = {1.0}; ///< by worker: factor on its computations
  std::uint32_t servers = 1;
  std::vector<std::uint32_t> serverOf; ///< by tensor; empty: in turn
  double workerBytesPerS = 1;          ///< of a worker's link, each way
  double serverBytesPerS = 1;
  Transmission pull;
  Transmission push;

  ServerMode mode = ServerMode::kAsync;
  PullStart pullStart = PullStart::kRequest;
  SampledStepEnd stepEnd = SampledStepEnd::kPushed;
  /// A pull waits while the slowest worker is more than this number of steps behind; none: never.
  std::optional<std::uint32_t> staleness;
  /// A push waits until its server admits it; an update is applied at most this number of updates
  /// after the one that its worker had read, or not at all (PullStart::kAnswer, kAsync only).
  std::optional<std::uint32_t> delayBound;
  /// With a delay bound: where it is faster, other servers add the updates of several workers and
  /// send the sum to the owner. A sum takes a helper as long as an update.
  bool aggregates = false;
  double updateSecondsPerByte = 0; ///< of a server, for each tensor that it applies
  double updateSeconds = 0;
  std::uint32_t updateLanes = 1; ///< updates that a server works on at a time
  ComputeOrder order = ComputeOrder::kReady;

  std::vector<double> startsS; ///< by worker: when it begins; empty: at random within `spreadS`
  double spreadS = 0;
  std::uint64_t seed = 0;
  std::uint32_t steps = 100; ///< ends when each worker has ended so many
  std::uint32_t recorded =
      0; ///< number of steps, the first ones, whose ops and transfers are recorded
};

/// A pull or a push of one step on its connection, in seconds since the start.
struct TransferRecord {
  bool isPull;
  TensorId tensor;
  std::uint32_t step; ///< that reads the parameter, or has made the gradient
  double startS;
  double endS; ///< its last byte has left
};

struct SampledResult {
  std::vector<std::vector<double>> stepEndsS; ///< by worker and step
  std::vector<std::vector<double>> opEndsS;   ///< by worker: recorded step and op, flattened
  std::vector<TransferRecord> transfers;      ///< of worker 0's recorded steps, by their ends
  std::vector<double> pullBusyS;              ///< by server: time for which its link sent
  std::vector<double> pushBusyS;              ///< by server: time for which its link received
  std::vector<double> updateBusyS;            ///< by server: time of its updates and sums
  std::uint64_t lateUpdates = 0;              ///< with a delay bound: those that were not sent
  std::uint64_t aggregatedUpdates = 0;        ///< those that went to a helper
  std::uint32_t longestDelay = 0;             ///< with a delay bound: of an applied update
  double endS = 0;
};

/// Trains in virtual time. Each worker has one step in flight; its durations are those of a
/// measured step, drawn anew with replacement for each step, so that workers do not lock step.
/// Equal inputs give equal results, to the bit.
///
/// Source: Li, Paolieri, Golubchik, "Throughput prediction of asynchronous SGD in TensorFlow",
/// ICPE 2020.
///
/// @throws InvalidUsage for an impossible scenario, or one that comes to a standstill.
SampledResult simulateSampled(const SampledStep& step, const SampledTraining& training);

} // namespace hvd_order::simulate
