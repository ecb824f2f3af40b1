#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

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

  EventWatcher& watcher();
  /// Queue of the watcher for the transport's own events.
  static constexpr std::size_t kDoneQueue = 1;

 private:
  struct NamedView {
    at::Tensor tensor;
    std::string name;
  };

  std::mutex mutex_;                                                  // guards what follows
  std::vector<std::shared_ptr<const std::vector<NamedView>>> slices_; // by model, then slice
  std::size_t layouts_ = 0;               // number of layouts so far: names are never used twice
  std::unique_ptr<EventWatcher> watcher_; // made when the first device tensor comes
};

/// The error for a failed all-reduce. It is classified by the library's message, which is the only
/// information available.
std::exception_ptr collectiveError(const std::string& text);

} // namespace hvd_order
