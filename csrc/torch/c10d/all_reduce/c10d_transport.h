#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "torch/c10d/all_reduce/coded_halves.h"
#include "torch/c10d/all_reduce/split_all_reduce.h"
#include "torch/c10d/torch_transport.h"

namespace hvd_order {

/// Carries slices over a torch.distributed process group of any back end.
///
/// On the CPU a slice is done when the future of its work completes. On a device, work is enqueued
/// on a stream of its own, and the slice is done when an event after it has happened; readers need
/// not wait for that on the host (`orderBehindSums`). Readiness of a gradient is an event too
/// (`whenReady`), because the hook runs when the kernel is enqueued, not when it has run.
class C10dTransport final : public TorchTransport,
                            public std::enable_shared_from_this<C10dTransport> {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group);

  void orderTransfersBehind(const c10::Device& device) override;
  void abort() noexcept override;

  /// Sets how the halves of a split all-reduce travel; the same on every rank. Nothing may be in
  /// flight.
  void setHalfForms(HalfForm reduceScatter, HalfForm allGather);

  /// Makes encoded sums travel in two levels; the same hosts on every rank. Nothing may be in
  /// flight. The parameters are those of `CodedHalves`.
  void setHosts(
      const std::vector<int>& hosts,
      const CodedHalves::Group& between,
      const CodedHalves::Group& scatter,
      const CodedHalves::Group& gather);

 private:
  struct Course;

  void begin(Sum sum) override;
  [[nodiscard]] bool hasHalves() const override {
    return true;
  }
  [[nodiscard]] int codingRanks() const override;
  [[nodiscard]] Shard shard(std::int64_t elements) const override;
  [[nodiscard]] Rank rank() const override;
  std::vector<Hop> hopsOf(const Sum& sum);
  StartedTransfer startOf(const Sum& sum);
  void proceed(const std::shared_ptr<Course>& course);
  void launch(const std::shared_ptr<Course>& course);
  static void arrived(
      const std::shared_ptr<C10dTransport>& self,
      const std::shared_ptr<Course>& course,
      const StartedTransfer& transfer);
  [[nodiscard]] bool canIssueAhead() const override {
    return true;
  }
  c10::Stream transferStream(const c10::Device& device);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<CodedHalves> coded_;
  const std::shared_ptr<PartsPool> parts_ = std::make_shared<PartsPool>();
  std::atomic<HalfForm> reduceScatterForm_ = HalfForm::kCollective;
  std::atomic<HalfForm> allGatherForm_ = HalfForm::kCollective;
  std::mutex mutex_;                         // guards what follows
  std::vector<c10::Stream> transferStreams_; // one for each device in use
};

} // namespace hvd_order
