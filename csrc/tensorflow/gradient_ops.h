#pragma once

#include <memory>

#include "tensorflow/engine_api.h"
#include "tensorflow/op_context.h"

namespace hvd_order::tensorflow {

/// Sets the engine's function table; null removes it.
/// @return whether its version fits.
bool setEngineApi(const hvdo_engine_api* api);

/// The operators on gradients. Their first input is the variable's handle. Nothing is read from
/// it, but it makes TensorFlow order them with the operators that read or write the variable.

/// Inputs: handle, gradient. Gives the gradient to the engine and ends.
void postGradient(std::unique_ptr<OpContext> context, hvdo_position position);

/// Input: handle. Output: the sum of the gradients that were posted, when it is there.
void takeGradient(
    std::unique_ptr<OpContext> context,
    hvdo_position position,
    int dtype,
    std::vector<std::int64_t> shape);

/// Inputs: handle, gradient. Output: its sum, when it is there.
void reduceGradient(std::unique_ptr<OpContext> context, hvdo_position position);

} // namespace hvd_order::tensorflow
