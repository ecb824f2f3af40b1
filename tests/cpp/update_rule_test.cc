#include "servers/arithmetic/update_rule.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "check.h"

// tests/unit/servers/test_update_rule.py compares the numbers and the refusals with torch's.
namespace hvd_order {

namespace {

using Floats = std::vector<float>;

// Numbers of both signs that hang on nothing but their place.
Floats numbers(std::size_t count, int seed) {
  Floats made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = static_cast<float>(std::sin(static_cast<double>(i * 7 + 1) * (seed + 0.37)));
  }
  return made;
}

// A parameter with its state.
struct Trained {
  Trained(const UpdateRule& rule, Floats start)
      : value(std::move(start)), moments(momentsOf(rule), Floats(value.size())) {
    initialiseMoments(rule, spans());
  }
  std::vector<std::span<float>> spans() {
    return {moments.begin(), moments.end()};
  }

  Floats value;
  std::vector<Floats> moments;
};

const std::vector<UpdateRule>& everyRule() {
  static const std::vector<UpdateRule> all{
      {.kind = RuleKind::kSgd, .lr = 0.1},
      {.kind = RuleKind::kSgd, .lr = 0.1, .weightDecay = 0.1, .momentum = 0.9, .nesterov = true},
      {.kind = RuleKind::kAdam, .lr = 0.1, .weightDecay = 0.1, .amsgrad = true},
      {.kind = RuleKind::kAdamW, .lr = 0.1, .weightDecay = 0.1, .maximize = true},
      {.kind = RuleKind::kAdagrad, .lr = 0.1, .lrDecay = 0.1, .initialAccumulator = 0.1},
      {.kind = RuleKind::kRmsprop, .lr = 0.1, .weightDecay = 0.1},
      {.kind = RuleKind::kRmsprop, .lr = 0.1, .momentum = 0.9, .centered = true},
  };
  return all;
}

} // namespace

TEST(stepOneMakesTheMomentumBufferTheGradient) {
  // ... without dampening, and whatever the buffer held.
  const UpdateRule rule{.kind = RuleKind::kSgd, .lr = 1, .momentum = 0.5, .dampening = 0.75};
  Floats value{10, 10, 10};
  Floats buffer(3, std::numeric_limits<float>::quiet_NaN());
  const std::array<std::span<float>, 1> moments{buffer};
  apply(rule, 1, Floats{1, 2, 4}, value, moments);
  CHECK_EQUAL(buffer, Floats{1, 2, 4});
  CHECK_EQUAL(value, Floats{9, 8, 6});
  apply(rule, 2, Floats{4, 4, 4}, value, moments); // half of the buffer and a quarter of these
  CHECK_EQUAL(buffer, Floats{1.5, 2, 3});
  CHECK_EQUAL(value, Floats{7.5, 6, 3});
}

TEST(resultsAreBitwiseTheSameHoweverSpansLie) {
  constexpr std::size_t kCount = 101;
  const Floats start = numbers(kCount, 1);
  for (const UpdateRule& rule : everyRule()) {
    Trained whole(rule, start);
    Trained pieces(rule, start);
    // One number further on than the allocator aligns.
    Floats shiftedValue(kCount + 1);
    std::copy(start.begin(), start.end(), shiftedValue.begin() + 1);
    Trained shifted(rule, shiftedValue);
    for (int step = 1; step <= 3; ++step) {
      const Floats gradient = numbers(kCount, step + 1);
      apply(rule, step, gradient, whole.value, whole.spans());
      for (std::size_t i = 0; i < kCount; ++i) {
        std::vector<std::span<float>> state;
        for (Floats& moment : pieces.moments) {
          state.push_back(std::span(moment).subspan(i, 1));
        }
        apply(
            rule, step, std::span(gradient).subspan(i, 1), std::span(pieces.value).subspan(i, 1),
            state);
      }
      std::vector<std::span<float>> state;
      for (Floats& moment : shifted.moments) {
        state.push_back(std::span(moment).subspan(1));
      }
      apply(rule, step, gradient, std::span(shifted.value).subspan(1), state);
    }
    CHECK(whole.value != start);
    CHECK_EQUAL(pieces.value, whole.value);
    CHECK_EQUAL(pieces.moments, whole.moments);
    CHECK_EQUAL(Floats(shifted.value.begin() + 1, shifted.value.end()), whole.value);
  }
}

TEST(productsAndSumsAreRoundedApart) {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused step would keep the 2^-24.
  const float factor = 1 + std::ldexp(1.0F, -12);
  const float square = 1 + std::ldexp(1.0F, -11);
  const UpdateRule rule{.kind = RuleKind::kSgd, .lr = factor};
  Floats value(37, square);
  apply(rule, 1, Floats(37, factor), value, {});
  CHECK_EQUAL(value, Floats(37, 0));
}

TEST(anEmptyParameterIsNoMistake) {
  for (const UpdateRule& rule : everyRule()) {
    Trained trained(rule, {});
    apply(rule, 1, {}, trained.value, trained.spans());
  }
}

TEST(mistakesAreNamedAndChangeNothing) {
  const UpdateRule adam{.kind = RuleKind::kAdam};
  const Floats gradient(3, 1);
  Trained trained(adam, Floats(3, 1));
  const auto step = [&](const UpdateRule& rule, std::uint64_t number, const Floats& slope) {
    apply(rule, number, slope, trained.value, trained.spans());
  };
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, step(adam, 0, gradient)), "count from 1");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, step(adam, 1, Floats(2))), "has a gradient of 2");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, step({.kind = RuleKind::kAdam, .amsgrad = true}, 1, gradient)),
      "got 2 arrays of state; it has 3");
  trained.moments[1].pop_back();
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, step(adam, 1, gradient)), "has a state of 2");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, initialiseMoments({.kind = RuleKind::kSgd}, trained.spans())),
      "got 2 arrays of state; it has 0");
  CHECK_EQUAL(trained.value, Floats(3, 1));
  CHECK_EQUAL(trained.moments[0], Floats(3));
}

TEST(sumsTakeAnyAddressAndMayReplaceAnInput) {
  constexpr std::size_t kCount = 1500;
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kFloat64, ElementType::kFloat16,
        ElementType::kBfloat16}) {
    const std::size_t size = kCount * sizeOf(type);
    // Ones in every type: only the last bytes of an element say what it is.
    const std::vector<std::byte> one = [&] {
      std::vector<std::byte> element(sizeOf(type));
      const std::uint16_t high = type == ElementType::kFloat64 ? 0x3FF0
          : type == ElementType::kFloat16                      ? 0x3C00
                                                               : 0x3F80;
      std::memcpy(element.data() + element.size() - 2, &high, 2);
      return element;
    }();
    std::vector<std::byte> memory(2 * size + 2);
    std::byte* const first = memory.data() + 1;
    std::byte* const second = first + size;
    for (std::size_t at = 0; at < 2 * size; at += one.size()) {
      std::memcpy(first + at, one.data(), one.size());
    }
    const std::vector<const std::byte*> inputs(4, first);
    const std::vector<const std::byte*> both{first, second};
    std::vector<std::byte> four(size);
    sum(type, inputs, four.data(), size);
    sum(type, both, second, size);
    sum(type, std::vector<const std::byte*>{second, second}, first, size); // 2 + 2
    CHECK(std::memcmp(first, four.data(), size) == 0);
    CHECK(std::memcmp(first, second, size) != 0);
    CHECK(memory.front() == std::byte{0} && memory.back() == std::byte{0});
  }
}

} // namespace hvd_order
