#include "base/element_sum.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "check.h"

// Norms; update_rule_test.cc has sums.
namespace hvd_order {

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array kTypes{
    ElementType::kFloat32, ElementType::kFloat64, ElementType::kFloat16, ElementType::kBfloat16};
constexpr std::array<std::size_t, 9> kCounts{0, 1, 2, 15, 16, 17, 31, 1000, 4099};

template <typename T>
Bytes bytesOf(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

template <typename T>
T at(const Bytes& bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

// Sign, 5 bits of exponent, 10 of mantissa.
double ofFloat16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  const double size = exponent == 0 ? std::ldexp(mantissa, -24)
      : exponent == 31              ? (mantissa == 0 ? std::numeric_limits<double>::infinity()
                                                     : std::numeric_limits<double>::quiet_NaN())
                                    : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) == 0 ? size : -size;
}

double element(ElementType type, const Bytes& bytes, std::size_t index) {
  switch (type) {
    case ElementType::kFloat32:
      return at<float>(bytes, index);
    case ElementType::kFloat64:
      return at<double>(bytes, index);
    case ElementType::kFloat16:
      return ofFloat16(at<std::uint16_t>(bytes, index));
    case ElementType::kBfloat16:
      return std::bit_cast<float>(std::uint32_t{at<std::uint16_t>(bytes, index)} << 16);
  }
  return 0;
}

/// Finite elements of all sizes and both signs.
Bytes numbers(ElementType type, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count + 1));
  std::uniform_real_distribution<double> exponents(-30, 30);
  std::uniform_real_distribution<double> mantissas(-1, 1);
  std::vector<float> floats;
  std::vector<double> doubles;
  std::vector<std::uint16_t> halves;
  for (std::size_t i = 0; i < count; ++i) {
    doubles.push_back(mantissas(random) * std::exp2(exponents(random)));
    floats.push_back(static_cast<float>(doubles.back()));
    // Without the highest bit of the exponent an element of either type is finite.
    halves.push_back(static_cast<std::uint16_t>(random() & 0xBFFF));
  }
  return type == ElementType::kFloat32 ? bytesOf(floats)
      : type == ElementType::kFloat64  ? bytesOf(doubles)
                                       : bytesOf(halves);
}

double squares(ElementType type, const Bytes& bytes) {
  return sumOfSquares(type, bytes.data(), bytes.size());
}

/// As the header promises on every machine: element i goes to lane i % 16, in order; then the lanes
/// are added up in order. `volatile` keeps products and sums apart.
double inOrder(ElementType type, const Bytes& bytes) {
  std::array<double, 16> lanes{};
  for (std::size_t i = 0; i < bytes.size() / sizeOf(type); ++i) {
    const double value = element(type, bytes, i);
    const volatile double square = value * value;
    lanes[i % lanes.size()] += square;
  }
  double sum = 0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

} // namespace

TEST(squaresAreAddedInOneOrder) {
  for (const ElementType type : kTypes) {
    for (const std::size_t count : kCounts) {
      const Bytes bytes = numbers(type, count);
      CHECK_EQUAL(squares(type, bytes), inOrder(type, bytes));
    }
  }
}

TEST(squaresTakeAnyAddress) {
  for (const ElementType type : kTypes) {
    for (const std::size_t count : kCounts) {
      const Bytes bytes = numbers(type, count);
      const double expected = squares(type, bytes);
      for (std::size_t shift = 1; shift <= 8; ++shift) {
        Bytes shifted(bytes.size() + shift, std::byte{0x3F});
        std::copy(bytes.begin(), bytes.end(), shifted.begin() + static_cast<std::ptrdiff_t>(shift));
        CHECK_EQUAL(sumOfSquares(type, shifted.data() + shift, bytes.size()), expected);
      }
    }
  }
}

TEST(squaresOfLargeElementsDoNotOverflow) {
  // The squares are beyond float32, and those of bfloat16 as well.
  constexpr std::size_t kCount = 10'000;
  const double largest = std::numeric_limits<float>::max();
  const double sum = squares(
      ElementType::kFloat32,
      bytesOf(std::vector<float>(kCount, -std::numeric_limits<float>::max())));
  CHECK(std::abs(sum / (largest * largest) - kCount) < 1e-6);
  const double brains =
      squares(ElementType::kBfloat16, bytesOf(std::vector<std::uint16_t>(kCount, 0x7F7F)));
  CHECK(std::abs(brains / (largest * largest) - kCount) < 0.01 * kCount); // the largest bfloat16
  CHECK(std::isfinite(brains));
  const double halves =
      squares(ElementType::kFloat16, bytesOf(std::vector<std::uint16_t>(kCount, 0x7BFF)));
  CHECK_EQUAL(halves, 65504.0 * 65504.0 * kCount);
}

TEST(squaresOfSmallElementsAreNotLost) {
  const float least = std::numeric_limits<float>::denorm_min();
  const double square = static_cast<double>(least) * least;
  CHECK(square > 0);
  CHECK_EQUAL(squares(ElementType::kFloat32, bytesOf(std::vector<float>(64, least))), 64 * square);
  CHECK_EQUAL(
      squares(ElementType::kFloat16, bytesOf(std::vector<std::uint16_t>(64, 1))),
      64 * std::ldexp(1.0, -48));
  CHECK_EQUAL(
      squares(ElementType::kBfloat16, bytesOf(std::vector<std::uint16_t>(64, 1))),
      64 * std::ldexp(1.0, -266));
}

TEST(squaresSayWhetherEveryElementIsFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::size_t place : {0U, 7U, 16U, 36U}) {
    std::vector<float> floats(37, 1);
    floats[place] = -std::numeric_limits<float>::infinity();
    CHECK_EQUAL(squares(ElementType::kFloat32, bytesOf(floats)), infinity);
    floats[place] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(squares(ElementType::kFloat32, bytesOf(floats))));
    std::vector<std::uint16_t> halves(37, 0x3C00);
    halves[place] = 0xFC00;
    CHECK_EQUAL(squares(ElementType::kFloat16, bytesOf(halves)), infinity);
    halves[place] = 0x7C01;
    CHECK(std::isnan(squares(ElementType::kFloat16, bytesOf(halves))));
    halves[place] = 0xFF80;
    CHECK_EQUAL(squares(ElementType::kBfloat16, bytesOf(halves)), infinity);
    halves[place] = 0x7F81;
    CHECK(std::isnan(squares(ElementType::kBfloat16, bytesOf(halves))));
  }
}

TEST(theLargestIsThatOfAPlainLoop) {
  for (const ElementType type : kTypes) {
    for (const std::size_t count : kCounts) {
      const Bytes bytes = numbers(type, count);
      double expected = 0;
      for (std::size_t i = 0; i < count; ++i) {
        expected = std::max(expected, std::abs(element(type, bytes, i)));
      }
      const Norms norms = normsOf(type, bytes.data(), bytes.size());
      CHECK_EQUAL(norms.largest, expected);
      CHECK_EQUAL(norms.squares, squares(type, bytes));
      Bytes shifted(bytes.size() + 1, std::byte{0x3F});
      std::copy(bytes.begin(), bytes.end(), shifted.begin() + 1);
      CHECK_EQUAL(normsOf(type, shifted.data() + 1, bytes.size()).largest, expected);
    }
  }
}

TEST(theLargestMayBeAnywhereAndOfEitherSign) {
  for (std::size_t place = 0; place < 37; ++place) {
    for (const float value : {-3.0F, 3.0F, std::numeric_limits<float>::infinity()}) {
      std::vector<float> floats(37, 0.5F);
      floats[place] = value;
      const Bytes bytes = bytesOf(floats);
      CHECK_EQUAL(
          normsOf(ElementType::kFloat32, bytes.data(), bytes.size()).largest, std::abs(value));
    }
  }
  // Its square is beyond float64.
  const Bytes large = bytesOf(std::vector<double>{1.0, -1e200});
  CHECK_EQUAL(normsOf(ElementType::kFloat64, large.data(), large.size()).largest, 1e200);
}

TEST(aNanIsTheLargest) {
  for (std::size_t place = 0; place < 37; ++place) {
    std::vector<float> floats(37, std::numeric_limits<float>::infinity());
    floats[place] = std::numeric_limits<float>::quiet_NaN();
    Bytes bytes = bytesOf(floats);
    CHECK(std::isnan(normsOf(ElementType::kFloat32, bytes.data(), bytes.size()).largest));
    std::vector<std::uint16_t> halves(37, 0x3C00);
    halves[place] = 0xFE01; // NaN in either 16-bit type
    bytes = bytesOf(halves);
    CHECK(std::isnan(normsOf(ElementType::kFloat16, bytes.data(), bytes.size()).largest));
    CHECK(normsOf(ElementType::kBfloat16, bytes.data(), bytes.size()).largest > 1e37);
    halves[place] = 0x7F81;
    bytes = bytesOf(halves);
    CHECK(std::isnan(normsOf(ElementType::kBfloat16, bytes.data(), bytes.size()).largest));
  }
}

TEST(squaresOfPartsOfElementsAreRefused) {
  const Bytes bytes(8);
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, sumOfSquares(ElementType::kFloat64, bytes.data(), 4)),
      "4 bytes are no whole number of elements of 8");
  CHECK_THROWS(InvalidUsage, sumOfSquares(ElementType::kBfloat16, bytes.data(), 3));
  CHECK_THROWS(InvalidUsage, normsOf(ElementType::kBfloat16, bytes.data(), 3));
  CHECK_THROWS(InvalidUsage, sumOfSquares(static_cast<ElementType>(9), bytes.data(), 8));
}

} // namespace hvd_order
