#include "planning/sampled/links/transfer_queue.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "check.h"

namespace hvd_order::simulate {

namespace {

TEST(transfers_leave_by_urgency_and_then_as_they_came) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    TransferQueue queue;
    std::vector<Transfer> waiting;
    const auto before = [](const Transfer& a, const Transfer& b) {
      return a.priority != b.priority ? a.priority < b.priority : a.came < b.came;
    };
    for (std::uint64_t came = 0; came < 500; ++came) {
      const auto drawn = static_cast<std::int32_t>(random() % 40);
      const auto number = static_cast<std::int32_t>(came);
      // As they are needed, the other way round, and at random.
      const std::int32_t priority = seed % 3 == 0 ? number / 3
          : seed % 3 == 1                         ? -number / 3
                                                  : drawn;
      const Transfer transfer{0, static_cast<TensorId>(came), 0, priority, 1.0, came};
      queue.pushUrgent(transfer);
      waiting.push_back(transfer);
      while (!waiting.empty() && random() % 5 < 2) {
        const auto first = std::min_element(waiting.begin(), waiting.end(), before);
        CHECK_EQUAL(queue.popUrgent().came, first->came);
        waiting.erase(first);
      }
      CHECK_EQUAL(queue.empty(), waiting.empty());
    }
    std::sort(waiting.begin(), waiting.end(), before);
    for (const Transfer& each : waiting) {
      CHECK_EQUAL(queue.popUrgent().came, each.came);
    }
    CHECK(queue.empty());
  }
}

TEST(transfers_leave_as_they_came) {
  std::mt19937 random(1);
  TransferQueue queue;
  std::uint64_t next = 0;
  for (std::uint64_t came = 0; came < 5000; ++came) {
    queue.push({0, 0, 0, static_cast<std::int32_t>(random() % 9), 1.0, came});
    while (!queue.empty() && random() % 100 < 49) {
      CHECK_EQUAL(queue.pop().came, next++);
    }
  }
  while (!queue.empty()) {
    CHECK_EQUAL(queue.pop().came, next++);
  }
  CHECK_EQUAL(next, 5000U);
}

} // namespace

} // namespace hvd_order::simulate
