#include "c10d/all_reduce/c10d_transport.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/error.h"

namespace hvd_order {

namespace {

std::exception_ptr errorOf(const c10::ivalue::Future& future) {
  return collectiveError(textOf(future.exception_ptr()));
}

} // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {}

void C10dTransport::allReduce(const at::Tensor& tensor, const std::string& /*name*/, Done done) {
  std::vector<at::Tensor> tensors{tensor};
  const c10::Device device = tensor.device();
  if (device.is_cpu()) {
    const auto work = group_->allreduce(tensors);
    work->getFuture()->addCallback(
        [done = std::move(done)](c10::ivalue::Future& future) {
          done(future.hasError() ? errorOf(future) : nullptr);
        },
        /*uses_future=*/false);
    return;
  }
  const c10::Stream stream = transferStream(device);
  const c10::StreamGuard guard(stream);
  const auto work = group_->allreduce(tensors);
  // The future completes when the work is enqueued (NCCL) or has run on the host (Gloo). Only then
  // can the transport wait for its device part. The callback does not use the future's value:
  // otherwise PyTorch would make another stream wait for it.
  work->getFuture()->addCallback(
      [self = shared_from_this(), stream, work,
       done = std::move(done)](c10::ivalue::Future& future) {
        if (future.hasError()) {
          done(errorOf(future));
          return;
        }
        const c10::StreamGuard callbackGuard(stream);
        work->synchronize(); // orders `stream`, not this thread, behind the work
        self->whenDone(
            stream, [done, work](const std::exception_ptr& error) { done(error); });
      },
      /*uses_future=*/false);
}

void C10dTransport::abort() noexcept {
  try {
    group_->abort();
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // Some back ends cannot abort; their work then ends with the group's own timeout.
  }
}

c10::Stream C10dTransport::transferStream(const c10::Device& device) {
  const std::scoped_lock lock(mutex_);
  const auto known = std::find_if(
      transferStreams_.begin(), transferStreams_.end(),
      [&](const c10::Stream& stream) { return stream.device() == device; });
  if (known != transferStreams_.end()) {
    return *known;
  }
  const c10::impl::VirtualGuardImpl backend(device.type());
  transferStreams_.push_back(backend.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  return transferStreams_.back();
}

} // namespace hvd_order
