#pragma once

#include <memory>
#include <string>
#include <vector>

#include "planning/network/network.h"
#include "planning/network/simulated_exchange.h"
#include "scheduler/scheduler.h"

namespace hvd_order::simulate {

/// An exchange with parameter servers. Workers push slices; a server updates a slice once all
/// workers have pushed it; workers pull the result.
///
/// Workers need not agree on an order. Each pushes in its own order, within its own credit, which
/// returns when the push has ended. Pulls of a worker have an order and a credit of their own.
class ServerExchange final : public SimulatedExchange {
 public:
  ServerExchange(
      std::shared_ptr<const SliceLayout> layout,
      const SimulatedExchangeOptions& options,
      const ServerNetwork& network,
      const Roles& roles,
      Clock& clock,
      std::vector<Device>& devices);

  void ready(DeviceIndex device, const std::vector<TensorId>& tensors) override;
  void stepEnded(DeviceIndex device) override;
  void deviceWaits(DeviceIndex /*device*/) override {}
  void happened(const Event& event) override;
  void flowEnded() override;
  [[nodiscard]] std::string describe(TensorId tensor) const override;
  [[nodiscard]] std::string linkName(Flows::Link link) const override;

 private:
  struct WorkerSchedulers {
    std::unique_ptr<Agreement> push;         // an agreement of one rank
    std::unique_ptr<Scheduler> pull;         // over a layout whose tensors are the slices
    std::vector<std::uint32_t> slicesToPull; // by tensor
    double ranks;                            // number of ranks that it represents
  };
  struct SliceTransfer {
    DeviceIndex worker;
    SliceIndex slice;
    bool isPull;
  };

  [[nodiscard]] SliceTransfer transferOf(std::uint32_t number) const;
  void begin(SliceTransfer transfer);
  void carry(SliceTransfer transfer);
  void drivePush(DeviceIndex worker);
  void drivePull(DeviceIndex worker);
  void offerPull(DeviceIndex worker, SliceIndex slice);
  void pushed(SliceIndex slice);
  void updated(SliceIndex slice);
  void pulled(DeviceIndex worker, SliceIndex slice);

  ServerNetwork network_;
  std::vector<WorkerSchedulers> workers_; // one for each device
  std::vector<std::uint32_t> serverOf_;
  std::vector<std::size_t> pushes_;    // by slice: workers whose push has ended
  std::vector<std::size_t> pullsToGo_; // by slice: workers that have not pulled
  std::vector<std::uint32_t> pullRounds_;
  std::vector<double> serverFreeS_; // by server: time at which its queue is done
  std::size_t summed_ = 0;          // slices updated in this step
  Decisions decisions_;
};

} // namespace hvd_order::simulate
