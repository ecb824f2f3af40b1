#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "servers/wire/frame.h"

namespace hvd_order {

/// Writes numbers one after the other, little endian, as they travel in payloads.
class ByteWriter {
 public:
  template <std::unsigned_integral T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
    }
  }
  void put(double value) {
    put(std::bit_cast<std::uint64_t>(value));
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const {
    return bytes_;
  }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads numbers that a ByteWriter wrote, never beyond the end.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  /// The next number. @throws FrameError if fewer bytes are left.
  template <std::unsigned_integral T>
  T get() {
    if (bytes_.size() < sizeof(T)) {
      throw FrameError("the payload ends too early");
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= std::to_integer<std::uint64_t>(bytes_[i]) << (8 * i);
    }
    bytes_ = bytes_.subspan(sizeof(T));
    return static_cast<T>(value);
  }
  double getDouble() {
    return std::bit_cast<double>(get<std::uint64_t>());
  }
  [[nodiscard]] std::size_t left() const {
    return bytes_.size();
  }
  /// Checks that nothing follows. @throws FrameError if bytes are left.
  void finish() const {
    if (!bytes_.empty()) {
      throw FrameError("the payload is longer than what it says");
    }
  }

 private:
  std::span<const std::byte> bytes_;
};

} // namespace hvd_order
