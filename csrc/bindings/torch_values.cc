// Tensors of one element as values: copies that nobody else has, and whether a tensor still has the
// value of its copy. Both are called once for each gradient that a program clips, which is why they
// are not operators.

#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings/bindings.h"
#include "torch/gradients/gradient_hook.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using Tensors = std::vector<at::Tensor>;

bool isOnHost(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage();
}

// Compared as bytes, so that NaN is NaN and -0 is not 0.
bool hasValueOf(PyObject* object, PyObject* copied) {
  if (!THPVariable_CheckExact(object) || !THPVariable_CheckExact(copied)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const at::Tensor& copy = THPVariable_Unpack(copied);
  if (!isOnHost(tensor) || !isOnHost(copy) || tensor.dim() != 0 || copy.dim() != 0 ||
      tensor.scalar_type() != copy.scalar_type() || tensor.requires_grad()) {
    return false;
  }
  return std::memcmp(tensor.const_data_ptr(), copy.const_data_ptr(), copy.itemsize()) == 0;
}

bool areAlike(const Tensors& values) {
  return std::all_of(values.begin(), values.end(), [&](const at::Tensor& value) {
    return value.options().type_equal(values.front().options()) &&
        value.device() == values.front().device();
  });
}

Tensors ownCopies(const Tensors& values) {
  Tensors copies;
  copies.reserve(values.size());
  if (values.empty()) {
    return copies;
  }
  const bool onHost = std::all_of(values.begin(), values.end(), isOnHost);
  if (!onHost && areAlike(values)) { // one kernel for all
    const at::Tensor together = at::stack(values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      copies.push_back(placeIn(together, {}, {}, static_cast<std::int64_t>(i)));
    }
    return copies;
  }
  for (const at::Tensor& value : values) {
    if (!onHost) {
      copies.push_back(value.clone());
      continue;
    }
    copies.push_back(at::empty({}, value.options()));
    std::memcpy(
        copies.back().mutable_data_ptr(), value.const_data_ptr(),
        static_cast<std::size_t>(value.itemsize()));
  }
  return copies;
}

} // namespace

void bindValues(py::module_& m) {
  m.def(
      "has_value_of",
      [](const py::handle tensor, const py::handle copy) {
        return hasValueOf(tensor.ptr(), copy.ptr());
      },
      py::arg("tensor"), py::arg("copy"),
      "Whether `tensor` is an ordinary 0-d tensor on the CPU with the dtype and bits of `copy`.");
  m.def(
      "own_copies", &ownCopies, py::arg("values"),
      "0-d tensors with the values of others, each with a storage of its own.");
}

} // namespace hvd_order
