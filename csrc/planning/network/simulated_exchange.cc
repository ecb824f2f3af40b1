#include "planning/network/simulated_exchange.h"

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

SimulatedExchange::SimulatedExchange(
    std::shared_ptr<const SliceLayout> layout,
    const SimulatedExchangeOptions& options,
    const std::vector<double>& linkCapacities,
    Clock& clock,
    std::vector<Device>& devices)
    : layout_(std::move(layout)),
      options_(options),
      flows_(linkCapacities),
      clock_(clock),
      devices_(devices),
      rounds_(layout_->slices().size()) {
  const std::size_t recorded = options.steps - std::min(options.recordFrom, options.steps);
  records_.resize(recorded * layout_->slices().size());
}

SliceRecord& SimulatedExchange::record(SliceIndex slice, std::uint32_t step) {
  if (step < options_.recordFrom) {
    return unrecorded_;
  }
  return records_[(step - options_.recordFrom) * layout_->slices().size() + slice];
}

} // namespace hvd_order::simulate
