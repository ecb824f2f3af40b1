#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c10d/stream_event.h"
#include "transport/event_watcher.h"
#include "transport/transport.h"

namespace hvd_order {

/// Common base of the transports of PyTorch tensors: the slices of buffers, and the device
/// watcher.
///
/// Thread safety: every method may be called from any thread; `issue` from one thread at a time.
class TorchTransport : public Transport {
 public:
  /// Registers the flat gradient buffers of a model, by BufferId, cut as `layout` says.
  virtual void
  setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout);
  virtual void removeBuffers(ModelId model);

  void issue(SliceKey key, const Slice& slice, Done done) override;

  /// Calls `then` when all work enqueued so far on the current stream of `device` has run; at once
  /// on the CPU.
  void whenReady(const c10::Device& device, EventWatcher::Then then);

  /// Sums the pieces over all ranks, in this order, with up to `inFlight` in flight at a time. No
  /// other transfer may run meanwhile. @return the seconds it took. @throws the first piece's
  /// error.
  double timeStream(const std::vector<at::Tensor>& pieces, std::size_t inFlight);

 protected:
  /// Starts summing `tensor` over all ranks, in place.
  /// @param name the same on every rank, and used by no other tensor in flight.
  virtual void allReduce(const at::Tensor& tensor, const std::string& name, Done done) = 0;

  /// Calls `then` when all work enqueued so far on `stream`, one of the transport's own, has run.
  void whenDone(const c10::Stream& stream, EventWatcher::Then then);

 private:
  struct NamedView {
    at::Tensor tensor;
    std::string name;
  };

  EventWatcher& watcher();
  std::size_t readyQueue(const c10::Stream& stream);

  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
  std::mutex mutex_;                                                  // guards what follows
  std::vector<std::shared_ptr<const std::vector<NamedView>>> slices_; // by model, then slice
  std::size_t layouts_ = 0;               // number of layouts so far: names are never used twice
  std::vector<c10::Stream> readyStreams_; // that have produced gradients
  std::unique_ptr<EventWatcher> watcher_; // made when the first device tensor comes
};

/// The error for a failed all-reduce. It is classified by the library's message, which is the only
/// information available.
std::exception_ptr collectiveError(const std::string& text);

} // namespace hvd_order
