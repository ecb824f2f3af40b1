#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch/c10d/all_reduce/slice_coding.h"
#include "torch/c10d/all_reduce/split_all_reduce.h"

namespace hvd_order {

/// As `reduceScatter`, with fewer bytes: each rank sends the others their shards as messages, and
/// adds up its own in the order of the ranks, in float32. What a message lacks of this rank's
/// values goes into the residual.
StartedTransfer reduceScatterCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool);

/// As `allGather`, with fewer bytes: each rank encodes the sum of its shard once, and all ranks,
/// also this one, get what is decoded. What it lacks of the sum goes into the residual.
StartedTransfer allGatherCoded(
    c10d::Backend& backend,
    const at::Tensor& slice,
    std::shared_ptr<const SliceCoding> coding,
    PartsPool& pool);

} // namespace hvd_order
