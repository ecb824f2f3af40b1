#include "torch/c10d/all_reduce/lane.h"

#include <utility>

namespace hvd_order {

std::uint64_t Lane::announce() {
  const std::scoped_lock lock(mutex_);
  return announced_++;
}

void Lane::start(std::uint64_t place, Start start) {
  std::unique_lock lock(mutex_);
  ready_.emplace(place, std::move(start));
  if (starting_) {
    return;
  }
  starting_ = true;
  while (!ready_.empty() && ready_.begin()->first == next_) {
    const auto first = ready_.extract(ready_.begin());
    ++next_;
    lock.unlock(); // it may end at once, and then the next one becomes ready
    first.mapped()();
    lock.lock();
  }
  starting_ = false;
}

} // namespace hvd_order
