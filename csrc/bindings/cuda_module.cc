#include <pybind11/pybind11.h>

#include "torch/cuda/kernels.h"

namespace py = pybind11;

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "Kernels for CUDA. Needs a driver only when they are asked for.";
  m.def(
      "kernels",
      [] { return py::capsule(&hvd_order::cudaKernels(), hvd_order::KernelTable::kCapsule); },
      "A capsule with the table of kernels, for _torch.register_kernels().");
  m.def(
      "state",
      [] {
        const hvd_order::CudaState state = hvd_order::cudaState();
        return py::make_tuple(state.runtime, state.driver, state.error);
      },
      "Versions of runtime and driver (13000 is 13.0), and why kernels cannot run, or None.");
  m.attr("ARCHITECTURES") = HVD_ORDER_CUDA_ARCHITECTURES;
}
