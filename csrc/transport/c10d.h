#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "engine/event_watcher.h"
#include "transport/transport.h"

namespace hvd_order {

/// Carries slices over a torch.distributed process group, whatever its back end.
///
/// On the CPU a slice is done when its work's future completes. On a device, work is enqueued on a
/// stream of its own, and the slice is done when an event behind it has happened; readiness of a
/// gradient is an event too (`whenReady`), since the hook fires when the kernel is enqueued, not
/// when it has run.
///
/// Thread safety: every method may be called from any thread; `issue` from one at a time.
class C10dTransport final : public Transport, public std::enable_shared_from_this<C10dTransport> {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// Registers the flat gradient buffers of a model, by BufferId, cut as `layout` says.
  void setBuffers(ModelId model, const std::vector<at::Tensor>& buffers, const SliceLayout& layout);
  void removeBuffers(ModelId model);

  void issue(SliceKey key, const Slice& slice, Done done) override;
  void abort() noexcept override;

  /// Calls `then` when all work enqueued so far on the current stream of `device` has run: at once
  /// on the CPU.
  void whenReady(const c10::Device& device, EventWatcher::Then then);

 private:
  EventWatcher& watcher();
  c10::Stream transferStream(const c10::Device& device);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::mutex mutex_; // guards what follows
  std::vector<std::vector<std::vector<at::Tensor>>>
      slices_;                               // by model, then slice: a list of one view
  std::vector<c10::Stream> transferStreams_; // one for each device in use
  std::unique_ptr<EventWatcher> watcher_;    // made when the first device tensor comes
};

} // namespace hvd_order
