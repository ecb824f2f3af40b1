// How many events a second the scheduler handles, alone on one thread. See README.md.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <vector>

#include "../../tests/cpp/count_allocations.h"
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

/// @param raw receives one line of JSON: the rate of each repeat, in million events a second.
int measure(const char* name, Policy policy, std::uint32_t slices, std::FILE* raw) {
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
  const long allocationsBefore = test::allocations;
  long inRates = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begin = Clock::now();
    for (int i = 0; i < steps; ++i) {
      if (step(scheduler, slices, link) != expected || link.size() != slices) {
        std::fprintf(stderr, "%s, %u slices: the order changed from step to step\n", name, slices);
        return 1;
      }
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const long before = test::allocations;
    rates.push_back(kEventsPerSlice * slices * steps / seconds / 1e6);
    inRates += test::allocations - before; // the benchmark's own
  }
  const long allocations = test::allocations - allocationsBefore - inRates;
  if (raw != nullptr) {
    std::fprintf(raw, "{\"policy\": \"%s\", \"slices\": %u, \"rates\": [", name, slices);
    for (std::size_t i = 0; i < rates.size(); ++i) {
      std::fprintf(raw, "%s%.4f", i == 0 ? "" : ", ", rates[i]);
    }
    std::fprintf(raw, "], \"allocations\": %ld}\n", allocations);
  }
  std::sort(rates.begin(), rates.end());
  const double median = rates[rates.size() / 2];
  std::printf(
      "| %-8s | %7u | %6.1f | %6.1f | %6.1f | %5.0f | %ld |\n", name, slices, rates.front(), median,
      rates.back(), 1e3 / median, allocations);
  return allocations == 0 ? 0 : 1;
}

} // namespace

} // namespace hvd_order

/// @param arguments optionally the name of a file for the rate of each repeat
int main(int count, char** arguments) {
  using hvd_order::Policy;
  std::printf(
      "| policy   |  slices | million events/s: min | median | max | ns/event | allocations |\n");
  std::printf("| -------- | ------- | ------ | ------ | ------ | ----- | - |\n");
  std::FILE* raw = count > 1 ? std::fopen(arguments[1], "w") : nullptr;
  if (count > 1 && raw == nullptr) {
    std::perror(arguments[1]);
    return 1;
  }
  int failed = 0;
  for (const std::uint32_t slices : {100U, 10'000U, 100'000U}) {
    failed |= hvd_order::measure("arrival", Policy::kArrival, slices, raw);
    failed |= hvd_order::measure("priority", Policy::kPriority, slices, raw);
    failed |= hvd_order::measure("planned", Policy::kPlanned, slices, raw);
  }
  if (raw != nullptr && std::fclose(raw) != 0) {
    std::perror(arguments[1]);
    return 1;
  }
  if (failed != 0) {
    std::fprintf(stderr, "the steady state allocated memory or changed its order\n");
  }
  return failed;
}
