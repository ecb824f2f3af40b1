#pragma once

#include "torch/cuda/kernel_table.h"

namespace test_device {

const hvd_order::KernelTable& kernels();

} // namespace test_device
