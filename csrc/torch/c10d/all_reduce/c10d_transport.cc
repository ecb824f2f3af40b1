#include "torch/c10d/all_reduce/c10d_transport.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <thread>

#include "base/error.h"
#include "base/thread_name.h"
#include "torch/c10d/all_reduce/coded_halves.h"

// Sums by collectives of torch.distributed: the end of a gradient's way, where its bytes leave.
//
// `begin` is called in the agreed order, so all ranks call the same collectives in the same order,
// as torch.distributed requires. A whole sum is one all-reduce in place. A half is a reduce-scatter
// or an all-gather of this rank's shard, in one of the forms of
// split_all_reduce.cc, or encoded (coded_halves.cc).
//
// On the CPU the collective's future calls back when the bytes are there. On a device the future
// completes when the work is enqueued (NCCL), or has run on the host (Gloo). Transfers therefore
// have a stream of their own for each device, of high priority: it waits for the events of the
// gradients (`Sum::behind`), carries the collectives in the agreed order, and an event behind each
// tells when its sum is there.
//
// Invariant: nothing here waits, apart from `abort`, which has a limit. What a callback throws goes
// to `done`: the future would swallow it, and nobody would hear of the end.

namespace hvd_order {

namespace {

constexpr std::chrono::seconds kAbortTime{5};

std::exception_ptr errorOf(const c10::ivalue::Future& future) {
  return collectiveError(textOf(future.exception_ptr()));
}

} // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {}

void C10dTransport::setHalfForms(HalfForm reduceScatter, HalfForm allGather) {
  reduceScatterForm_ = reduceScatter;
  allGatherForm_ = allGather;
}

int C10dTransport::codingRanks() const {
  return group_->getSize();
}

Shard C10dTransport::shard(std::int64_t elements) const {
  return shardOf(elements, group_->getRank(), group_->getSize());
}

Rank C10dTransport::rank() const {
  return group_->getRank();
}

StartedTransfer C10dTransport::transferOf(const Sum& sum) {
  if (sum.operation == Operation::kAllReduce) {
    std::vector<at::Tensor> tensors{sum.tensor};
    return {group_->allreduce(tensors), [] {}};
  }
  const at::NoGradGuard noGrad;
  c10d::Backend& backend = *group_->getBackend(sum.tensor.device().type());
  if (sum.operation == Operation::kAllGather) {
    return sum.coding ? allGatherCoded(backend, sum.tensor, sum.coding, *parts_)
                      : allGather(backend, sum.tensor, allGatherForm_, *parts_);
  }
  StartedTransfer half = sum.coding
      ? reduceScatterCoded(backend, sum.tensor, sum.coding, *parts_)
      : reduceScatter(backend, sum.tensor, reduceScatterForm_, *parts_);
  half.finish = [sums = std::move(half.finish), reduced = sum.reduced] {
    sums();
    reduced();
  };
  return half;
}

void C10dTransport::begin(Sum sum) {
  const c10::Device device = sum.tensor.device();
  if (device.is_cpu()) {
    const StartedTransfer transfer = transferOf(sum);
    transfer.work->getFuture()->addCallback(
        [done = std::move(sum.done), finish = transfer.finish](c10::ivalue::Future& future) {
          if (future.hasError()) {
            done(errorOf(future));
            return;
          }
          try {
            finish();
          } catch (...) {
            done(std::current_exception());
            return;
          }
          done(nullptr);
        },
        /*uses_future=*/false);
    return;
  }
  const c10::Stream stream = transferStream(device);
  const c10::StreamGuard guard(stream);
  for (const std::shared_ptr<StreamEvent>& event : sum.behind) {
    event->block(stream);
  }
  const StartedTransfer transfer = transferOf(sum);
  // The future completes when the work is enqueued (NCCL) or has run on the host (Gloo). Only then
  // can a stream wait for its device part. The callback does not use the future's value: otherwise
  // PyTorch would make another stream wait for it.
  transfer.work->getFuture()->addCallback(
      [self = shared_from_this(), stream, transfer, enqueued = std::move(sum.enqueued),
       done = std::move(sum.done)](c10::ivalue::Future& future) {
        if (future.hasError()) {
          done(errorOf(future));
          return;
        }
        try {
          std::shared_ptr<StreamEvent> event;
          {
            const c10::StreamGuard callbackGuard(stream);
            transfer.work->synchronize(); // orders `stream`, not this thread, behind the work
            transfer.finish();
            event = self->record(stream);
          }
          enqueued(event);
          self->watch(event, [done, transfer](const std::exception_ptr& error) { done(error); });
        } catch (...) { // the future would swallow it, and nobody would hear of the end
          done(std::current_exception());
        }
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
