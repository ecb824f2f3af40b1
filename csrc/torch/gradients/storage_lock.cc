#include "torch/gradients/storage_lock.h"

#include <torch/version.h>

namespace hvd_order {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
// Before 2.12 PyTorch has no function that ends the error. The arguments of an explicit
// instantiation may name private members.
template <auto kThrows, auto kRefresh>
struct AccessError {
  friend void clearAccessError(c10::StorageImpl& storage) {
    storage.*kThrows = false;
    storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
    (storage.*kRefresh)();
  }
};
template struct AccessError<
    &c10::StorageImpl::throw_on_immutable_data_ptr_,
    &c10::StorageImpl::refresh_has_data_ptr_check>;
void clearAccessError(c10::StorageImpl& storage);
#else
static void clearAccessError(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}
#endif

void StorageLock::close(const at::Tensor& tensor) {
  open();
  storage_ = tensor.storage();
  storage_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void StorageLock::open() {
  if (storage_) {
    clearAccessError(*storage_.unsafeGetStorageImpl());
    storage_ = {};
  }
}

} // namespace hvd_order
