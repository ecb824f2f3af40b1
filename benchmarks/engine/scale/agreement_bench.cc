// How many decisions a second the classes of the order agreement handle on each kind of rank, and
// how much memory one rank's agreement has. Alone on one thread, without messages' way. See
// README.md.

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "scheduler/agreement.h"

namespace {

std::atomic<long> liveBytes = 0;

} // namespace

// Count the bytes that are in use. Not inlined: GCC would take malloc and free for a mismatched
// pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  liveBytes += static_cast<long>(malloc_usable_size(memory));
  return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) {
    liveBytes -= static_cast<long>(malloc_usable_size(memory));
    std::free(memory);
  }
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  operator delete(memory);
}

namespace hvd_order {

namespace {

using Clock = std::chrono::steady_clock;

constexpr ByteCount kSliceBytes = 2 << 20;
constexpr ByteCount kCreditBytes = 4 * kSliceBytes;
constexpr std::uint32_t kSlices = 240; // GPT-2 small in slices of 2 MiB
constexpr int kRepeats = 7;
constexpr double kSecondsPerRepeat = 0.03;

struct Variant {
  const char* name;
  AgreementKind kind;
  bool star; // every rank is a child of rank 0
};
constexpr Variant kVariants[] = {
    {"leader", AgreementKind::kLeader, false},
    {"negotiated", AgreementKind::kNegotiated, false},
    {"planned", AgreementKind::kPlanned, false},
    {"leader, star", AgreementKind::kLeader, true}};

/// What happens on each rank in a step, in this order. Each moment begins with a ready tensor, a
/// slice that is done, or both, and ends with rank 0's decision, if it makes one.
struct Moment {
  std::vector<TensorKey> ready{};
  std::vector<SliceKey> done{};
  std::vector<SliceKey> decided{};
};

/// One rank without the others: what they would send comes when it is needed.
class Alone final {
 public:
  Alone(const Variant& variant, Rank rank, int size, std::shared_ptr<const SliceLayout> layout)
      : place_(placeInTree(rank, size, variant.star ? std::max(1, size - 1) : kFanOut)),
        reported_(variant.kind == AgreementKind::kNegotiated),
        follows_(rank > 0 && variant.kind != AgreementKind::kPlanned) {
    const bool planned = variant.kind == AgreementKind::kPlanned;
    std::vector<SliceIndex> plan(planned ? kSlices : 0);
    std::iota(plan.rbegin(), plan.rend(), 0); // in the order in which they become ready
    const long before = liveBytes;
    agreement_ = Agreement::create(
        variant.kind, rank, size, planned ? Policy::kPlanned : Policy::kPriority, kCreditBytes,
        variant.star ? std::max(1, size - 1) : kFanOut);
    agreement_->addModel(0, std::move(layout), std::move(plan));
    ownBytes_ = liveBytes - before;
  }

  /// @return the slices that it issues.
  const std::vector<SliceKey>& act(const Moment& moment) {
    const long before = liveBytes;
    for (const TensorKey tensor : moment.ready) {
      agreement_->tensorReady(tensor);
      if (reported_) {
        const SliceKey slice{tensor.model, tensor.tensor}; // a tensor is a slice here
        for (Rank child = place_.firstChild; place_.isChild(child); ++child) {
          agreement_->received(child, {&slice, 1});
        }
      }
    }
    for (const SliceKey slice : moment.done) {
      agreement_->sliceDone(slice);
    }
    if (follows_ && !moment.decided.empty()) {
      agreement_->received(place_.parent, moment.decided);
    }
    decisions_.clear();
    agreement_->decide(decisions_);
    messages_ += decisions_.messages.size();
    decisions_.messages.clear(); // sent
    ownBytes_ += liveBytes - before;
    return decisions_.issue;
  }

  void play(const std::vector<Moment>& step) {
    for (const Moment& moment : step) {
      issued_ += act(moment).size();
    }
  }

  [[nodiscard]] std::size_t issued() const {
    return issued_;
  }
  [[nodiscard]] std::size_t messages() const {
    return messages_;
  }
  /// The bytes that it uses, and those of its decisions' vectors.
  [[nodiscard]] long ownBytes() const {
    return ownBytes_;
  }

 private:
  const TreePlace place_;
  const bool reported_; // children report
  const bool follows_;
  std::unique_ptr<Agreement> agreement_;
  Decisions decisions_;
  std::size_t issued_ = 0;
  std::size_t messages_ = 0;
  long ownBytes_ = 0;
};

/// Records a step of rank 0: gradients become ready last to first, and the link keeps up with half
/// of them.
std::vector<Moment> stepOf(Alone& rankZero) {
  std::vector<Moment> step;
  std::vector<SliceKey> link;
  std::size_t done = 0;
  const auto act = [&](Moment moment) {
    moment.decided = rankZero.act(moment);
    link.insert(link.end(), moment.decided.begin(), moment.decided.end());
    step.push_back(std::move(moment));
  };
  for (std::uint32_t tensor = kSlices; tensor > 0; --tensor) {
    act({.ready = {{0, tensor - 1}}});
    if (tensor % 2 == 0) {
      act({.done = {link[done++]}});
    }
  }
  while (done < link.size()) {
    act({.done = {link[done++]}});
  }
  return step;
}

/// @param raw receives a line of JSON.
bool measure(const Variant& variant, const char* role, Rank rank, int size, std::FILE* raw) {
  const std::vector<TensorSpec> tensors(kSlices, TensorSpec{"t", kSliceBytes, 0});
  const auto layout = std::make_shared<const SliceLayout>(tensors, kSliceBytes);
  Alone rankZero(variant, 0, size, layout);
  const std::vector<Moment> step = stepOf(rankZero);
  Alone alone(variant, rank, size, layout);
  alone.play(step); // tables grow
  const std::size_t messages = alone.messages();
  std::vector<double> rates;
  std::size_t steps = 1;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begin = Clock::now();
    std::chrono::duration<double> took{};
    int played = 0;
    for (; took.count() < kSecondsPerRepeat; took = Clock::now() - begin) {
      alone.play(step);
      ++played;
    }
    steps += static_cast<std::size_t>(played);
    rates.push_back(kSlices * played / took.count());
  }
  if (alone.issued() != steps * kSlices) {
    std::fprintf(
        stderr, "%s, rank %d of %d does not issue every slice\n", variant.name, rank, size);
    return false;
  }
  std::sort(rates.begin(), rates.end());
  std::printf(
      "| %-12s | %5d | %-5s | %9.0f | %9.0f | %9.0f | %7ld | %7zu |\n", variant.name, size, role,
      rates.front(), rates[rates.size() / 2], rates.back(), alone.ownBytes(), messages);
  std::fprintf(
      raw,
      "{\"agreement\": \"%s\", \"ranks\": %d, \"role\": \"%s\", \"bytes\": %ld, "
      "\"messages\": %zu, \"decisions_per_s\": [",
      variant.name, size, role, alone.ownBytes(), messages);
  for (std::size_t i = 0; i < rates.size(); ++i) {
    std::fprintf(raw, "%s%.0f", i == 0 ? "" : ", ", rates[i]);
  }
  std::fprintf(raw, "]}\n");
  return true;
}

/// The kinds of ranks: rank 0, one with a parent and children, one without children.
bool measure(const Variant& variant, int size, std::FILE* raw) {
  const int fanOut = variant.star ? std::max(1, size - 1) : kFanOut;
  bool right = measure(variant, "first", 0, size, raw);
  if (variant.kind == AgreementKind::kPlanned) { // all ranks are equal
    return right;
  }
  if (placeInTree(1, size, fanOut).children > 0) {
    right &= measure(variant, "inner", 1, size, raw);
  }
  return measure(variant, "last", size - 1, size, raw) && right;
}

} // namespace

} // namespace hvd_order

/// @param arguments name of a file for the measurements, then the numbers of ranks
int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: agreement_bench FILE RANKS...\n");
    return 2;
  }
  std::FILE* const raw = std::fopen(arguments[1], "w");
  if (raw == nullptr) {
    std::perror(arguments[1]);
    return 1;
  }
  std::printf(
      "| agreement    | ranks | rank  | decisions/s: min | median | max | bytes | messages |\n");
  std::printf(
      "| ------------ | ----- | ----- | --------- | --------- | --------- | ------- | - |\n");
  bool right = true;
  for (int i = 2; i < count; ++i) {
    for (const hvd_order::Variant& variant : hvd_order::kVariants) {
      right &= hvd_order::measure(variant, std::stoi(arguments[i]), raw);
    }
  }
  if (std::fclose(raw) != 0) {
    std::perror(arguments[1]);
    return 1;
  }
  return right ? 0 : 1;
}
