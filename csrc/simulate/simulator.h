#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "scheduler/agreement.h"
#include "simulate/device.h"
#include "simulate/iteration.h"
#include "simulate/network.h"
#include "simulate/workload.h"

namespace hvd_order::simulate {

/// How a workload is trained: on which ranks, over which network, in which order.
struct Scenario {
  std::vector<double> slowness = {1.0}; ///< of each rank: its times are multiplied by it
  std::variant<AllReduceCost, ServerNetwork> network;

  ByteCount sliceBytes = ByteCount{4} << 20;
  ByteCount creditBytes = ByteCount{16} << 20;
  Policy policy = Policy::kPriority;
  AgreementKind agreement = AgreementKind::kLeader;
  std::vector<SliceIndex> plan; ///< of SliceLayout's slices; for Policy::kPlanned
  double controlLatencyS = 0;   ///< of a message of the agreement
  /// One lead before the first gradient no large slice begins any more (engine/hold.h); 0: never.
  double reservationLeadS = 0;

  ComputeOrder order = ComputeOrder::kProgram;
  /// Whether the next step begins before all gradients have arrived. Servers that are asked at the
  /// next step (Pull::kNextStep) have a rule of their own.
  bool crossStep = true;

  bool everyRank = false; ///< simulate all ranks, also those that do the same as another
  std::uint32_t steps = 10;
  std::uint32_t recorded = 2; ///< of how many steps, the last ones, to keep records
};

struct DeviceResult {
  double slowness;
  int ranks;                       ///< it stands for
  std::vector<double> stepStartsS; ///< one more than steps: the last is the end
  std::vector<double> busyS;       ///< by stream, in all steps
  std::vector<OpRecord> ops;       ///< by recorded step and op, flattened
  std::vector<UpdateRecord> updates;
};

struct LinkResult {
  std::string name;
  double busyS;               ///< in all steps
  std::vector<Interval> busy; ///< that ended in recorded steps
};

/// What happened; seconds since the start.
struct Result {
  std::vector<double> stepS; ///< by step: from its start to the next one's, of the slowest rank
  double endS;               ///< the last gradient has arrived
  double sentBytes;          ///< that left each rank, in all steps
  std::vector<DeviceResult> devices;
  std::vector<LinkResult> links;
  std::vector<SliceRecord> slices; ///< by recorded step and slice, flattened
};

/// How the gradients of a workload are cut: what a plan counts.
std::shared_ptr<const SliceLayout> layoutOf(const Workload& workload, ByteCount sliceBytes);

/// Trains in virtual time, with the real scheduler and agreements. The same input gives the same
/// result, to the bit. The first step waits for no parameter, so the steady state comes after it.
///
/// @throws InvalidUsage for a scenario that cannot be, among them one that comes to a standstill:
///   the message names the op and the slice that wait.
Result simulate(const Workload& workload, const Scenario& scenario);

} // namespace hvd_order::simulate
