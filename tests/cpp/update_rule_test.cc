#include "servers/arithmetic/update_rule.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "check.h"

// tests/unit/servers/test_update_rule.py compares the numbers with torch's.
namespace hvd_order {

namespace {

using Floats = std::vector<float>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

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

void sumFloats(const std::vector<Floats>& inputs, Floats& out) {
  std::vector<const std::byte*> addresses;
  for (const Floats& input : inputs) {
    addresses.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  sum(ElementType::kFloat32, addresses, reinterpret_cast<std::byte*>(out.data()),
      out.size() * sizeof(float));
}

// The bits of the 16-bit sum of elements that are given by their bits.
std::uint16_t sumBits(ElementType type, const std::vector<std::uint16_t>& inputs) {
  std::vector<const std::byte*> addresses;
  for (const std::uint16_t& input : inputs) {
    addresses.push_back(reinterpret_cast<const std::byte*>(&input));
  }
  std::uint16_t out = 0;
  sum(type, addresses, reinterpret_cast<std::byte*>(&out), sizeof out);
  return out;
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

TEST(adamFirstMovesByItsRate) {
  // Without eps, the corrected moments of step 1 are the gradient and its square.
  for (const RuleKind kind : {RuleKind::kAdam, RuleKind::kAdamW}) {
    const UpdateRule rule{.kind = kind, .lr = 0.25, .beta1 = 0.5, .beta2 = 0.75, .eps = 0};
    Trained trained(rule, {1, 1});
    apply(rule, 1, Floats{4, -0.5}, trained.value, trained.spans());
    CHECK_EQUAL(trained.value, Floats{0.75, 1.25});
  }
}

TEST(momentsFollowTheOptions) {
  const auto moments = [](const UpdateRule& rule) { return momentsOf(rule); };
  CHECK_EQUAL(moments({.kind = RuleKind::kSgd}), 0U);
  CHECK_EQUAL(moments({.kind = RuleKind::kSgd, .momentum = 0.9}), 1U);
  CHECK_EQUAL(moments({.kind = RuleKind::kAdam}), 2U);
  CHECK_EQUAL(moments({.kind = RuleKind::kAdamW, .amsgrad = true}), kMostMoments);
  CHECK_EQUAL(moments({.kind = RuleKind::kAdagrad}), 1U);
  CHECK_EQUAL(moments({.kind = RuleKind::kRmsprop}), 1U);
  CHECK_EQUAL(moments({.kind = RuleKind::kRmsprop, .centered = true}), 2U);
  CHECK_EQUAL(
      moments({.kind = RuleKind::kRmsprop, .momentum = 0.9, .centered = true}), kMostMoments);
  Trained trained({.kind = RuleKind::kAdagrad, .initialAccumulator = 0.5}, Floats(2));
  CHECK_EQUAL(trained.moments[0], Floats{0.5, 0.5});
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

TEST(hyperParametersThatTorchRefusesAreRefused) {
  const std::vector<UpdateRule> bad{
      {.kind = RuleKind::kSgd, .lr = -1},
      {.kind = RuleKind::kSgd, .lr = kNan},
      {.kind = RuleKind::kSgd, .weightDecay = -1},
      {.kind = RuleKind::kSgd, .momentum = -1},
      {.kind = RuleKind::kSgd, .dampening = kNan},
      {.kind = RuleKind::kSgd, .nesterov = true},
      {.kind = RuleKind::kSgd, .momentum = 0.9, .dampening = 0.1, .nesterov = true},
      {.kind = RuleKind::kAdam, .beta1 = 1},
      {.kind = RuleKind::kAdam, .beta2 = -0.1},
      {.kind = RuleKind::kAdamW, .eps = -1},
      {.kind = RuleKind::kAdagrad, .lrDecay = -1},
      {.kind = RuleKind::kAdagrad, .initialAccumulator = -1},
      {.kind = RuleKind::kRmsprop, .alpha = -1},
      {.kind = RuleKind::kRmsprop, .momentum = kNan},
      {.kind = static_cast<RuleKind>(77)},
  };
  for (const UpdateRule& rule : bad) {
    CHECK_THROWS(InvalidUsage, validate(rule));
    Floats value(1);
    CHECK_THROWS(InvalidUsage, apply(rule, 1, Floats(1), value, {}));
  }
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, validate(bad[0])), "lr of an optimizer is -1");
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, momentsOf(bad.back())), "no update rule 77");
  // What a kind does not know is ignored.
  validate({.kind = RuleKind::kAdagrad, .momentum = -1, .beta1 = 7, .nesterov = true});
}

TEST(inputsAreAddedInTheirOrder) {
  // 1 is lost beside 2^24, so the order shows; ten inputs take more than one pass.
  const float large = std::ldexp(1.0F, 24);
  std::vector<Floats> inputs(10, Floats(2500, 1));
  inputs[1] = Floats(2500, large);
  inputs[8] = Floats(2500, -large);
  Floats out(2500, -1);
  sumFloats(inputs, out);
  CHECK_EQUAL(out, Floats(2500, 1)); // only the last one counts
}

TEST(sixteenBitSumsAreRoundedOnceToEven) {
  // In float16, 2048 + 1 is a tie that goes to 2048; with two more, nothing was lost on the way.
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x6800, 0x3C00}), 0x6800);
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x6800, 0x3C00, 0x3C00}), 0x6801);
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x6800, 0x3C00, 0x3C00, 0x3C00}), 0x6802); // 2051
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x7BFF, 0x7BFF}), 0x7C00);                 // infinite
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x7BFF, 0x7BFF, 0xFBFF}), 0x7BFF);
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x7BFF, 0x4B80}), 0x7BFF); // 65504 + 15
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x7BFF, 0x4C00}), 0x7C00); // 65504 + 16
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x0001, 0x03FF}), 0x0400); // to the least normal one
  CHECK_EQUAL(sumBits(ElementType::kFloat16, {0x7C00, 0xFC00}) & 0x7E00, 0x7E00); // not a number
  CHECK_EQUAL(sumBits(ElementType::kBfloat16, {0x4380, 0x3F80}), 0x4380);         // 256 + 1
  CHECK_EQUAL(sumBits(ElementType::kBfloat16, {0x4380, 0x3F80, 0x3F80}), 0x4381);
  CHECK_EQUAL(sumBits(ElementType::kBfloat16, {0x7F7F, 0x7F7F}), 0x7F80);
  CHECK_EQUAL(sumBits(ElementType::kBfloat16, {0x7F81}) & 0x7FC0, 0x7FC0); // quiet, not infinite
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

TEST(sumsOfNothingAndOfPartsOfElementsAreRefused) {
  std::array<std::byte, 8> memory{};
  const std::vector<const std::byte*> inputs{memory.data()};
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, sum(ElementType::kFloat32, {}, memory.data(), 8)), "of nothing");
  CHECK_CONTAINS(
      CHECK_THROWS(InvalidUsage, sum(ElementType::kFloat64, inputs, memory.data(), 4)),
      "4 bytes are no whole number of elements of 8");
  CHECK_THROWS(InvalidUsage, sum(ElementType::kFloat16, inputs, memory.data(), 3));
  CHECK_THROWS(InvalidUsage, sum(static_cast<ElementType>(9), inputs, memory.data(), 8));
  sum(ElementType::kFloat32, inputs, memory.data(), 0);
}

} // namespace hvd_order

int main(int argc, char** argv) {
  return hvd_order::test::runAll(argc, argv);
}
