#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "planning/clock.h"
#include "planning/device.h"
#include "planning/network/flows.h"
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

/// Options of order and transfer.
struct SimulatedExchangeOptions {
  AgreementKind agreement = AgreementKind::kLeader;
  Policy policy = Policy::kPriority;
  ByteCount creditBytes = 0;
  std::vector<SliceIndex> plan; ///< for Policy::kPlanned
  double controlLatencyS = 0;   ///< latency of a message of the agreement
  double controlSendS = 0;      ///< time of its sender for it
  int fanOut = kFanOut;         ///< of the tree of ranks
  double reservationLeadS = 0;  ///< see LinkReservation::retune
  std::uint32_t steps = 1;
  std::uint32_t recordFrom = 0;
};

/// What one half of the agreement has sent and received. A message holds any number of slices.
struct AgreementTraffic {
  std::uint64_t sentMessages = 0;
  std::uint64_t sentSlices = 0;
  std::uint64_t receivedMessages = 0;
  std::uint64_t receivedSlices = 0;
};

/// Times of a slice in one step, in seconds since the start.
struct SliceRecord {
  double readyS;    ///< on the rank that decides the order
  double issuedS;   ///< on all ranks
  double startedS;  ///< after its latency and after the slices ahead of it
  double summedS;   ///< over all ranks
  double finishedS; ///< on all ranks: summed, or pulled from the server
};

/// Moves ready gradients in virtual time, with the scheduler and agreements that real runs use.
///
/// Events go in, arrivals come out. The exchange reports arrivals to the devices; its caller must
/// then call `proceed` on them.
class SimulatedExchange {
 public:
  virtual ~SimulatedExchange() = default;

  /// Gradients are ready on a device.
  virtual void ready(DeviceIndex device, const std::vector<TensorId>& tensors) = 0;
  /// A device has ended a step and is about to begin another.
  virtual void stepEnded(DeviceIndex device) = 0;
  /// No task runs on a device; it waits for gradients.
  virtual void deviceWaits(DeviceIndex device) = 0;
  /// Handles an event other than EventKind::kTaskEnd.
  virtual void happened(const Event& event) = 0;
  /// The flow that ends next ends now.
  virtual void flowEnded() = 0;
  /// Returns in words which slice of the tensor has not arrived, and what the slice waits for.
  [[nodiscard]] virtual std::string describe(TensorId tensor) const = 0;
  /// Returns the name of a link of `flows`.
  [[nodiscard]] virtual std::string linkName(Flows::Link link) const = 0;

  [[nodiscard]] const Flows& flows() const {
    return flows_;
  }
  [[nodiscard]] const SliceLayout& layout() const {
    return *layout_;
  }
  /// Records of slices by recorded step and slice, flattened.
  [[nodiscard]] const std::vector<SliceRecord>& records() const {
    return records_;
  }
  /// Total bytes that each rank has sent.
  [[nodiscard]] double sentBytes() const {
    return sentBytes_;
  }
  /// By agreement half, over all steps; empty if the ranks do not agree.
  [[nodiscard]] const std::vector<AgreementTraffic>& agreementTraffic() const {
    return agreementTraffic_;
  }
  void startRecording() {
    flows_.startRecording();
  }

 protected:
  SimulatedExchange(
      std::shared_ptr<const SliceLayout> layout,
      const SimulatedExchangeOptions& options,
      const std::vector<double>& linkCapacities,
      Clock& clock,
      std::vector<Device>& devices);

  /// Returns the record of the slice in that step; a scratch record if the step is not recorded.
  SliceRecord& record(SliceIndex slice, std::uint32_t step);
  [[nodiscard]] ByteCount bytesOf(SliceIndex slice) const {
    return layout_->slices()[slice].sizeBytes;
  }

  std::shared_ptr<const SliceLayout> layout_;
  SimulatedExchangeOptions options_;
  Flows flows_;
  Clock& clock_;
  std::vector<Device>& devices_;
  std::vector<std::uint32_t> rounds_; // by slice: number of times it has been summed
  double sentBytes_ = 0;
  std::vector<AgreementTraffic> agreementTraffic_;

 private:
  std::vector<SliceRecord> records_;
  SliceRecord unrecorded_{};
};

/// Id of the only model in the agreements.
constexpr ModelId kModel = 0;

} // namespace hvd_order::simulate
