#pragma once

#include <string>
#include <vector>

#include "world.h"

namespace hvd_order::checker {

/// @return the events of a counterexample in order, one a line, with what each rank decided.
std::string textOf(const Setup& setup, const std::vector<Event>& trace, const Violation& violation);

} // namespace hvd_order::checker
