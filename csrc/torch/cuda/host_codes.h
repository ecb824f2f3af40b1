#pragma once

#include "torch/cuda/kernel_table.h"

// `KernelTable::encode` and `decode` on the host, for one run.
namespace hvd_order {

void encodeOnHost(const CodedRun& run, ElementType element, bool writesBack);
void decodeOnHost(const CodedRun& run, ElementType element, Senders senders);

} // namespace hvd_order
