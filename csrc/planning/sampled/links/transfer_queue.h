#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace hvd_order::simulate {

/// One tensor of one worker's step on its way, or a sum on its way between two servers.
struct Transfer {
  std::uint32_t worker;
  TensorId tensor;
  std::uint32_t step;
  std::int32_t priority; ///< smaller is more urgent
  double leftBytes;
  std::uint64_t came = 0;   ///< set by Connections: number of its newest place in a queue
  std::uint32_t server = 0; ///< at the other end
  double startS = -1;       ///< set by Connections: when its first turn began
};

/// The transfers that wait for a connection, in the order in which they came or in that of urgency.
///
/// Gradients come in about the opposite order of their urgency. So a transfer that is among the
/// most urgent ones goes into a sorted list, whose last one is the next; the others form a binary
/// heap.
class TransferQueue final {
 public:
  [[nodiscard]] bool empty() const {
    return front_ == items_.size() && heap_.empty();
  }

  void push(const Transfer& transfer) {
    items_.push_back(transfer);
  }
  Transfer pop() {
    const Transfer first = items_[front_++];
    if (front_ == items_.size() || (front_ >= kGap && 2 * front_ >= items_.size())) {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(front_));
      front_ = 0;
    }
    return first;
  }

  void pushUrgent(const Transfer& transfer);
  Transfer popUrgent();

 private:
  static constexpr std::size_t kGap = 32;
  static constexpr std::size_t kReach = 8; // places of the sorted list that are searched

  static bool isBefore(const Transfer& a, const Transfer& b) {
    return a.priority != b.priority ? a.priority < b.priority : a.came < b.came;
  }

  std::vector<Transfer> items_; // sorted if by urgency, the most urgent one last
  std::size_t front_ = 0;       // of items_, if in the order in which they came
  std::vector<Transfer> heap_;
};

inline void TransferQueue::pushUrgent(const Transfer& transfer) {
  std::size_t place = items_.size();
  const std::size_t last = place > kReach ? place - kReach : 0;
  while (place > last && isBefore(items_[place - 1], transfer)) {
    --place;
  }
  if (place > last || place == 0) {
    items_.insert(items_.begin() + static_cast<std::ptrdiff_t>(place), transfer);
    return;
  }
  heap_.push_back(transfer);
  std::push_heap(heap_.begin(), heap_.end(), [](const Transfer& a, const Transfer& b) {
    return isBefore(b, a);
  });
}

inline Transfer TransferQueue::popUrgent() {
  if (heap_.empty() || (!items_.empty() && isBefore(items_.back(), heap_.front()))) {
    const Transfer first = items_.back();
    items_.pop_back();
    return first;
  }
  std::pop_heap(heap_.begin(), heap_.end(), [](const Transfer& a, const Transfer& b) {
    return isBefore(b, a);
  });
  const Transfer first = heap_.back();
  heap_.pop_back();
  return first;
}

} // namespace hvd_order::simulate
