#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace hvd_order::simulate {

/// Times of numbered places, each of which can change, and the earliest of them. Of equal times
/// that of the smaller place comes first.
///
/// A tournament: each node of a complete binary tree has the earlier one of its children. A change
/// takes one path, whose length and loads do not depend on the times; in a heap the processor would
/// guess wrong at half of the comparisons. Source: Knuth, The Art of Computer Programming 3, 5.4.1.
class NextEnd final {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  explicit NextEnd(std::size_t count)
      : leaves_(std::bit_ceil(count)), bits_(2 * leaves_, bitsOf(kNever)), places_(2 * leaves_) {}

  /// Sets the time of a place, 0 or later; kNever: it has none.
  void set(std::uint32_t place, double at) {
    std::uint64_t* const bitsAt = bits_.data();
    std::uint32_t* const placeAt = places_.data();
    std::uint64_t bits = bitsOf(at);
    std::size_t i = leaves_ + place;
    bitsAt[i] = bits;
    placeAt[i] = place;
    for (; i > 1; i /= 2) {
      // The other one wins a tie if it is the left one, and i the right one. A mask in place of a
      // choice, of which compilers make a jump.
      const std::uint64_t other = bitsAt[i ^ 1];
      const std::uint64_t wins = other < bits + (i & 1) ? ~std::uint64_t{0} : 0;
      bits ^= (bits ^ other) & wins;
      place ^= (place ^ placeAt[i ^ 1]) & static_cast<std::uint32_t>(wins);
      bitsAt[i / 2] = bits;
      placeAt[i / 2] = place;
    }
  }

  /// Time of a place.
  [[nodiscard]] double of(std::uint32_t place) const {
    return std::bit_cast<double>(bits_[leaves_ + place]);
  }
  [[nodiscard]] double earliestAt() const {
    return std::bit_cast<double>(bits_[1]);
  }
  /// The place with the earliest time; there must be one.
  [[nodiscard]] std::uint32_t earliest() const {
    return places_[1];
  }
  /// The earliest time of all places but `earliest`.
  [[nodiscard]] double secondAt() const {
    std::uint64_t bits = bitsOf(kNever);
    for (std::size_t i = leaves_ + places_[1]; i > 1; i /= 2) {
      bits = std::min(bits, bits_[i ^ 1]);
    }
    return std::bit_cast<double>(bits);
  }

 private:
  /// Bits of positive numbers are in the order of the numbers.
  static std::uint64_t bitsOf(double at) {
    return std::bit_cast<std::uint64_t>(at);
  }

  std::size_t leaves_;
  // By node: its time, and whose it is. 1 is the root, 2 * i and 2 * i + 1 are the children of i.
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> places_;
};

} // namespace hvd_order::simulate
