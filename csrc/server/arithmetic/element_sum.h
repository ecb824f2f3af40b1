#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hvd_order {

enum class ElementType : std::uint8_t { kFloat32, kFloat64, kFloat16, kBfloat16 };

[[nodiscard]] std::size_t sizeOf(ElementType type);

/// Adds arrays up, element by element and in the order given, in one pass over memory. 16-bit
/// elements are added up in float32 and rounded once at the end, to the nearest, ties to even.
///
/// @param inputs at least one, each of `bytes` bytes at any address.
/// @param out may be one of the inputs, but not overlap one otherwise.
/// @throws InvalidUsage without inputs, or if `bytes` is no multiple of the element's size.
void sum(
    ElementType type,
    std::span<const std::byte* const> inputs,
    std::byte* out,
    std::size_t bytes);

} // namespace hvd_order
