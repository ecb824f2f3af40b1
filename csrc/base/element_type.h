#pragma once

#include <cstdint>

namespace hvd_order {

enum class ElementType : std::uint8_t { kFloat32, kFloat64, kFloat16, kBfloat16 };

} // namespace hvd_order
