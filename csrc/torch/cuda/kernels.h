#pragma once

#include "torch/cuda/kernel_table.h"

namespace hvd_order {

const KernelTable& cudaKernels();

/// Whether the kernels run here.
struct CudaState {
  int runtime = 0;             ///< the CUDA that they were compiled with: 13000 is 13.0
  int driver = 0;              ///< the newest CUDA that the driver supports; 0: there is no driver
  const char* error = nullptr; ///< why they cannot run on the current device; null: they can
};
CudaState cudaState();

} // namespace hvd_order
