#include "torch/gradients/owners.h"

#include <Python.h>
#include <c10/core/Allocator.h>

namespace hvd_order {

namespace {

// From 2.10 on a tensor's or storage's Python object is one of its owners as long as it exists, and
// C++ owns the object in turn. Before, the object is an owner only while the program refers to it.
template <typename Slot>
PyObject* owningObject(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj();
  } else {
    return nullptr;
  }
}

bool isHeldByPython(PyObject* object) {
  return Py_REFCNT(object) != 1;
}

} // namespace

bool isHeld(const at::Tensor& tensor, std::size_t known) {
  PyObject* object = owningObject(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  if (object != nullptr) {
    return isHeldByPython(object) || tensor.use_count() != known + 1;
  }
  return tensor.use_count() != known;
}

std::size_t ownersOf(const c10::StorageImpl& storage) {
  const auto owners = c10::raw::intrusive_ptr::use_count(const_cast<c10::StorageImpl*>(&storage));
  PyObject* object = owningObject(*storage.pyobj_slot());
  return object == nullptr || isHeldByPython(object) ? owners : owners - 1;
}

bool isOurs(c10::StorageImpl& storage) {
  const c10::Allocator* allocator = c10::GetAllocator(storage.device_type());
  return storage.nbytes() == 0 || allocator == nullptr ||
      storage._mutable_data_ptr_no_checks().get_deleter() == allocator->raw_deleter();
}

} // namespace hvd_order
