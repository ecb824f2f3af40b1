#include "server/arithmetic/element_sum.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/float_format.h"
#include "base/vector_loops.h"

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

template <typename Element>
double squaresOf(const std::byte* values, std::size_t bytes) {
  alignas(64) double lanes[kSquareLanes] = {};
  const std::size_t count = bytes / sizeof(typename Element::Stored);
  double* const to = lanes;
  runOnWidestVectors([=]() HVDO_INLINE { addSquares<Element>(to, values, count); });
  double sum = 0.0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
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
  switch (type) {
    case ElementType::kFloat32:
      return squaresOf<Plain<float>>(values, bytes);
    case ElementType::kFloat64:
      return squaresOf<Plain<double>>(values, bytes);
    case ElementType::kFloat16:
      return squaresOf<Float16>(values, bytes);
    case ElementType::kBfloat16:
      return squaresOf<Bfloat16>(values, bytes);
  }
  return 0.0; // `checkBytes` has refused other types
}

} // namespace hvd_order
