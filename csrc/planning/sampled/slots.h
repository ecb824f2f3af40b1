#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace hvd_order::simulate {

/// Values that an event refers to by number; numbers are used again.
template <typename Value>
class Slots final {
 public:
  std::uint32_t put(Value value) {
    if (free_.empty()) {
      values_.push_back(std::move(value));
      return static_cast<std::uint32_t>(values_.size() - 1);
    }
    const std::uint32_t number = free_.back();
    free_.pop_back();
    values_[number] = std::move(value);
    return number;
  }
  /// The number is free from now on.
  Value take(std::uint32_t number) {
    free_.push_back(number);
    return std::move(values_[number]);
  }
  Value& operator[](std::uint32_t number) {
    return values_[number];
  }

 private:
  std::vector<Value> values_;
  std::vector<std::uint32_t> free_;
};

} // namespace hvd_order::simulate
