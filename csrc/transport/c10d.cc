#include "transport/c10d.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/error.h"

namespace hvd_order {

namespace {

// Queues of the watcher: events of one stream happen in order, those of different streams do not.
constexpr std::size_t kReadyQueue = 0;
constexpr std::size_t kDoneQueue = 1;

class StreamEvent final : public DeviceEvent {
 public:
  explicit StreamEvent(const c10::Stream& stream)
      : event_(stream.device_type(), c10::EventFlag::PYTORCH_DEFAULT) {
    event_.record(stream);
  }
  bool happened() override {
    return event_.query();
  }

 private:
  c10::Event event_;
};

/// Backends say what went wrong only in words.
std::exception_ptr collectiveError(const std::string& text) {
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (says("imed out") || says("timeout")) {
    return std::make_exception_ptr(TransferTimeout("all-reduce timed out: " + text));
  }
  if (says("onnection") || says("peer") || says("ocket")) {
    return std::make_exception_ptr(PeerLost("a rank is gone: all-reduce failed: " + text));
  }
  return std::make_exception_ptr(CollectiveError("all-reduce failed: " + text));
}

std::exception_ptr errorOf(const c10::ivalue::Future& future) {
  try {
    std::rethrow_exception(future.exception_ptr());
  } catch (const std::exception& e) {
    return collectiveError(e.what());
  } catch (...) {
    return collectiveError("unknown error");
  }
}

} // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {}

void C10dTransport::setBuffers(
    ModelId model,
    const std::vector<at::Tensor>& buffers,
    const SliceLayout& layout) {
  std::vector<std::vector<at::Tensor>> views;
  const at::NoGradGuard noGrad;
  for (const Slice& slice : layout.slices()) {
    const at::Tensor& buffer = buffers.at(slice.buffer);
    const auto element = static_cast<ByteCount>(buffer.element_size());
    views.push_back({buffer.narrow(0, slice.offsetBytes / element, slice.sizeBytes / element)});
  }
  const std::scoped_lock lock(mutex_);
  if (slices_.size() <= model) {
    slices_.resize(model + 1);
  }
  slices_[model] = std::move(views);
}

void C10dTransport::removeBuffers(ModelId model) {
  const std::scoped_lock lock(mutex_);
  slices_.at(model).clear();
}

void C10dTransport::issue(SliceKey key, const Slice& /*slice*/, Done done) {
  std::vector<at::Tensor> tensors;
  {
    const std::scoped_lock lock(mutex_);
    tensors = slices_.at(key.model).at(key.index);
  }
  const c10::Device device = tensors.front().device();
  if (device.is_cpu()) {
    const auto work = group_->allreduce(tensors);
    work->getFuture()->addCallback([done = std::move(done)](c10::ivalue::Future& future) {
      done(future.hasError() ? errorOf(future) : nullptr);
    });
    return;
  }
  const c10::Stream stream = transferStream(device);
  const c10::StreamGuard guard(stream);
  const auto work = group_->allreduce(tensors);
  // The future completes when the work is enqueued (NCCL) or has run on the host (Gloo); only then
  // can its device part be waited for.
  work->getFuture()->addCallback([self = shared_from_this(), stream, work,
                                  done = std::move(done)](c10::ivalue::Future& future) {
    if (future.hasError()) {
      done(errorOf(future));
      return;
    }
    const c10::StreamGuard callbackGuard(stream);
    work->synchronize(); // orders `stream`, not this thread, behind the work
    self->watcher().add(
        kDoneQueue, std::make_unique<StreamEvent>(stream),
        [done, work](const std::exception_ptr& error) { done(error); });
  });
}

void C10dTransport::abort() noexcept {
  try {
    group_->abort();
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // Some back ends cannot; their work then ends with the group's own timeout.
  }
}

void C10dTransport::whenReady(const c10::Device& device, EventWatcher::Then then) {
  if (device.is_cpu()) {
    then(nullptr);
    return;
  }
  const c10::impl::VirtualGuardImpl backend(device.type());
  watcher().add(
      kReadyQueue, std::make_unique<StreamEvent>(backend.getStream(device)), std::move(then));
}

EventWatcher& C10dTransport::watcher() {
  const std::scoped_lock lock(mutex_);
  if (!watcher_) {
    watcher_ = std::make_unique<EventWatcher>();
  }
  return *watcher_;
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
