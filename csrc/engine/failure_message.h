#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "base/types.h"

namespace hvd_order {

/// Adds the rank to a DeviceFailed, so that other ranks know whose device it is.
std::exception_ptr withRank(const std::exception_ptr& error, Rank rank);

/// Packs a failure into words of a control message: its class, which all ranks raise, and its text,
/// truncated to the whole characters of UTF-8 that one message can hold.
std::vector<std::uint32_t> packFailure(const std::exception_ptr& error);

/// Reverses packFailure. Words that it did not make give a CollectiveError.
std::exception_ptr unpackFailure(const std::vector<std::uint32_t>& words);

} // namespace hvd_order
