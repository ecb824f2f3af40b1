#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch/c10d/all_reduce/slice_coding.h"
#include "torch/c10d/shard.h"
#include "torch/c10d/slice_events.h"
#include "torch/c10d/stream_event.h"
#include "transport/event_watcher.h"
#include "transport/transport.h"

namespace hvd_order {

/// Common base of the transports of PyTorch tensors: the slices of buffers, the events of devices,
/// and their watcher.
///
/// Thread safety: every method may be called from any thread; `issue` from one thread at a time.
class TorchTransport : public Transport {
 public:
  /// Registers the flat gradient buffers of a model, by BufferId, cut as `layout` says.
  virtual void
  setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout);
  virtual void removeBuffers(ModelId model);

  /// Sets how the sums of a model's gradients travel; only in a split layout, before its first
  /// slice is issued.
  /// @param formats of the gradients, by TensorId.
  /// @param residuals float32, as long as the buffers, by BufferId; empty: what rounding loses is
  ///   lost.
  /// @throws InvalidUsage if this transport does not encode.
  void setFormats(
      ModelId model,
      const std::vector<WireFormat>& formats,
      const std::vector<at::Tensor>& residuals);

  void issue(SliceKey key, const Slice& slice, Done done) override;
  void onEnqueued(const Enqueued& enqueued) override;

  /// Calls `then` when a tensor's gradient, enqueued on the current stream of `device`, is in its
  /// buffer, or, with `setIssuesAhead`, at once. On a device that happens with the last gradient of
  /// the tensor's slice.
  /// @param packing how the gradient still has to get into its buffer: packed with the others of
  ///   its slice.
  /// @param computed with `setIssuesAhead`, called when the gradient is in its buffer.
  void whenReady(
      TensorKey tensor,
      const c10::Device& device,
      std::optional<Packing> packing,
      EventWatcher::Then then,
      EventWatcher::Then computed);

  /// Whether slices are issued before the device has computed their gradients. The transfer's
  /// stream then waits for them, so the order of issue must be the order in which they are
  /// computed.
  void setIssuesAhead(bool ahead) {
    issuesAhead_ = ahead;
  }

  /// Makes the current stream of `device` wait for the sums of a tensor that are enqueued there.
  void orderBehindSums(TensorKey tensor, const c10::Device& device);

  /// Makes all transfers that are issued from now on wait for the work enqueued so far on the
  /// current stream of `device`.
  virtual void orderTransfersBehind(const c10::Device& /*device*/) {}

  /// Sends the pieces, in this order, with up to `inFlight` in flight at a time. No other transfer
  /// may run meanwhile. @return the seconds it took. @throws the first piece's error.
  double timeStream(
      const std::vector<at::Tensor>& pieces,
      std::size_t inFlight,
      Operation operation = Operation::kAllReduce);

 protected:
  /// One sum over all ranks, in place, or a half of it.
  struct Sum {
    at::Tensor tensor;
    std::string name; ///< the same on every rank, and used by no other tensor in flight
    std::vector<std::shared_ptr<StreamEvent>> behind; ///< the device must reach these before
    /// Called before `done` with an event behind the sum, if a device's stream carries it.
    std::function<void(std::shared_ptr<StreamEvent> event)> enqueued;
    Done done;
    Operation operation = Operation::kAllReduce;
    /// Called when this rank's shard has its sum; on a device, with its stream as the current one.
    std::function<void()> reduced;
    std::shared_ptr<const SliceCoding> coding; ///< of the halves of an encoded sum; else null
  };

  /// Starts a sum, or a half of one if `hasHalves`.
  virtual void begin(Sum sum) = 0;

  /// Whether `begin` knows the halves of a split all-reduce.
  [[nodiscard]] virtual bool hasHalves() const {
    return false;
  }
  /// The part of `elements` elements that this rank sums in the first half.
  [[nodiscard]] virtual Shard shard(std::int64_t elements) const {
    return {0, elements};
  }
  /// This rank among those that sum.
  [[nodiscard]] virtual Rank rank() const {
    return 0;
  }

  /// Number of ranks whose messages are encoded; 0 if `begin` does not regard `Sum::coding`.
  [[nodiscard]] virtual int codingRanks() const {
    return 0;
  }

  /// Whether `begin` regards `Sum::behind`.
  [[nodiscard]] virtual bool canIssueAhead() const {
    return false;
  }

  /// Returns an event behind all work enqueued so far on `stream`.
  std::shared_ptr<StreamEvent> record(const c10::Stream& stream) {
    return events_->record(stream);
  }
  /// Calls `then` when an event of the transport's own stream has happened.
  void watch(std::shared_ptr<StreamEvent> event, EventWatcher::Then then);

 private:
  /// A part of a tensor's sum in this rank's shard of a slice, and where its norms go.
  struct SquaredPart {
    at::Tensor values;
    at::Tensor square;
    at::Tensor largest; ///< undefined if the squares have no maxima
  };
  struct NamedView {
    at::Tensor tensor;
    std::string name;
    std::vector<SquaredPart> parts;
  };
  struct ModelViews {
    ModelViews(
        std::vector<NamedView> views,
        const SliceLayout& layout,
        std::shared_ptr<EventPool> pool)
        : slices(std::move(views)), layout(layout), events(layout, std::move(pool)) {}

    const std::vector<NamedView> slices;
    const SliceLayout layout;
    std::vector<std::shared_ptr<const SliceCoding>> codings; ///< by slice; empty: not encoded
    SliceEvents events;
  };

  void start(Sum sum);
  [[nodiscard]] std::vector<SquaredPart> squaredParts(
      const std::vector<at::Tensor>& buffers,
      const SliceLayout& layout,
      SliceIndex index) const;
  EventWatcher& watcher();
  std::size_t readyQueue(const c10::Stream& stream);
  std::shared_ptr<ModelViews> modelOf(ModelId model);

  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
  std::atomic<bool> issuesAhead_ = false;
  std::mutex mutex_; // guards what follows
  Enqueued enqueued_;
  std::vector<std::shared_ptr<ModelViews>> models_; // by ModelId
  std::size_t layouts_ = 0;               // number of layouts so far: names are never used twice
  std::vector<c10::Stream> readyStreams_; // that have produced gradients
  std::unique_ptr<EventWatcher> watcher_; // made when the first device tensor comes
};

/// The error for a failed all-reduce. It is classified by the library's message, which is the only
/// information available.
std::exception_ptr collectiveError(const std::string& text);

} // namespace hvd_order
