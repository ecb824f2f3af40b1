#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace hvd_order {

/// Who refers to a tensor and to its memory, as far as use counts tell. The GIL is held in all
/// functions. Raw addresses (numpy arrays made from another tensor's address, captured graphs) have
/// no count.

/// Returns whether anything refers to the tensor beside `known` owners in C++.
bool isHeld(const at::Tensor& tensor, std::size_t known);

/// Returns the number of owners of the storage; its own Python object counts only while the program
/// refers to it.
std::size_t ownersOf(const c10::StorageImpl& storage);

/// Returns whether torch has allocated the memory. Otherwise its owner, such as numpy or another
/// process, may write to it.
bool isOurs(c10::StorageImpl& storage);

} // namespace hvd_order
