#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace hvd_order {

/// While closed, makes every access to a tensor's memory raise: also of code in C++, which Python
/// does not see. Addresses taken earlier still work.
class StorageLock {
 public:
  StorageLock() = default;
  StorageLock(const StorageLock&) = delete;
  StorageLock& operator=(const StorageLock&) = delete;
  ~StorageLock() {
    open();
  }

  /// Closes the lock on the memory that `tensor` has now.
  void close(const at::Tensor& tensor);
  /// Has no effect on an open lock.
  void open();

  std::string message; // of the errors

 private:
  // A separate reference: the tensor may have been given other memory meanwhile.
  c10::Storage storage_;
};

} // namespace hvd_order
