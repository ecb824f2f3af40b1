#pragma once

#include "planning/sampled/sampled_step.h"
#include "planning/sampled/sampled_training.h"

namespace hvd_order::simulate {

/// @throws InvalidUsage for a training that is impossible with this step.
void checkTraining(const SampledStep& step, const SampledTraining& training);

} // namespace hvd_order::simulate
