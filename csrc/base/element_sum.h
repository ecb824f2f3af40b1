#pragma once

#include <cstddef>
#include <span>

#include "base/element_type.h"

namespace hvd_order {

[[nodiscard]] std::size_t sizeOf(ElementType type);

/// Adds arrays element by element, in the order given, in one pass over memory. 16-bit elements
/// are added in float32 and rounded once at the end, to nearest, ties to even.
///
/// @param inputs at least one array, each of `bytes` bytes at any address.
/// @param out may be one of the inputs, but must not overlap an input otherwise.
/// @throws InvalidUsage without inputs, or if `bytes` is not a multiple of the element's size.
void sum(
    ElementType type,
    std::span<const std::byte* const> inputs,
    std::byte* out,
    std::size_t bytes);

/// @return the sum of squares of an array of `bytes` bytes at any address, in float64 and in one
///   order of additions on every machine.
/// @throws InvalidUsage if `bytes` is not a multiple of the element's size.
double sumOfSquares(ElementType type, const std::byte* values, std::size_t bytes);

/// The norms of an array, as far as they can be joined with those of other arrays.
struct Norms {
  double squares; ///< as `sumOfSquares` returns it
  double largest; ///< largest absolute value, 0 of no elements; NaN if an element is
};

/// The same for an array of `bytes` bytes at any address, in one pass over memory.
Norms normsOf(ElementType type, const std::byte* values, std::size_t bytes);

} // namespace hvd_order
