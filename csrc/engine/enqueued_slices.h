#pragma once

#include <memory>
#include <vector>

#include "scheduler/slice_layout.h"

namespace hvd_order {

/// Counts the slices of each tensor that are enqueued on a device, to find the tensors whose slices
/// all are.
///
/// Not thread safe.
class EnqueuedSlices final {
 public:
  void addModel(ModelId model, std::shared_ptr<const SliceLayout> layout);
  void removeModel(ModelId model);

  /// Counts a slice. @return the tensors that it completes; valid until the next call.
  const std::vector<TensorKey>& add(SliceKey slice);

 private:
  struct ModelSlices {
    std::shared_ptr<const SliceLayout> layout;
    std::vector<std::size_t> toGo; // slices, by tensor
  };

  std::vector<ModelSlices> models_; // by ModelId
  std::vector<TensorKey> completed_;
};

} // namespace hvd_order
