#include "planning/network/roles.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace hvd_order::simulate {

Roles rolesOf(
    const std::vector<double>& slowness,
    AgreementKind agreement,
    bool everyRank,
    bool everyAgreement) {
  if (slowness.empty()) {
    throw InvalidUsage("there are no ranks; give the slowness of at least one, 1 for normal speed");
  }
  for (const double factor : slowness) {
    if (!std::isfinite(factor) || factor <= 0) {
      throw InvalidUsage(
          concat("a rank is ", factor, " times as slow; a positive number is needed"));
    }
  }
  if (everyRank) {
    std::vector<DeviceIndex> agreements(slowness.size());
    std::iota(agreements.begin(), agreements.end(), 0);
    return {slowness, std::vector<double>(slowness.size(), 1.0), std::move(agreements)};
  }
  Roles roles;
  for (std::size_t rank = 0; rank < slowness.size(); ++rank) {
    const auto known = std::find(roles.slowness.begin(), roles.slowness.end(), slowness[rank]);
    const auto device = static_cast<DeviceIndex>(known - roles.slowness.begin());
    if (known == roles.slowness.end()) {
      roles.slowness.push_back(slowness[rank]);
      roles.ranksOf.push_back(0);
    }
    roles.ranksOf[device] += 1;
    const auto first = roles.agreements.begin() +
        (agreement == AgreementKind::kPlanned || rank == 0 ? 0 : 1); // rank 0's half is its own
    if (everyAgreement ||
        std::find(first, roles.agreements.end(), device) == roles.agreements.end()) {
      roles.agreements.push_back(device);
    }
  }
  return roles;
}

} // namespace hvd_order::simulate
