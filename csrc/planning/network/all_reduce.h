#pragma once

#include <memory>
#include <string>
#include <vector>

#include "planning/network/network.h"
#include "planning/network/simulated_exchange.h"
#include "scheduler/link_reservation.h"

namespace hvd_order::simulate {

/// An exchange that all-reduces slices, whole or in halves (SliceLayout), in an order that the
/// ranks agree on.
class AllReduce final : public SimulatedExchange {
 public:
  AllReduce(
      std::shared_ptr<const SliceLayout> layout,
      const SimulatedExchangeOptions& options,
      const AllReduceCost& cost,
      const Roles& roles,
      Clock& clock,
      std::vector<Device>& devices);

  void ready(DeviceIndex device, const std::vector<TensorId>& tensors) override;
  void stepEnded(DeviceIndex /*device*/) override {}
  void deviceWaits(DeviceIndex device) override;
  void happened(const Event& event) override;
  void flowEnded() override;
  [[nodiscard]] std::string describe(TensorId tensor) const override;
  [[nodiscard]] std::string linkName(Flows::Link /*link*/) const override {
    return "link";
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

} // namespace hvd_order::simulate
