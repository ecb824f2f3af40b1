#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_order::simulate {

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the same numbers with every standard library.
class Random final {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t mixed = (state_ += 0x9E3779B97F4A7C15U);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
    return mixed ^ (mixed >> 31);
  }
  std::size_t below(std::size_t limit) {
    return static_cast<std::size_t>(next() % limit);
  }
  double fraction() {
    return static_cast<double>(next() >> 11) * 0x1.0p-53;
  }

 private:
  std::uint64_t state_;
};

} // namespace hvd_order::simulate
