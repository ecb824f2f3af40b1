#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "torch/c10d/torch_transport.h"

namespace hvd_order {

/// Carries slices over Horovod's own engine, with the operations that it was built with: Gloo,
/// MPI, NCCL.
///
/// Horovod has no interface for other C++ code, but its extension for PyTorch exports the
/// functions behind its Python functions. They are looked up by name and called without the GIL. A
/// Horovod handle can only be polled, so a thread polls while an operation is in flight.
class HorovodTransport final : public TorchTransport,
                               public std::enable_shared_from_this<HorovodTransport> {
 public:
  /// @param library path of Horovod's extension (mpi_lib_v2), initialized by the caller.
  /// @param gpuOnHost the library was built without operations for GPUs: tensors of a device
  ///   travel through host memory.
  /// @throws InvalidUsage if the file is not such a library.
  HorovodTransport(const std::string& library, bool gpuOnHost);

  /// Does nothing: operations in flight end when Horovod notices that a rank is gone.
  void abort() noexcept override {}

 private:
  using AllReduce = int(at::Tensor, at::Tensor, int, const std::string&, int, double, double, int);
  using Poll = int(int);
  using WaitAndClear = void(int);

  class Handle;

  void begin(Sum sum) override;
  std::size_t takeQueue();
  void giveBack(std::size_t queue);

  AllReduce* allReduceOnHost_;
  AllReduce* allReduceOnDevice_;
  Poll* poll_;
  WaitAndClear* waitAndClear_;

  std::mutex mutex_;       // guards `busy_`
  std::vector<bool> busy_; // queues of the watcher, one for each handle in flight
  EventWatcher handles_;
};

} // namespace hvd_order
