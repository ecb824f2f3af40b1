#include "c10d/all_reduce/c10d_transport.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <thread>

#include "base/error.h"
#include "base/thread_name.h"

namespace hvd_order {

namespace {

constexpr std::chrono::seconds kAbortTime{5};

std::exception_ptr errorOf(const c10::ivalue::Future& future) {
  return collectiveError(textOf(future.exception_ptr()));
}

} // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {}

void C10dTransport::allReduce(Sum sum) {
  std::vector<at::Tensor> tensors{sum.tensor};
  const c10::Device device = sum.tensor.device();
  if (device.is_cpu()) {
    const auto work = group_->allreduce(tensors);
    work->getFuture()->addCallback(
        [done = std::move(sum.done)](c10::ivalue::Future& future) {
          done(future.hasError() ? errorOf(future) : nullptr);
        },
        /*uses_future=*/false);
    return;
  }
  const c10::Stream stream = transferStream(device);
  const c10::StreamGuard guard(stream);
  for (const std::shared_ptr<StreamEvent>& event : sum.behind) {
    event->block(stream);
  }
  const auto work = group_->allreduce(tensors);
  // The future completes when the work is enqueued (NCCL) or has run on the host (Gloo). Only then
  // can a stream wait for its device part. The callback does not use the future's value: otherwise
  // PyTorch would make another stream wait for it.
  work->getFuture()->addCallback(
      [self = shared_from_this(), stream, work, enqueued = std::move(sum.enqueued),
       done = std::move(sum.done)](c10::ivalue::Future& future) {
        if (future.hasError()) {
          done(errorOf(future));
          return;
        }
        const c10::StreamGuard callbackGuard(stream);
        work->synchronize(); // orders `stream`, not this thread, behind the work
        const std::shared_ptr<StreamEvent> event = self->record(stream);
        enqueued(event);
        self->watch(event, [done, work](const std::exception_ptr& error) { done(error); });
      },
      /*uses_future=*/false);
}

void C10dTransport::orderTransfersBehind(const c10::Device& device) {
  if (!device.is_cpu()) {
    record(currentStream(device))->block(transferStream(device));
  }
}

// NCCL's abort calls the device, which may be stuck; so it has a thread of its own, and a deadline.
void C10dTransport::abort() noexcept {
  try {
    const auto aborted = std::make_shared<std::promise<void>>();
    std::thread([group = group_, aborted]() mutable {
      nameThisThread("hvdo abort");
      try {
        group->abort();
      } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
        // Some back ends cannot abort; their work then ends with the group's own timeout.
      }
      group.reset(); // before the transport, whose thread waits here, lets go of it
      aborted->set_value();
    }).detach();
    if (aborted->get_future().wait_for(kAbortTime) == std::future_status::timeout) {
      std::fprintf(
          stderr,
          "hvd_order: the transfers could not be cancelled within %lld s: the device does not "
          "answer; end this process (SIGKILL) if it does not end by itself\n",
          static_cast<long long>(kAbortTime.count()));
    }
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // No thread: the work ends with the group's own timeout.
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
