#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace hvd_order::simulate {

/// Times of numbered things, each of which can change, and the earliest of them. Of equal times the
/// smaller number comes first. A binary heap that knows the place of each number.
class NextEnd final {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  explicit NextEnd(std::size_t count) : times_(count, kNever), places_(count, kNowhere) {}

  /// Sets the time of a number; kNever removes it.
  void set(std::uint32_t number, double atS) {
    times_[number] = atS;
    std::size_t place = places_[number];
    if (atS == kNever) {
      if (place != kNowhere) {
        remove(place);
      }
      return;
    }
    if (place == kNowhere) {
      place = heap_.size();
      heap_.push_back(number);
      places_[number] = place;
    }
    down(up(place));
  }

  [[nodiscard]] double earliestS() const {
    return heap_.empty() ? kNever : times_[heap_.front()];
  }
  /// The number with the earliest time; there must be one.
  [[nodiscard]] std::uint32_t earliest() const {
    return heap_.front();
  }

 private:
  static constexpr std::size_t kNowhere = ~std::size_t{0};

  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const {
    return times_[a] != times_[b] ? times_[a] < times_[b] : a < b;
  }
  void put(std::size_t place, std::uint32_t number) {
    heap_[place] = number;
    places_[number] = place;
  }
  std::size_t up(std::size_t place) {
    const std::uint32_t number = heap_[place];
    while (place > 0 && before(number, heap_[(place - 1) / 2])) {
      put(place, heap_[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    put(place, number);
    return place;
  }
  void down(std::size_t place) {
    const std::uint32_t number = heap_[place];
    for (std::size_t child = 2 * place + 1; child < heap_.size(); child = 2 * place + 1) {
      if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) {
        ++child;
      }
      if (!before(heap_[child], number)) {
        break;
      }
      put(place, heap_[child]);
      place = child;
    }
    put(place, number);
  }
  void remove(std::size_t place) {
    places_[heap_[place]] = kNowhere;
    const std::uint32_t last = heap_.back();
    heap_.pop_back();
    if (place < heap_.size()) {
      put(place, last);
      down(up(place));
    }
  }

  std::vector<double> times_;       // by number
  std::vector<std::size_t> places_; // by number: in heap_
  std::vector<std::uint32_t> heap_;
};

} // namespace hvd_order::simulate
