#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace hvd_order {

/// Makes every access to a tensor's memory raise, until it is opened: also of code in C++, which
/// Python does not see. Addresses taken earlier still work.
class StorageLock {
 public:
  StorageLock(const at::Tensor& tensor, std::string message);
  StorageLock(const StorageLock&) = delete;
  StorageLock& operator=(const StorageLock&) = delete;
  ~StorageLock() {
    open();
  }

  void open();

 private:
  // A separate reference: the tensor may have been given other memory meanwhile.
  c10::Storage storage_;
};

} // namespace hvd_order
