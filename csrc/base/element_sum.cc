#include "base/element_sum.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/error.h"
#include "base/float_format.h"
#include "base/vector_loops.h"

// Sums and norms of raw bytes, at the speed of memory.
//
// Inputs lie at any address. Elements of 16 bits are widened to float; all are added in the order
// of the inputs and rounded once at the end. So the result is the same on every run, and a sum of
// 16-bit numbers loses no more with many inputs than with two.
//
// The sums of one block at a time stay in the nearest cache, so each input is read once and `out`
// is written once. Up to four inputs are added in one loop over the block: that saves trips of the
// sums through the cache. The loops are written for vectors (vector_loops.h).
//
// Squares are added in kSquareLanes sums side by side, which are added up at the end, the first
// one first. The number of lanes is fixed, not the width of the processor's vectors, so the result
// does not depend on the processor.

namespace hvd_order {

namespace {

constexpr std::size_t kSquareLanes = 16;

// Copies the bytes into the element, because the element may lie at any address.
template <typename Element>
HVDO_INLINE inline typename Element::Sum load(const std::byte* from, std::size_t index) {
  typename Element::Stored stored;
  std::memcpy(&stored, from + index * sizeof stored, sizeof stored);
  return Element::widen(stored);
}

template <typename Element, bool kFirst, typename... Byte>
HVDO_INLINE inline void addUp(
    typename Element::Sum* __restrict sums,
    std::size_t count,
    const std::byte* __restrict input,
    Byte* __restrict... more) {
  for (std::size_t i = 0; i < count; ++i) {
    typename Element::Sum sum = load<Element>(input, i);
    if constexpr (!kFirst) {
      sum = sums[i] + sum;
    }
    ((sum += load<Element>(more, i)), ...);
    sums[i] = sum;
  }
}

// Adds the next inputs, at most four: more at a time are not faster, fewer are slower. Returns the
// number of inputs added.
template <typename Element, bool kFirst>
HVDO_INLINE inline std::size_t addSome(
    typename Element::Sum* sums,
    std::size_t count,
    std::span<const std::byte* const> inputs,
    std::size_t offset) {
  const std::byte* const first = inputs[0] + offset;
  switch (inputs.size()) {
    case 1:
      addUp<Element, kFirst>(sums, count, first);
      return 1;
    case 2:
      addUp<Element, kFirst>(sums, count, first, inputs[1] + offset);
      return 2;
    case 3:
      addUp<Element, kFirst>(sums, count, first, inputs[1] + offset, inputs[2] + offset);
      return 3;
    default:
      addUp<Element, kFirst>(
          sums, count, first, inputs[1] + offset, inputs[2] + offset, inputs[3] + offset);
      return 4;
  }
}

template <typename Element>
HVDO_INLINE inline void
sumAll(std::span<const std::byte* const> inputs, std::byte* out, std::size_t count) {
  using Stored = typename Element::Stored;
  using Sum = typename Element::Sum;
  // Block size: blocks stay in the nearest cache, so every input and `out` are traversed once. A
  // block of `out` is written after its inputs have been read, because `out` may be one of them.
  constexpr std::size_t kBlock = 4096 / sizeof(Sum);
  alignas(64) Sum sums[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t length = std::min(kBlock, count - start);
    const std::size_t offset = start * sizeof(Stored);
    std::size_t added = addSome<Element, true>(sums, length, inputs, offset);
    while (added < inputs.size()) {
      added += addSome<Element, false>(sums, length, inputs.subspan(added), offset);
    }
    std::byte* __restrict to = out + offset;
    for (std::size_t i = 0; i < length; ++i) {
      const Stored stored = Element::round(sums[i]);
      std::memcpy(to + i * sizeof stored, &stored, sizeof stored);
    }
  }
}

// Neighbours go to lanes of their own, so that the additions do not wait for each other.
template <typename Element>
HVDO_INLINE inline void
addSquares(double* __restrict lanes, const std::byte* __restrict values, std::size_t count) {
  const std::size_t whole = count / kSquareLanes * kSquareLanes;
  for (std::size_t i = 0; i < whole; i += kSquareLanes) {
    for (std::size_t lane = 0; lane < kSquareLanes; ++lane) {
      const double value = load<Element>(values, i + lane);
      lanes[lane] += value * value;
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    const double value = load<Element>(values, i);
    lanes[i - whole] += value * value;
  }
}

template <std::size_t kBytes>
using SignedBits = std::conditional_t<
    kBytes == 2,
    std::int16_t,
    std::conditional_t<kBytes == 4, std::int32_t, std::int64_t>>;

// The bits of floating-point numbers without signs are in the order of the numbers, and those of
// NaN above all others: integers have a maximum in vectors, and need no conversion.
template <typename Bits>
HVDO_INLINE inline Bits
largestBits(Bits largest, const std::byte* __restrict values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i * sizeof bits, sizeof bits);
    bits = static_cast<Bits>(bits & std::numeric_limits<Bits>::max());
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <typename Element, bool kLargest>
Norms normsOfElements(const std::byte* values, std::size_t bytes) {
  using Stored = typename Element::Stored;
  using Bits = SignedBits<sizeof(Stored)>;
  // Both loops read a block while it is in the nearest cache. A whole number of lanes.
  constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max() / 2;
  constexpr std::size_t kBlock = kLargest ? 128 * kSquareLanes : kAll;
  alignas(64) double lanes[kSquareLanes] = {};
  const std::size_t count = bytes / sizeof(Stored);
  double* const to = lanes;
  Bits largest = 0;
  Bits* const bits = &largest;
  runOnWidestVectors([=]() HVDO_INLINE {
    for (std::size_t start = 0; start < count; start += kBlock) {
      const std::byte* const block = values + start * sizeof(Stored);
      const std::size_t length = std::min(kBlock, count - start);
      addSquares<Element>(to, block, length);
      if constexpr (kLargest) {
        *bits = largestBits(*bits, block, length);
      }
    }
  });
  Norms norms{0.0, Element::widen(std::bit_cast<Stored>(largest))};
  for (const double lane : lanes) {
    norms.squares += lane;
  }
  return norms;
}

template <bool kLargest>
Norms normsOfType(ElementType type, const std::byte* values, std::size_t bytes) {
  switch (type) {
    case ElementType::kFloat32:
      return normsOfElements<Plain<float>, kLargest>(values, bytes);
    case ElementType::kFloat64:
      return normsOfElements<Plain<double>, kLargest>(values, bytes);
    case ElementType::kFloat16:
      return normsOfElements<Float16, kLargest>(values, bytes);
    case ElementType::kBfloat16:
      return normsOfElements<Bfloat16, kLargest>(values, bytes);
  }
  return {0.0, 0.0}; // `checkBytes` has refused other types
}

void checkBytes(ElementType type, std::size_t bytes) {
  if (bytes % sizeOf(type) != 0) {
    throw InvalidUsage(
        concat(bytes, " bytes are no whole number of elements of ", sizeOf(type), " bytes"));
  }
}

template <typename Element>
void sumOf(std::span<const std::byte* const> inputs, std::byte* out, std::size_t bytes) {
  const std::size_t count = bytes / sizeof(typename Element::Stored);
  runOnWidestVectors([=]() HVDO_INLINE { sumAll<Element>(inputs, out, count); });
}

} // namespace

std::size_t sizeOf(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
  }
  throw InvalidUsage(concat("there is no element type ", static_cast<int>(type)));
}

void sum(
    ElementType type,
    std::span<const std::byte* const> inputs,
    std::byte* out,
    std::size_t bytes) {
  if (inputs.empty()) {
    throw InvalidUsage("a sum of nothing");
  }
  checkBytes(type, bytes);
  switch (type) {
    case ElementType::kFloat32:
      return sumOf<Plain<float>>(inputs, out, bytes);
    case ElementType::kFloat64:
      return sumOf<Plain<double>>(inputs, out, bytes);
    case ElementType::kFloat16:
      return sumOf<Float16>(inputs, out, bytes);
    case ElementType::kBfloat16:
      return sumOf<Bfloat16>(inputs, out, bytes);
  }
}

double sumOfSquares(ElementType type, const std::byte* values, std::size_t bytes) {
  checkBytes(type, bytes);
  return normsOfType<false>(type, values, bytes).squares;
}

Norms normsOf(ElementType type, const std::byte* values, std::size_t bytes) {
  checkBytes(type, bytes);
  return normsOfType<true>(type, values, bytes);
}

} // namespace hvd_order
