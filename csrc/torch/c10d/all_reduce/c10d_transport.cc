#include "torch/c10d/all_reduce/c10d_transport.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/thread_name.h"
#include "torch/c10d/all_reduce/coded_halves.h"

// Sums by collectives of torch.distributed: the end of a gradient's way, where its bytes leave.
//
// `begin` is called in the agreed order, so all ranks call the same collectives in the same order,
// as torch.distributed requires. A whole sum is one all-reduce in place. A half is a reduce-scatter
// or an all-gather of this rank's shard, in one of the forms of split_all_reduce.cc, or encoded
// (coded_halves.cc); or, where several ranks share a host, encoded in several hops
// (coded_halves.cc).
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

/// Lets go of a transport on another thread if nobody else has it: with it go its groups, which
/// join their threads, and this is one of them.
void letGo(std::shared_ptr<C10dTransport> transport) {
  if (transport.use_count() == 1) {
    std::thread([transport = std::move(transport)] {}).detach();
  }
}

} // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  std::vector<int> hosts(static_cast<std::size_t>(group_->getSize()));
  std::iota(hosts.begin(), hosts.end(), 0);
  setHosts(hosts, group_, nullptr, nullptr);
}

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

void C10dTransport::setHosts(
    const std::vector<int>& hosts,
    const CodedHalves::Group& between,
    const CodedHalves::Group& scatter,
    const CodedHalves::Group& gather) {
  coded_ = std::make_shared<CodedHalves>(hosts, group_->getRank(), between, scatter, gather);
}

StartedTransfer C10dTransport::startOf(const Sum& sum) {
  if (sum.operation == Operation::kAllReduce) {
    std::vector<at::Tensor> tensors{sum.tensor};
    return {group_->allreduce(tensors), [] {}};
  }
  c10d::Backend& backend = *group_->getBackend(sum.tensor.device().type());
  return sum.operation == Operation::kAllGather
      ? allGather(backend, sum.tensor, allGatherForm_, *parts_)
      : reduceScatter(backend, sum.tensor, reduceScatterForm_, *parts_);
}

/// A sum under way, or a half of one: the collectives that it takes, one behind the other.
struct C10dTransport::Course {
  Sum sum;
  std::optional<c10::Stream> stream; ///< that carries the collectives; none on the CPU
  std::vector<Hop> hops;
  std::vector<std::uint64_t> places; ///< of the hops in their lanes
  std::size_t now = 0;               ///< the hop under way

  /// Ends with an error. Its later hops give way to other sums.
  void fail(const std::exception_ptr& error) {
    for (std::size_t hop = now + 1; hop < hops.size(); ++hop) {
      hops[hop].lane->start(places[hop], [] {});
    }
    sum.done(error);
  }
};

std::vector<Hop> C10dTransport::hopsOf(const Sum& sum) {
  if (sum.coding) {
    return sum.operation == Operation::kAllGather
        ? coded_->allGather(sum.tensor, sum.coding, parts_)
        : coded_->reduceScatter(sum.tensor, sum.coding, parts_);
  }
  return {{nullptr, [this, &sum] { return startOf(sum); }}};
}

void C10dTransport::begin(Sum sum) {
  const auto course = std::make_shared<Course>(Course{std::move(sum), {}, {}, {}});
  const c10::Device device = course->sum.tensor.device();
  if (!device.is_cpu()) {
    course->stream = transferStream(device);
    for (const std::shared_ptr<StreamEvent>& event : course->sum.behind) {
      event->block(*course->stream);
    }
  }
  const c10::OptionalStreamGuard guard(course->stream); // memory for messages is of this stream
  course->hops = hopsOf(course->sum);
  for (const Hop& hop : course->hops) {
    course->places.push_back(hop.lane == nullptr ? 0 : hop.lane->announce());
  }
  proceed(course);
}

void C10dTransport::proceed(const std::shared_ptr<Course>& course) {
  Lane* const lane = course->hops[course->now].lane;
  if (lane == nullptr) {
    launch(course);
    return;
  }
  lane->start(course->places[course->now], [self = shared_from_this(), course] {
    try {
      self->launch(course);
    } catch (...) {
      course->fail(std::current_exception());
    }
  });
}

// On a device the future completes when the work is enqueued (NCCL) or has run on the host (Gloo).
// Only then can a stream wait for its device part. The callback does not use the future's value:
// otherwise PyTorch would make another stream wait for it.
//
// What the callback holds is let go on a thread of the group. The transport must not be, so it is
// held only where it is needed.
void C10dTransport::launch(const std::shared_ptr<Course>& course) {
  const at::NoGradGuard noGrad;
  const c10::OptionalStreamGuard guard(course->stream);
  const StartedTransfer transfer = course->hops[course->now].start();
  const bool goesOn = course->stream || course->now + 1 < course->hops.size();
  transfer.work->getFuture()->addCallback(
      [self = goesOn ? shared_from_this() : nullptr, course,
       transfer](c10::ivalue::Future& future) mutable {
        if (future.hasError()) {
          course->fail(errorOf(future));
        } else {
          try {
            arrived(self, course, transfer);
          } catch (...) { // the future would swallow it, and nobody would hear of the end
            course->fail(std::current_exception());
          }
        }
        letGo(std::move(self));
      },
      /*uses_future=*/false);
}

void C10dTransport::arrived(
    const std::shared_ptr<C10dTransport>& self,
    const std::shared_ptr<Course>& course,
    const StartedTransfer& transfer) {
  const bool isLast = course->now + 1 == course->hops.size();
  std::shared_ptr<StreamEvent> event;
  {
    const at::NoGradGuard noGrad;
    const c10::OptionalStreamGuard guard(course->stream);
    if (course->stream) {
      transfer.work->synchronize(); // orders the stream, not this thread, behind the work
    }
    transfer.finish();
    if (isLast && course->sum.operation == Operation::kReduceScatter) {
      course->sum.reduced();
    }
    if (isLast && course->stream) {
      event = self->record(*course->stream);
    }
  }
  if (!isLast) {
    ++course->now;
    self->proceed(course);
    return;
  }
  if (!event) {
    course->sum.done(nullptr);
    return;
  }
  course->sum.enqueued(event);
  self->watch(
      event, [done = course->sum.done, transfer](const std::exception_ptr& error) { done(error); });
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
    std::vector<CodedHalves::Group> groups = coded_->groups();
    if (groups.front() != group_) {
      groups.push_back(group_);
    }
    std::thread([groups = std::move(groups), aborted]() mutable {
      nameThisThread("hvdo abort");
      for (const CodedHalves::Group& group : groups) {
        try {
          group->abort();
        } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
          // Some back ends cannot abort; their work then ends with the group's own timeout.
        }
      }
      groups.clear(); // before the transport, whose thread waits here, lets go of them
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
