#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "scheduler/agreement.h"
#include "simulate/clock.h"
#include "simulate/device.h"
#include "simulate/flows.h"

namespace hvd_order::simulate {

/// Which ranks share what: see `rolesOf`.
struct Roles {
  std::vector<double> slowness;        ///< by device
  std::vector<double> ranksOf;         ///< by device: how many ranks it stands for
  std::vector<DeviceIndex> agreements; ///< by simulated half of the agreement: its device
};

/// The least that has to be simulated. Ranks of one speed compute the same at the same times, and
/// followers of one speed do the same in every agreement. So there is one device for each speed; of
/// the agreement rank 0's half, and one follower's for each speed, or under a plan, where no rank
/// is special, one for each speed.
/// @param slowness of each rank, by which its times are multiplied.
/// @param everyRank simulates all ranks nevertheless.
/// @throws InvalidUsage without ranks and for a slowness that is not positive.
Roles rolesOf(const std::vector<double>& slowness, AgreementKind agreement, bool everyRank);

/// What decides the order and moves the bytes.
struct ExchangeOptions {
  AgreementKind agreement = AgreementKind::kLeader;
  Policy policy = Policy::kPriority;
  ByteCount creditBytes = 0;
  std::vector<SliceIndex> plan; ///< for Policy::kPlanned
  double controlLatencyS = 0;   ///< of a message of the agreement
  double reservationLeadS = 0;  ///< as LinkReservation::retune
  std::uint32_t steps = 1;
  std::uint32_t recordFrom = 0;
};

/// A slice's journey in one step; seconds since the start.
struct SliceRecord {
  double readyS;    ///< where the order is decided
  double issuedS;   ///< on all ranks
  double startedS;  ///< after the latency and behind slices ahead of it
  double summedS;   ///< over all ranks
  double finishedS; ///< everywhere: summed, or pulled from the server
};

/// Moves ready gradients in virtual time, with the scheduler and agreements that real runs use.
///
/// Events go in, arrivals come out. A device is told of an arrival and has to be made to proceed.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Gradients are ready on a device.
  virtual void ready(DeviceIndex device, const std::vector<TensorId>& tensors) = 0;
  /// A device has ended a step and is about to begin another.
  virtual void stepEnded(DeviceIndex device) = 0;
  /// Nothing runs on a device; it waits for gradients.
  virtual void deviceWaits(DeviceIndex device) = 0;
  /// An event other than Event::Kind::kTaskEnd.
  virtual void happened(const Event& event) = 0;
  /// The flow that ends next has come to its end, now.
  virtual void flowEnded() = 0;
  /// Which slice of the tensor has not arrived, and what it waits for.
  [[nodiscard]] virtual std::string describe(TensorId tensor) const = 0;
  /// Of a link of `flows`.
  [[nodiscard]] virtual std::string linkName(Flows::Link link) const = 0;

  [[nodiscard]] const Flows& flows() const {
    return flows_;
  }
  [[nodiscard]] const SliceLayout& layout() const {
    return *layout_;
  }
  /// By recorded step and slice, flattened.
  [[nodiscard]] const std::vector<SliceRecord>& records() const {
    return records_;
  }
  /// That have left each rank, in all.
  [[nodiscard]] double sentBytes() const {
    return sentBytes_;
  }
  void startRecording() {
    flows_.startRecording();
  }

 protected:
  Exchange(
      std::shared_ptr<const SliceLayout> layout,
      const ExchangeOptions& options,
      const std::vector<double>& linkCapacities,
      Clock& clock,
      std::vector<Device>& devices);

  /// The record of the slice in that step, or one that nobody reads.
  SliceRecord& record(SliceIndex slice, std::uint32_t step);
  [[nodiscard]] ByteCount bytesOf(SliceIndex slice) const {
    return layout_->slices()[slice].sizeBytes;
  }

  std::shared_ptr<const SliceLayout> layout_;
  ExchangeOptions options_;
  Flows flows_;
  Clock& clock_;
  std::vector<Device>& devices_;
  std::vector<std::uint32_t> rounds_; // by slice: how often it has been summed
  double sentBytes_ = 0;

 private:
  std::vector<SliceRecord> records_;
  SliceRecord unrecorded_{};
};

/// The model's only number in the agreements.
constexpr ModelId kModel = 0;

} // namespace hvd_order::simulate
