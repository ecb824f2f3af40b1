#pragma once

#include <chrono>

namespace hvd_order {

// Limits of waits for a c10d Work that carries messages.
constexpr auto kFlushTime = std::chrono::seconds(2);    // for what is posted when a channel stops
constexpr auto kForever = std::chrono::hours(24 * 365); // silence is not an error

} // namespace hvd_order
