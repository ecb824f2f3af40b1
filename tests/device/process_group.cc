#include "process_group.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace test_device {

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

c10::Stream torchStream(std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

/// A view of the device's memory for Gloo. The caller's tensor must live until the work has run, as
/// with NCCL.
at::Tensor onCpu(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()));
}

class AsyncWork final : public c10d::Work {
 public:
  AsyncWork(int rank, c10d::OpType kind, std::int64_t stream)
      : Work(rank, kind),
        end_(c10::DeviceType::PrivateUse1),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()),
                std::vector<c10::Device>{kDevice})) {
    const c10::StreamGuard guard(torchStream(stream));
    end_.record(torchStream(stream));
    future_->markCompleted(std::vector<at::Tensor>{});
  }
  bool isCompleted() override {
    return end_.query();
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    end_.block(torchStream(currentStream()));
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::Event end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace

void AbortFlag::set() {
  const std::scoped_lock lock(mutex_);
  set_ = true;
  changed_.notify_all();
}

bool AbortFlag::await() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::minutes(1), [&] { return set_; });
}

AsyncBackend::AsyncBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo)
    : Backend(rank, size), gloo_(std::move(gloo)), stream_(Device::get().newStream()) {}

void AsyncBackend::setLink(double latencySeconds, double secondsPerByte) {
  latencySeconds_ = latencySeconds;
  secondsPerByte_ = secondsPerByte;
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::enqueue(
    c10d::OpType kind,
    std::size_t bytes,
    std::function<c10::intrusive_ptr<c10d::Work>()> start) {
  Event before;
  record(before, currentStream());
  test_device::wait(before, stream_);
  const std::chrono::duration<double> least(
      latencySeconds_ + static_cast<double>(bytes) * secondsPerByte_);
  Device::get().stream(stream_).enqueue([start = std::move(start), least, aborted = aborted_] {
    const auto end = Clock::now() + least;
    try {
      start()->wait();
    } catch (...) {
      if (!aborted->await()) {
        throw;
      }
      return;
    }
    std::this_thread::sleep_until(end);
  });
  return c10::make_intrusive<AsyncWork>(getRank(), kind, stream_);
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& options) {
  ++allReduces_;
  const std::size_t bytes = tensors.at(0).nbytes();
  return enqueue(
      c10d::OpType::ALLREDUCE, bytes, [gloo = gloo_, view = onCpu(tensors.at(0)), options] {
        std::vector<at::Tensor> views{view};
        return gloo->allreduce(views, options);
      });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& options) {
  return enqueue(c10d::OpType::BROADCAST, 0, [gloo = gloo_, view = onCpu(tensors.at(0)), options] {
    std::vector<at::Tensor> views{view};
    return gloo->broadcast(views, options);
  });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> targets;
  for (const at::Tensor& output : outputs.at(0)) {
    targets.push_back(onCpu(output));
  }
  return enqueue(
      c10d::OpType::ALLGATHER, 0,
      [gloo = gloo_, targets = std::move(targets), source = onCpu(inputs.at(0)), options] {
        std::vector<std::vector<at::Tensor>> all{targets};
        std::vector<at::Tensor> mine{source};
        return gloo->allgather(all, mine, options);
      });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return enqueue(
      c10d::OpType::_REDUCE_SCATTER_BASE, input.nbytes() / 2,
      [gloo = gloo_, out = onCpu(output), in = onCpu(input), rank = getRank(), options] {
        std::vector<at::Tensor> sums{in.clone()}; // Gloo has no reduce-scatter of its own
        c10d::AllreduceOptions sum;
        sum.timeout = options.timeout;
        const auto work = gloo->allreduce(sums, sum);
        work->wait();
        out.copy_(sums[0].narrow(0, rank * out.numel(), out.numel()));
        return work;
      });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return enqueue(
      c10d::OpType::_ALLGATHER_BASE, output.nbytes() / 2,
      [gloo = gloo_, out = onCpu(output), in = onCpu(input), options]() mutable {
        return gloo->_allgather_base(out, in, options);
      });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<std::int64_t>& outputSizes,
    std::vector<std::int64_t>& inputSizes,
    const c10d::AllToAllOptions& options) {
  return enqueue(
      c10d::OpType::ALLTOALL_BASE, input.nbytes(),
      [gloo = gloo_, out = onCpu(output), in = onCpu(input), outputSizes, inputSizes,
       options]() mutable {
        return gloo->alltoall_base(out, in, outputSizes, inputSizes, options);
      });
}

c10::intrusive_ptr<c10d::Work> AsyncBackend::barrier(const c10d::BarrierOptions& options) {
  return enqueue(
      c10d::OpType::BARRIER, 0, [gloo = gloo_, options] { return gloo->barrier(options); });
}

void AsyncBackend::abort() {
  gloo_->abort();
  aborted_->set();
}

} // namespace test_device
