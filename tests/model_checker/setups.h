#pragma once

#include <vector>

#include "setup.h"

namespace hvd_order::checker {

/// For every change: seconds.
std::vector<Setup> quickSetups();
/// The larger ones: minutes.
std::vector<Setup> largeSetups();

} // namespace hvd_order::checker
