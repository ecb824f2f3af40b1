#include "torch/gradients/use_flags.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace hvd_order {

std::vector<double> readUseFlags(const std::vector<at::Tensor>& flags) {
  const at::NoGradGuard noGrad;
  std::vector<double> sums(flags.size(), 0.0);
  std::vector<bool> known(flags.size(), false);
  for (std::size_t first = 0; first < flags.size(); ++first) {
    if (known[first]) {
      continue;
    }
    const c10::Device device = flags[first].device();
    c10::OptionalStreamGuard own;
    if (!device.is_cpu()) {
      const c10::impl::VirtualGuardImpl backend(device.type());
      own.reset_stream(backend.getStreamFromGlobalPool(device));
    }
    std::vector<std::size_t> places; // one copy to the host for each device and dtype
    std::vector<at::Tensor> alike;
    for (std::size_t i = first; i < flags.size(); ++i) {
      if (flags[i].device() == device && flags[i].dtype() == flags[first].dtype()) {
        known[i] = true;
        places.push_back(i);
        alike.push_back(flags[i]);
      }
    }
    const at::Tensor values = at::cat(alike).cpu().to(at::kDouble);
    for (std::size_t i = 0; i < places.size(); ++i) {
      sums[places[i]] = values.const_data_ptr<double>()[i];
    }
  }
  return sums;
}

} // namespace hvd_order
