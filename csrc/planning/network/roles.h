#pragma once

#include <vector>

#include "planning/device.h"
#include "scheduler/agreement.h"

namespace hvd_order::simulate {

/// Devices and agreement halves that represent the ranks; see `rolesOf`.
struct Roles {
  std::vector<double> slowness;        ///< by device
  std::vector<double> ranksOf;         ///< by device: number of ranks that it represents
  std::vector<DeviceIndex> agreements; ///< by simulated agreement half: its device
};

/// Returns the fewest devices and agreement halves to simulate. Ranks of one speed compute the
/// same at the same times, and those followers of one speed that are children of rank 0 behave
/// identically in every agreement. So there is one device for each speed. There is one agreement
/// half for rank 0 and one for the followers of each speed, as if all were children of rank 0.
/// Under a plan no rank is special, so there is one half for each speed.
/// @param slowness factor on the times of each rank.
/// @param everyRank simulate all ranks nevertheless.
/// @param everyAgreement simulate the agreement halves of all ranks, in their tree.
/// @throws InvalidUsage if there are no ranks or a slowness is not positive.
Roles rolesOf(
    const std::vector<double>& slowness,
    AgreementKind agreement,
    bool everyRank,
    bool everyAgreement);

} // namespace hvd_order::simulate
