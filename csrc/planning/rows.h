#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace hvd_order::simulate {

/// A list of lists in contiguous memory.
template <typename T>
class Rows final {
 public:
  Rows() = default;
  explicit Rows(const std::vector<std::vector<T>>& rows) {
    for (const std::vector<T>& row : rows) {
      values_.insert(values_.end(), row.begin(), row.end());
      start_.push_back(values_.size());
    }
  }

  [[nodiscard]] std::span<const T> operator[](std::size_t row) const {
    return std::span(values_).subspan(start_[row], start_[row + 1] - start_[row]);
  }

 private:
  std::vector<T> values_;
  std::vector<std::size_t> start_{0}; // row i is [start_[i], start_[i + 1])
};

} // namespace hvd_order::simulate
