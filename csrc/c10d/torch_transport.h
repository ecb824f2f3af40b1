#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/event_watcher.h"
#include "transport/transport.h"

namespace hvd_order {

/// What transports of PyTorch tensors share: the buffers' slices, and the watch over devices.
///
/// Thread safety: every method may be called from any thread; `issue` from one at a time.
class TorchTransport : public Transport {
 public:
  /// Registers the flat gradient buffers of a model, by BufferId, cut as `layout` says.
  virtual void
  setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout);
  virtual void removeBuffers(ModelId model);

  void issue(SliceKey key, const Slice& slice, Done done) override;

  /// Calls `then` when all work enqueued so far on the current stream of `device` has run: at once
  /// on the CPU.
  void whenReady(const c10::Device& device, EventWatcher::Then then);

  /// Sums the pieces over all ranks, in this order and so many in flight at a time. Nothing else
  /// may travel. @return the seconds it took. @throws the first piece's error.
  double timeStream(const std::vector<at::Tensor>& pieces, std::size_t inFlight);

 protected:
  /// Starts summing `tensor` over all ranks, in place.
  /// @param name the same on every rank, and of nothing else in flight.
  virtual void allReduce(const at::Tensor& tensor, const std::string& name, Done done) = 0;

  EventWatcher& watcher();
  /// A queue of the watcher that is free for the transport's own events.
  static constexpr std::size_t kDoneQueue = 1;

 private:
  struct NamedView {
    at::Tensor tensor;
    std::string name;
  };

  std::mutex mutex_;                                                  // guards what follows
  std::vector<std::shared_ptr<const std::vector<NamedView>>> slices_; // by model, then slice
  std::size_t layouts_ = 0;               // registered so far: names are never used twice
  std::unique_ptr<EventWatcher> watcher_; // made when the first device tensor comes
};

/// What a failed all-reduce means, told from the engine's words: there is nothing else.
std::exception_ptr collectiveError(const std::string& text);

} // namespace hvd_order
