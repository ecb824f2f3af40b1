#include "torch/c10d/torch_transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "base/error.h"

// What all transports for PyTorch's tensors share: from a slice of the engine to a tensor of a
// library, and from a device's time to the engine's.
//
// `setBuffers` cuts the buffers of a model into one view for each slice, with a name that is the
// same on every rank. `issue` hands a view to the library's adapter (`begin`), which calls `done`
// at the end. In a split layout the adapter also calls back between the halves, and the norms of
// this rank's shard are written where their sum is made (`squaredParts`).
//
// A device computes behind the host, and nothing here waits for it. `whenReady` packs the gradients
// of a slice together, on the streams that produced them, records an event there, and a thread
// (event_watcher.h) tells the engine when the event has happened. If the adapter can order its
// stream behind such events, the engine is told at once and the transfer waits on the device
// (`issueAhead`). Sums come back in the same way: slice_events.h keeps the event behind each, so
// that other streams can wait for it.
//
// Invariant: a name is never used twice, so a transfer that is still under way for a dropped model
// meets no other.

namespace hvd_order {

namespace {

// Queues of the watcher: one for the transport's own stream, then one for each stream that produces
// gradients. Events of one stream happen in order, those of different streams do not. What is done
// comes first: the engine must not hear that a gradient of the next step is ready before it hears
// that the same tensor's transfer of this step has ended.
constexpr std::size_t kDoneQueue = 0;
constexpr std::size_t kFirstReadyQueue = 1;

/// A window of transfers under way, and the first error among them. Callbacks share it: a transport
/// that fails may still call some when nobody waits any more.
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
    const std::scoped_lock lock(mutex_);
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
      // Transfers under way still use the pieces, so wait for them as well.
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

namespace {

EventWatcher::Then all(std::vector<EventWatcher::Then> thens) {
  return [thens = std::move(thens)](const std::exception_ptr& error) {
    for (const EventWatcher::Then& each : thens) {
      each(error);
    }
  };
}

/// Calls `then`, with the class of error that says what failed.
EventWatcher::Then onDevice(EventWatcher::Then then) {
  return [then = std::move(then)](const std::exception_ptr& error) {
    then(error ? std::make_exception_ptr(DeviceFailed(textOf(error))) : nullptr);
  };
}

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
  std::vector<NamedView> slices;
  for (const Slice& slice : layout.slices()) {
    const at::Tensor& buffer = buffers.at(slice.buffer);
    const auto element = static_cast<ByteCount>(buffer.element_size());
    slices.push_back(
        {buffer.narrow(0, slice.offsetBytes / element, slice.sizeBytes / element),
         prefix + std::to_string(slices.size()),
         squaredParts(buffers, layout, static_cast<SliceIndex>(slices.size()))});
  }
  if (models_.size() <= model) {
    models_.resize(model + 1);
  }
  models_[model] = std::make_shared<ModelViews>(std::move(slices), layout, events_);
}

// The last element of a tensor's place is its use flag (gradient_buffers.py) and has no square.
// What lies between the gradient and the flag is zero.
std::vector<TorchTransport::SquaredPart> TorchTransport::squaredParts(
    const std::vector<at::Tensor>& buffers,
    const SliceLayout& layout,
    SliceIndex index) const {
  const Slice& slice = layout.slices()[index];
  std::vector<SquaredPart> parts;
  if (slice.operation != Operation::kReduceScatter) {
    return parts;
  }
  const at::Tensor& buffer = buffers.at(slice.buffer);
  const auto element = static_cast<ByteCount>(buffer.element_size());
  const Shard mine = shard(slice.sizeBytes / element);
  const std::int64_t begin = slice.offsetBytes / element + mine.begin;
  auto place = static_cast<std::int64_t>(layout.firstSquare(index));
  const auto flags = static_cast<std::int64_t>(layout.squaredTensors().size());
  for (const TensorId tensor : layout.tensorsOf(index)) {
    const std::int64_t first = layout.tensorOffset(tensor) / element;
    const std::int64_t flag = first + layout.tensors()[tensor].sizeBytes / element - 1;
    const std::int64_t from = std::max(begin, first);
    const std::int64_t length = std::min(begin + mine.length, flag) - from;
    const auto rangeOf = [&](std::int64_t at, std::int64_t count) {
      return count > 0 ? buffer.narrow(0, at, count) : buffer.narrow(0, 0, 0);
    };
    at::Tensor largest;
    if (layout.maximaRanks() > 0) {
      const auto at = static_cast<std::int64_t>(layout.firstMaximum(rank()) + tensor);
      largest = buffers.back().narrow(0, at, 1);
    }
    parts.push_back({rangeOf(from, length), buffers.back().narrow(0, place, 1), largest});
    if (layout.isSharded()) {
      const bool isMine = begin <= flag && flag < begin + mine.length;
      parts.push_back(
          {rangeOf(flag, isMine ? 1 : 0), buffers.back().narrow(0, flags + place, 1),
           at::Tensor()});
    }
    ++place;
  }
  return parts;
}

// The use flag at the end of a tensor's place, which all ranks must agree on, travels as it is.
void TorchTransport::setFormats(
    ModelId model,
    const std::vector<WireFormat>& formats,
    const std::vector<at::Tensor>& residuals) {
  const int ranks = codingRanks();
  if (ranks == 0) {
    throw InvalidUsage("this transport does not encode gradients");
  }
  const std::shared_ptr<ModelViews> views = modelOf(model);
  const SliceLayout& layout = views->layout;
  std::vector<std::shared_ptr<const SliceCoding>> codings(layout.slices().size());
  for (SliceIndex index = 0; index < codings.size(); ++index) {
    const Slice& slice = layout.slices()[index];
    const bool carriesParameters = layout.isSharded() && slice.operation == Operation::kAllGather;
    if (slice.operation == Operation::kAllReduce || carriesParameters) {
      continue;
    }
    const at::Tensor& view = views->slices[index].tensor;
    const auto element = static_cast<ByteCount>(view.element_size());
    const std::int64_t begin = slice.offsetBytes / element;
    const std::int64_t end = begin + view.numel();
    std::vector<CodedRange> ranges;
    const auto add = [&](std::int64_t from, std::int64_t to, WireFormat format) {
      from = std::max(from, begin);
      to = std::min(to, end);
      if (from < to) {
        ranges.push_back({from - begin, to - from, format});
      }
    };
    for (const TensorId tensor : layout.tensorsOf(index)) {
      const std::int64_t first = layout.tensorOffset(tensor) / element;
      const std::int64_t flag = first + layout.tensors()[tensor].sizeBytes / element - 1;
      add(first, flag, formats.at(tensor));
      add(flag, flag + 1, WireFormat::kExact);
    }
    at::Tensor residual;
    if (!residuals.empty()) {
      residual = residuals.at(slice.buffer).narrow(0, begin, view.numel());
    }
    codings[index] =
        std::make_shared<const SliceCoding>(codingOf(ranges, view, std::move(residual), ranks));
  }
  const std::scoped_lock lock(mutex_);
  views->codings = std::move(codings);
}

void TorchTransport::removeBuffers(ModelId model) {
  const std::scoped_lock lock(mutex_);
  models_.at(model).reset();
}

void TorchTransport::onEnqueued(const Enqueued& enqueued) {
  const std::scoped_lock lock(mutex_);
  enqueued_ = enqueued;
}

void TorchTransport::issue(SliceKey key, const Slice& slice, Done done) {
  // A profiler of this thread would be told of the end by another one, perhaps after its own end:
  // that writes into memory that it has freed.
  const at::DisableRecordFunctionGuard unseen;
  const std::shared_ptr<ModelViews> model = modelOf(key.model);
  const NamedView& view = model->slices.at(key.index);
  const auto enqueued = [this, key, model](std::shared_ptr<StreamEvent> event) {
    model->events.setSummed(key.index, std::move(event));
    Enqueued tell;
    {
      const std::scoped_lock lock(mutex_);
      tell = enqueued_;
    }
    if (tell) {
      tell(key);
    }
  };
  start(
      {view.tensor, view.name, model->events.takeReady(key.index), enqueued, std::move(done),
       slice.operation,
       [model, index = key.index] {
         for (const SquaredPart& part : model->slices.at(index).parts) {
           writeNorms(part.values, part.square, part.largest);
         }
       },
       model->codings.empty() ? nullptr : model->codings.at(key.index)});
}

void TorchTransport::start(Sum sum) {
  if (sum.operation != Operation::kAllReduce && !hasHalves()) {
    throw InvalidUsage("this transport cannot split an all-reduce");
  }
  begin(std::move(sum));
}

void TorchTransport::whenReady(
    TensorKey tensor,
    const c10::Device& device,
    std::optional<Packing> packing,
    EventWatcher::Then then,
    EventWatcher::Then computed) {
  if (device.is_cpu()) {
    then(nullptr);
    return;
  }
  const std::shared_ptr<ModelViews> model = modelOf(tensor.model);
  const bool ahead = issuesAhead_ && canIssueAhead();
  std::vector<SliceEvents::Producer> producers = model->events.produced(
      tensor.tensor, currentStream(device), std::move(packing), std::move(then),
      std::move(computed));
  std::vector<std::shared_ptr<StreamEvent>> ready;
  for (SliceEvents::Producer& producer : producers) {
    const c10::StreamGuard onItsStream(producer.stream);
    pack(producer.packings);
    producer.packings.clear(); // the stream is in order: a gradient's memory may be used again
    ready.push_back(events_->record(producer.stream));
  }
  if (ahead) {
    model->events.setReady(tensor.tensor, ready);
  }
  for (std::size_t i = 0; i < producers.size(); ++i) {
    SliceEvents::Producer& producer = producers[i];
    if (ahead) {
      all(std::move(producer.thens))(nullptr);
    }
    watcher().add(
        readyQueue(producer.stream), ready[i],
        onDevice(all(std::move(ahead ? producer.computed : producer.thens))));
  }
}

void TorchTransport::orderBehindSums(TensorKey tensor, const c10::Device& device) {
  modelOf(tensor.model)->events.orderBehindSums(tensor.tensor, currentStream(device));
}

void TorchTransport::watch(std::shared_ptr<StreamEvent> event, EventWatcher::Then then) {
  watcher().add(kDoneQueue, std::move(event), onDevice(std::move(then)));
}

std::shared_ptr<TorchTransport::ModelViews> TorchTransport::modelOf(ModelId model) {
  const std::scoped_lock lock(mutex_);
  return models_.at(model);
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

double TorchTransport::timeStream(
    const std::vector<at::Tensor>& pieces,
    std::size_t inFlight,
    Operation operation) {
  const auto begin = std::chrono::steady_clock::now();
  const auto window = std::make_shared<Window>(inFlight);
  std::size_t number = 0;
  for (const at::Tensor& piece : pieces) {
    window->enter();
    try {
      // The name includes the number of bytes: an engine that remembers tensors by name requires
      // equal sizes.
      start(
          {piece,
           "hvd_order.probe." + std::to_string(piece.nbytes()) + "." + std::to_string(number++),
           {},
           [](const std::shared_ptr<StreamEvent>&) {},
           [window](std::exception_ptr error) { window->leave(std::move(error)); },
           operation,
           [] {},
           nullptr});
    } catch (...) {
      window->leave(std::current_exception());
    }
  }
  window->drain();
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
