#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "streams.h"

namespace test_device {

/// Set once, when a group is aborted.
class AbortFlag final {
 public:
  void set();
  /// @return whether it was set within a minute.
  bool await();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

/// A back end for tensors of the device that behaves as ProcessGroupNCCL does: a collective returns
/// when it is enqueued on a stream of the group, behind the caller's current stream; `synchronize`
/// makes the current stream wait. On the stream, Gloo works on the host's memory. A collective
/// whose peer is lost keeps its stream busy until `abort`; the stream then goes on.
class AsyncBackend final : public c10d::Backend {
 public:
  AsyncBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo);

  const std::string getBackendName() const override {
    return "asyncdev";
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<std::int64_t>& outputSizes,
      std::vector<std::int64_t>& inputSizes,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  void abort() override;

  [[nodiscard]] std::int64_t stream() const {
    return stream_;
  }
  [[nodiscard]] int allReduces() const {
    return allReduces_;
  }
  /// A collective takes at least `latency` and bytes * secondsPerByte on the stream.
  void setLink(double latencySeconds, double secondsPerByte);

 private:
  c10::intrusive_ptr<c10d::Work> enqueue(
      c10d::OpType kind,
      std::size_t bytes,
      std::function<c10::intrusive_ptr<c10d::Work>()> start);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::shared_ptr<AbortFlag> aborted_ = std::make_shared<AbortFlag>();
  const std::int64_t stream_;
  std::atomic<int> allReduces_ = 0;
  std::atomic<double> latencySeconds_ = 0;
  std::atomic<double> secondsPerByte_ = 0;
};

} // namespace test_device
