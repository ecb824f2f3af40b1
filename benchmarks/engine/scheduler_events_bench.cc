// How many events a second the scheduler handles, alone on one thread. See README.md.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <vector>

#include "scheduler/scheduler.h"

namespace hvd_order {

namespace {

using Clock = std::chrono::steady_clock;

constexpr ByteCount kSliceBytes = 2 << 20;
constexpr ByteCount kCreditBytes = 8 << 20;
constexpr int kRepeats = 11;
constexpr double kSecondsPerRepeat = 0.1;
// For each slice: its tensor becomes ready, it is offered and issued, it is done. Offering and
// issuing count as one event, so the figure is on the low side.
constexpr double kEventsPerSlice = 3;

/// One training step: gradients become ready last to first; four slices are in flight and end in
/// the order of issue. @return a number that depends on the order, so that nothing is optimized out
/// and the order can be checked.
std::uint64_t step(Scheduler& scheduler, std::uint32_t tensors, std::vector<SliceKey>& link) {
  std::uint64_t hash = 0;
  std::size_t done = 0;
  link.clear();
  const auto pump = [&] {
    while (const auto slice = scheduler.next()) {
      link.push_back(*slice);
      hash = hash * 31 + slice->index;
    }
  };
  for (std::uint32_t tensor = tensors; tensor > 0; --tensor) {
    for (const SliceKey slice : scheduler.tensorReady({0, tensor - 1})) {
      scheduler.offer(slice);
    }
    pump();
    if (tensor % 2 == 0) { // the link keeps up with half of backward; the rest piles up
      scheduler.sliceDone(link[done++]);
      pump();
    }
  }
  while (done < link.size()) {
    scheduler.sliceDone(link[done++]);
    pump();
  }
  return hash;
}

/// Prints one line of JSON: the rate of each repeat, in million events a second.
int measure(const char* name, Policy policy, std::uint32_t slices) {
  std::vector<TensorSpec> tensors;
  for (std::uint32_t i = 0; i < slices; ++i) {
    tensors.push_back({"t", kSliceBytes, 0});
  }
  std::vector<SliceIndex> plan;
  if (policy == Policy::kPlanned) { // as in arrival order, so that the link is never idle
    plan.resize(slices);
    std::iota(plan.rbegin(), plan.rend(), 0);
  }
  Scheduler scheduler(policy, kCreditBytes);
  scheduler.addModel(0, std::make_shared<SliceLayout>(tensors, kSliceBytes), plan);
  std::vector<SliceKey> link;
  link.reserve(slices);

  const std::uint64_t expected = step(scheduler, slices, link); // warm-up
  const auto start = Clock::now();
  step(scheduler, slices, link);
  const double once = std::chrono::duration<double>(Clock::now() - start).count();
  const int steps = std::max(1, static_cast<int>(kSecondsPerRepeat / std::max(once, 1e-9)));

  std::vector<double> rates;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begin = Clock::now();
    for (int i = 0; i < steps; ++i) {
      if (step(scheduler, slices, link) != expected || link.size() != slices) {
        std::fprintf(stderr, "%s, %u slices: the order changed from step to step\n", name, slices);
        return 1;
      }
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    rates.push_back(kEventsPerSlice * slices * steps / seconds / 1e6);
  }
  std::printf("{\"policy\": \"%s\", \"slices\": %u, \"rates\": [", name, slices);
  for (std::size_t i = 0; i < rates.size(); ++i) {
    std::printf("%s%.4f", i == 0 ? "" : ", ", rates[i]);
  }
  std::printf("]}\n");
  return 0;
}

} // namespace

} // namespace hvd_order

int main() {
  using hvd_order::Policy;
  int failed = 0;
  for (const std::uint32_t slices : {100U, 10'000U, 100'000U}) {
    failed |= hvd_order::measure("arrival", Policy::kArrival, slices);
    failed |= hvd_order::measure("priority", Policy::kPriority, slices);
    failed |= hvd_order::measure("planned", Policy::kPlanned, slices);
  }
  return failed;
}
