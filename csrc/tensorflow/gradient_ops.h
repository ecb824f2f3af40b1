#pragma once

#include <memory>

#include "tensorflow/engine_api.h"
#include "tensorflow/op_context.h"

namespace hvd_order::tensorflow {

/// Takes the engine's function table; null: there is none any more.
/// @return whether its version fits.
bool setEngineApi(const hvdo_engine_api* api);

/// The operators on gradients. Their first input is the variable's handle: nothing is read from it,
/// but it makes TensorFlow order them with whoever reads or writes the variable.

/// Inputs: handle, gradient. Hands the gradient over and ends.
void postGradient(std::unique_ptr<OpContext> context, hvdo_position position);

/// Input: handle. Output: the sum of what was posted, when it is there.
void takeGradient(
    std::unique_ptr<OpContext> context,
    hvdo_position position,
    int dtype,
    std::vector<std::int64_t> shape);

/// Inputs: handle, gradient. Output: its sum, when it is there.
void reduceGradient(std::unique_ptr<OpContext> context, hvdo_position position);

} // namespace hvd_order::tensorflow
