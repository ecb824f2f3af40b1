#include "c10d/torch_transport.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "base/error.h"

namespace hvd_order {

namespace {

// Queues of the watcher: one for the transport's own stream, then one for each stream that produces
// gradients. Events of one stream happen in order, those of different streams do not. What is done
// comes first: the engine must not hear that a gradient of the next step is ready before it hears
// that the same tensor's transfer of this step has ended.
constexpr std::size_t kDoneQueue = 0;
constexpr std::size_t kFirstReadyQueue = 1;

/// A window of transfers under way, and the first error among them.
class Window {
 public:
  explicit Window(std::size_t size) : size_(size) {}

  /// Waits for room, then counts one more.
  void enter() {
    std::unique_lock lock(mutex_);
    await(lock, size_ - 1);
    ++inFlight_;
  }
  void leave(std::exception_ptr error) {
    const std::scoped_lock lock(mutex_); // until notified: then the window may be gone
    --inFlight_;
    error_ = error_ ? error_ : std::move(error);
    changed_.notify_one();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    await(lock, 0);
  }

 private:
  void await(std::unique_lock<std::mutex>& lock, std::size_t left) {
    changed_.wait(lock, [&] { return inFlight_ <= left; });
    if (error_) {
      // Transfers under way refer to this window, so wait for them as well.
      changed_.wait(lock, [&] { return inFlight_ == 0; });
      std::rethrow_exception(error_);
    }
  }

  const std::size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t inFlight_ = 0;
  std::exception_ptr error_;
};

} // namespace

std::exception_ptr collectiveError(const std::string& text) {
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (says("imed out") || says("timeout")) {
    return std::make_exception_ptr(TransferTimeout("all-reduce timed out: " + text));
  }
  if (says("onnection") || says("peer") || says("ocket") || says("has been shut down")) {
    return std::make_exception_ptr(PeerLost("a connection broke during an all-reduce: " + text));
  }
  return std::make_exception_ptr(CollectiveError("all-reduce failed: " + text));
}

void TorchTransport::setBuffers(
    ModelId model,
    const std::vector<at::Tensor>& buffers,
    const SliceLayout& layout) {
  const at::NoGradGuard noGrad;
  const std::scoped_lock lock(mutex_);
  const std::string prefix =
      "hvd_order." + std::to_string(model) + "." + std::to_string(layouts_++) + ".";
  auto views = std::make_shared<std::vector<NamedView>>();
  for (const Slice& slice : layout.slices()) {
    const at::Tensor& buffer = buffers.at(slice.buffer);
    const auto element = static_cast<ByteCount>(buffer.element_size());
    views->push_back(
        {buffer.narrow(0, slice.offsetBytes / element, slice.sizeBytes / element),
         prefix + std::to_string(views->size())});
  }
  if (slices_.size() <= model) {
    slices_.resize(model + 1);
  }
  slices_[model] = std::move(views);
}

void TorchTransport::removeBuffers(ModelId model) {
  const std::scoped_lock lock(mutex_);
  slices_.at(model).reset();
}

void TorchTransport::issue(SliceKey key, const Slice& /*slice*/, Done done) {
  std::shared_ptr<const std::vector<NamedView>> views;
  {
    const std::scoped_lock lock(mutex_);
    views = slices_.at(key.model);
  }
  const NamedView& view = views->at(key.index);
  allReduce(view.tensor, view.name, std::move(done));
}

void TorchTransport::whenReady(const c10::Device& device, EventWatcher::Then then) {
  if (device.is_cpu()) {
    then(nullptr);
    return;
  }
  const c10::impl::VirtualGuardImpl backend(device.type());
  const c10::Stream stream = backend.getStream(device);
  watcher().add(readyQueue(stream), events_->record(stream), std::move(then));
}

void TorchTransport::whenDone(const c10::Stream& stream, EventWatcher::Then then) {
  watcher().add(kDoneQueue, events_->record(stream), std::move(then));
}

std::size_t TorchTransport::readyQueue(const c10::Stream& stream) {
  const std::scoped_lock lock(mutex_);
  const auto known = std::find(readyStreams_.begin(), readyStreams_.end(), stream);
  const auto place = static_cast<std::size_t>(known - readyStreams_.begin());
  if (known == readyStreams_.end()) {
    readyStreams_.push_back(stream);
  }
  return kFirstReadyQueue + place;
}

double TorchTransport::timeStream(const std::vector<at::Tensor>& pieces, std::size_t inFlight) {
  const auto begin = std::chrono::steady_clock::now();
  Window window(inFlight);
  std::size_t number = 0;
  for (const at::Tensor& piece : pieces) {
    window.enter();
    try {
      // The name includes the number of bytes: an engine that remembers tensors by name requires
      // equal sizes.
      allReduce(
          piece,
          "hvd_order.probe." + std::to_string(piece.nbytes()) + "." + std::to_string(number++),
          [&](std::exception_ptr error) { window.leave(std::move(error)); });
    } catch (...) {
      window.leave(std::current_exception());
    }
  }
  window.drain();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

EventWatcher& TorchTransport::watcher() {
  const std::scoped_lock lock(mutex_);
  if (!watcher_) {
    watcher_ = std::make_unique<EventWatcher>();
  }
  return *watcher_;
}

} // namespace hvd_order
