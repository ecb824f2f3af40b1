#pragma once

#include <cstdint>
#include <vector>

#include "planning/device.h"
#include "planning/network/all_reduce.h"
#include "planning/network/network.h"
#include "planning/workload.h"
#include "scheduler/agreement.h"

namespace hvd_order::simulate {

/// Settings of a simulated training: ranks, network and order.
struct Scenario {
  std::vector<double> slowness = {1.0}; ///< by rank: factor on its times
  AllReduceCost network;

  ByteCount sliceBytes = ByteCount{4} << 20;
  ByteCount creditBytes = ByteCount{16} << 20;
  bool split = false; ///< whether all-reduces are split (SliceLayout); for `clipped`
  Policy policy = Policy::kPriority;
  AgreementKind agreement = AgreementKind::kLeader;
  std::vector<SliceIndex> plan; ///< order of SliceLayout's slices; for Policy::kPlanned
  double controlLatencyS = 0;   ///< latency of a message of the agreement
  double controlSendS = 0;      ///< time of its sender for it; a rank sends one after the other
  int fanOut = kFanOut;         ///< most children of a rank in the tree of ranks
  /// Time before the first gradient in which no large slice starts (scheduler/link_reservation.h);
  /// 0: no reservation.
  double reservationLeadS = 0;

  ComputeOrder order = ComputeOrder::kProgram;
  /// Whether the next step begins before all gradients have arrived.
  bool crossIteration = true;
  /// Whether the program clips gradients by the norm of all of them, so that no update may begin
  /// before the norm is known. Whole all-reduces tell it when all have arrived; the next step then
  /// begins after that, whatever `crossIteration` is. Split ones tell it by their squares.
  bool clipped = false;

  bool everyRank = false; ///< simulate all ranks, even those that compute identically
  /// Simulate the agreement of all ranks, each at its place in the tree. Else all ranks are
  /// children of rank 0, and those of one speed are one; for more than `fanOut` + 1 ranks that is
  /// an approximation, as it is wherever a message has a `controlSendS`.
  bool everyAgreement = false;
  std::uint32_t steps = 10;
  std::uint32_t recorded = 2; ///< number of steps, the last ones, to record
};

struct DeviceResult {
  double slowness;
  int ranks;                       ///< number of ranks that it represents
  std::vector<double> stepStartsS; ///< one more than steps; the last entry is the end
  std::vector<double> busyS;       ///< by stream, over all steps
  std::vector<OpRecord> ops;       ///< by recorded step and op, flattened
  std::vector<UpdateRecord> updates;
};

/// Result of a simulation; times in seconds since the start.
struct Result {
  std::vector<double> stepS; ///< by step: time until the next step starts, on the slowest rank
  double endS;               ///< time at which the last gradient has arrived
  double sentBytes;          ///< bytes sent by each rank, over all steps
  std::vector<DeviceResult> devices;
  double linkBusyS;                        ///< over all steps
  std::vector<Interval> linkBusy;          ///< busy intervals that ended in recorded steps
  std::vector<SliceRecord> slices;         ///< by recorded step and slice, flattened
  std::vector<AgreementTraffic> agreement; ///< by simulated half, over all steps
};

/// Returns the cut of a workload's gradients into slices; a plan lists these slices.
std::shared_ptr<const SliceLayout>
layoutOf(const Workload& workload, ByteCount sliceBytes, bool split = false);

/// Trains in virtual time, with the real scheduler and agreements. Equal inputs give equal
/// results, to the bit. The first step waits for no parameter, so the steady state begins after
/// it.
///
/// @throws InvalidUsage for an invalid scenario, or one that comes to a standstill; the message
/// then
///   names the op and the slice that wait.
Result simulate(const Workload& workload, const Scenario& scenario);

} // namespace hvd_order::simulate
