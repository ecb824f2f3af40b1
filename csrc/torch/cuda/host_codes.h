#pragma once

#include "torch/cuda/kernel_table.h"

// `KernelTable::encode` and `decode` on the host, for one run.
namespace hvd_order {

void encodeOnHost(const CodedRun& run, Format element, bool writesBack);
void decodeOnHost(const CodedRun& run, Format element, Senders senders);

} // namespace hvd_order
