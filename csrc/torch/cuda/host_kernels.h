#pragma once

#include "torch/cuda/kernel_table.h"

// The kernels on the host, chunk by chunk: they serve the CPU, and tests compare them with the
// operators of PyTorch.
namespace hvd_order {

/// `KernelTable::pack` for the elements [begin, end) of one array.
/// @return false if there is no such kernel.
bool packOnHost(
    const KernelArray& array,
    std::int64_t begin,
    std::int64_t end,
    ElementType from,
    ElementType to,
    float scale);

/// `KernelTable::unpack` for one chunk of one array. @param square null, or where its sum of
/// squares goes.
void unpackOnHost(
    const KernelArray& array,
    std::int64_t chunk,
    ElementType from,
    float scale,
    double* square);

} // namespace hvd_order
