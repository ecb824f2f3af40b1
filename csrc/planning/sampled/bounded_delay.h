#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "planning/clock.h"
#include "planning/sampled/sampled_step.h"
#include "planning/sampled/sampled_training.h"
#include "planning/sampled/step_tables.h"
#include "servers/admission/delay_order.h"
#include "servers/admission/push_windows.h"
#include "servers/admission/routes.h"

namespace hvd_order::simulate {

/// Which worker may push a tensor next, and by which way, where the delay of updates is bounded.
///
/// The rules are those of the servers, by their own classes: delay_order.h orders the requests of a
/// tensor, push_windows.h limits the pushes of each worker that are on their way, and routes.h
/// chooses between the owner and a helper. csrc/servers/slice/slice_admission.cc applies them to
/// frames, this class to simulated time. Servers are not lost here, and tensors do not move.
class BoundedDelay final {
 public:
  /// Is told what has been decided about a worker's push. May ask again at once.
  class AdmissionListener {
   public:
    AdmissionListener() = default;
    AdmissionListener(const AdmissionListener&) = delete;
    AdmissionListener& operator=(const AdmissionListener&) = delete;
    /// The worker may send the push to `push.server`: the owner, or a helper.
    virtual void admitted(const Transfer& push) = 0;
    /// The update cannot be applied in time and is not sent; it counts as made.
    virtual void tooLate(const Transfer& push) = 0;

   protected:
    ~AdmissionListener() = default;
  };

  /// The first three must outlive this object.
  BoundedDelay(
      const SampledTraining& training,
      const StepTables& tables,
      const Clock& clock,
      const SampledStep& step,
      AdmissionListener& listener);
  BoundedDelay(const BoundedDelay&) = delete;
  BoundedDelay& operator=(const BoundedDelay&) = delete;
  ~BoundedDelay();

  /// A worker's request has come to the owner.
  void ask(const Transfer& push);
  /// A push has come to its helper. @return whether all of its group are there.
  bool partCame(TensorId number);
  /// The admitted push, or the helper's sum, has come to the owner, and waits to be applied.
  void came(TensorId number);
  /// It has been applied. @return the pushes in it: one, or all of a group.
  std::vector<Transfer> applied(TensorId number);
  /// Admits what can be admitted after that; to be called once the answers are on their way.
  void proceed(TensorId number);

  /// The owner sends the worker its present value.
  void answers(TensorId number, std::uint32_t worker);
  /// The worker has that value.
  void reads(TensorId number, std::uint32_t worker);

  /// The largest number of other updates between a worker's read and the application of its update.
  [[nodiscard]] std::uint32_t longestDelay() const {
    return longestDelay_;
  }

 private:
  struct SimulatedRequest {
    Transfer push;
    std::uint32_t read; // version that the worker had when it asked
    bool isServed = false;
  };
  struct SimulatedAdmission {
    std::vector<SimulatedRequest> asks; // one, or those of a group
    ServerId helper = Routes::kDirect;
    double sinceS = 0;
    std::size_t parts = 0; // of a group, at its helper
  };
  struct SimulatedTensor {
    std::uint32_t version = 0;       // updates applied
    std::vector<std::uint32_t> sent; // by worker: version of the answer on its way
    std::vector<std::uint32_t> read; // by worker: version of the last answer
    std::vector<SimulatedRequest> asks;
    std::optional<SimulatedAdmission> admission;
    std::optional<SimulatedAdmission> arrived; // waits to be applied: nothing is admitted meanwhile
  };
  /// What a server knows of the connections that lead to it.
  struct Room {
    PushWindows windows;       // of workers
    PushWindows helperWindows; // by server
    Routes routes;
  };
  class WaitingTensor;

  void admitNext(TensorId number);
  [[nodiscard]] std::vector<WaitingUpdate> waitingUpdates(
      const SimulatedTensor& tensor,
      TensorId number) const;
  void admitOneOf(
      SimulatedTensor& tensor,
      TensorId number,
      std::vector<std::size_t> candidates,
      const std::vector<WaitingUpdate>& updates);
  bool
  admitGroup(SimulatedTensor& tensor, TensorId number, const std::vector<WaitingUpdate>& updates);
  [[nodiscard]] Room& roomOf(TensorId number) const;
  [[nodiscard]] PushWindows::Key keyOf(TensorId number) const;

  const std::uint32_t bound_;
  const bool aggregates_;
  const StepTables& tables_;
  const Clock& clock_;
  const std::vector<ByteCount>& sizes_;
  AdmissionListener& listener_;
  std::vector<SliceIndex> urgency_; // by tensor: place in the order of the pushes' priorities
  std::vector<SimulatedTensor> tensors_;
  std::vector<std::unique_ptr<Room>> rooms_;            // by server
  std::vector<std::shared_ptr<WaitingTensor>> waiters_; // by tensor
  std::vector<std::pair<PushWindows*, int>> freed_;
  std::uint32_t longestDelay_ = 0;
};

} // namespace hvd_order::simulate
