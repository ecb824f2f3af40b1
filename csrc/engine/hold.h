#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// Knows when to keep the link free for the gradient that the next forward pass reads first.
///
/// Its slice, the model's first, comes last in backward, when the link is often busy with large
/// slices that can wait and cannot be overtaken. Backward passes resemble each other: the tensor
/// that became ready one lead before that slice in the last step tells when to begin no further
/// large one. Nor does a large one begin beside the first slice: its messages would wait behind the
/// other's at every hop, several times as long as they take alone. A rank that is late may not keep
/// the link idle for longer than a lead, though.
///
/// Thread safety: none; the engine calls it under its own lock.
class Hold final {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Change {
    kNone,
    kBegin, ///< no large slice any more
    kFirst, ///< the first slice is ready: it travels alone
  };

  /// @param lead how long what may be in flight needs to arrive; zero: never hold.
  void setLead(std::chrono::nanoseconds lead) {
    lead_ = lead;
  }
  [[nodiscard]] std::chrono::nanoseconds lead() const {
    return lead_;
  }
  void addModel(ModelId model, std::size_t tensors);
  void removeModel(ModelId model);

  /// A tensor has become ready.
  /// @param slices what became ready with it, which is more than one for a large tensor and none
  ///     where a slice waits for further tensors.
  Change ready(TensorKey tensor, const std::vector<SliceKey>& slices, Clock::time_point now);

 private:
  struct Model {
    std::vector<Clock::time_point> readyAt; // by tensor, in this step or the one before
    std::vector<std::uint32_t> steps;       // by tensor: how often it was ready
    std::uint32_t firstSlices = 0;          // how often the first slice was
    std::optional<TensorId> herald;         // its readiness begins the hold
  };

  [[nodiscard]] std::optional<TensorId> heraldOf(const Model& model, Clock::time_point firstSliceAt)
      const;

  std::chrono::nanoseconds lead_{0};
  std::map<ModelId, Model> models_;
};

} // namespace hvd_order
