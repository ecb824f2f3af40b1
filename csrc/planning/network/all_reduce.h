#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "planning/clock.h"
#include "planning/device.h"
#include "planning/network/flows.h"
#include "planning/network/network.h"
#include "planning/network/roles.h"
#include "scheduler/agreement.h"
#include "scheduler/link_reservation.h"

namespace hvd_order::simulate {

/// Options of order and transfer.
struct AllReduceOptions {
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
  double finishedS; ///< summed, on all ranks
};

/// All-reduces ready gradients in virtual time, slice by slice, whole or in halves (SliceLayout),
/// with the scheduler and agreements that real runs use.
///
/// Events go in, arrivals come out. The exchange reports arrivals to the devices; its caller must
/// then call `proceed` on them.
class AllReduce final {
 public:
  AllReduce(
      std::shared_ptr<const SliceLayout> layout,
      const AllReduceOptions& options,
      const AllReduceCost& cost,
      const Roles& roles,
      Clock& clock,
      std::vector<Device>& devices);

  /// Gradients are ready on a device.
  void ready(DeviceIndex device, const std::vector<TensorId>& tensors);
  /// No task runs on a device; it waits for gradients.
  void deviceWaits(DeviceIndex device);
  /// Handles an event other than EventKind::kTaskEnd.
  void happened(const Event& event);
  /// The flow that ends next ends now.
  void flowEnded();
  /// Returns in words which slice of the tensor has not arrived, and what the slice waits for.
  [[nodiscard]] std::string describe(TensorId tensor) const;

  [[nodiscard]] const Flows& flows() const {
    return flows_;
  }
  /// Records of slices by recorded step and slice, flattened.
  [[nodiscard]] const std::vector<SliceRecord>& records() const {
    return records_;
  }
  /// Total bytes that each rank has sent.
  [[nodiscard]] double sentBytes() const {
    return sentBytes_;
  }
  /// By agreement half, over all steps.
  [[nodiscard]] const std::vector<AgreementTraffic>& agreementTraffic() const {
    return agreementTraffic_;
  }
  void startRecording() {
    flows_.startRecording();
  }

 private:
  struct Half {
    std::unique_ptr<Agreement> agreement;
    DeviceIndex device;
    bool speaks;            // reports arrivals to the device: its first half does
    double sendsUntilS = 0; // the time at which all its messages so far are sent
  };
  struct Message {
    std::size_t from;
    std::size_t to;
    std::vector<SliceKey> slices;
  };

  void heldReady(TensorId tensor, const std::vector<SliceKey>& slices);
  void reservationChanged();
  void drive(std::size_t half);
  void post(std::size_t from, SliceMessage&& message);
  void issued(SliceKey slice);
  void startWaiting();
  void carry(SliceIndex slice);
  void done(std::size_t half, SliceIndex slice);
  [[nodiscard]] const AllReduceCost& costOf(SliceIndex slice) const;
  /// Returns the slice's record in its present step; a scratch record if that is not recorded.
  SliceRecord& record(SliceIndex slice);
  [[nodiscard]] ByteCount bytesOf(SliceIndex slice) const {
    return layout_->slices()[slice].sizeBytes;
  }

  std::shared_ptr<const SliceLayout> layout_;
  AllReduceOptions options_;
  Flows flows_;
  Clock& clock_;
  std::vector<Device>& devices_;
  std::vector<std::uint32_t> rounds_; // by slice: number of times it has been summed
  double sentBytes_ = 0;
  std::vector<AgreementTraffic> agreementTraffic_;
  std::vector<SliceRecord> records_;
  SliceRecord unrecorded_{};
  AllReduceCost cost_;
  AllReduceCost splitCost_; // of a reduce-scatter or an all-gather
  std::vector<Half> halves_;
  std::vector<std::vector<std::size_t>> halvesOf_; // by device
  std::vector<std::size_t> issues_;                // by slice: halves that have issued it
  std::vector<SliceIndex> waiting_; // ring buffer: slices issued by all halves, without a lane
  std::size_t waitingHead_ = 0;
  std::size_t waitingCount_ = 0;
  std::uint32_t lanesTaken_ = 0;
  LinkReservation reservation_; // of rank 0
  Decisions decisions_;
  std::vector<Message> messages_; // messages under way, and free places
  std::vector<std::uint32_t> freeMessages_;
};

/// Id of the only model in the agreements.
constexpr ModelId kModel = 0;

} // namespace hvd_order::simulate
