#include "servers/arithmetic/update_rule.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/vector_loops.h"

// The optimizers of torch.optim as loops over the numbers of a slice.
//
// Each rule is a lambda over one place: gradient, value and moments. `update` runs it over the
// arrays with the widest vectors of the CPU (vector_loops.h). Flags that change the formula
// (weight decay, momentum, Nesterov, AMSGrad, centered) are turned into types outside of the loop,
// so loops contain no branches on them.
//
// Invariant: a number depends only on the numbers at its own place, and every operation is done in
// the order of torch.optim on a CPU, in float32; factors that depend only on rule and step are
// computed in double and rounded once. So the result does not depend on how a parameter is cut
// into slices, nor on the width of vectors, and owner and replica stay bitwise equal on CPUs of
// one architecture.
//
// Source: the optimizers of torch.optim (SGD, Adam, AdamW, Adagrad, RMSprop) with their own names
// of hyper-parameters; Lerp is torch.lerp.
namespace hvd_order {

namespace {

// The arrays of one step.
struct Arrays {
  std::span<const float> gradient;
  std::span<float> value;
  Moments moments;
};

template <typename Element, typename... Moment>
HVDO_INLINE inline void forEach(
    Element element,
    std::size_t count,
    const float* __restrict gradient,
    float* __restrict value,
    Moment* __restrict... moments) {
  for (std::size_t i = 0; i < count; ++i) {
    element(gradient[i], value[i], moments[i]...);
  }
}

template <typename Element, std::size_t... kMoment>
void update(const Arrays& arrays, Element element, std::index_sequence<kMoment...>) {
  runOnWidestVectors([=]() HVDO_INLINE {
    forEach(
        element, arrays.value.size(), arrays.gradient.data(), arrays.value.data(),
        arrays.moments[kMoment].data()...);
  });
}

// Calls `element(gradient, value, moments...)` with the numbers at each place.
template <std::size_t kMoments, typename Element>
void update(const Arrays& arrays, Element element) {
  update(arrays, element, std::make_index_sequence<kMoments>());
}

// Calls `body` with the flag as a type, so that the compiler makes a loop for either value.
template <typename Body>
void withFlag(bool flag, Body body) {
  flag ? body(std::true_type()) : body(std::false_type());
}

// The gradient after weightDecay and maximize.
template <bool kDecays>
struct Descent {
  explicit Descent(const UpdateRule& rule)
      : sign(rule.maximize ? -1.0F : 1.0F), decay(static_cast<float>(rule.weightDecay)) {}

  HVDO_INLINE float operator()(float gradient, float value) const {
    if constexpr (kDecays) {
      return sign * gradient + decay * value;
    }
    return sign * gradient;
  }

  float sign;
  float decay;
};

// torch.lerp: interpolates from the nearer end.
struct Lerp {
  explicit Lerp(double weight)
      : fromEnd(static_cast<float>(weight) >= 0.5F),
        factor(fromEnd ? static_cast<float>(weight) - 1.0F : static_cast<float>(weight)) {}

  HVDO_INLINE float operator()(float start, float end) const {
    return (fromEnd ? end : start) + factor * (end - start);
  }

  bool fromEnd;
  float factor;
};

void applySgd(const UpdateRule& rule, std::uint64_t step, const Arrays& arrays) {
  const auto rate = static_cast<float>(-rule.lr);
  const auto momentum = static_cast<float>(rule.momentum);
  const auto added = static_cast<float>(1 - rule.dampening);
  withFlag(rule.weightDecay != 0, [&](auto decays) {
    const Descent<decays.value> descent(rule);
    if (rule.momentum == 0) {
      update<0>(arrays, [=](float gradient, float& value) HVDO_INLINE {
        value += rate * descent(gradient, value);
      });
      return;
    }
    withFlag(rule.nesterov, [&](auto nesterov) {
      withFlag(step == 1, [&](auto first) {
        update<1>(arrays, [=](float gradient, float& value, float& buffer) HVDO_INLINE {
          const float down = descent(gradient, value);
          buffer = first.value ? down : buffer * momentum + added * down;
          value += rate * (nesterov.value ? down + momentum * buffer : buffer);
        });
      });
    });
  });
}

void applyAdam(const UpdateRule& rule, std::uint64_t step, const Arrays& arrays) {
  const auto steps = static_cast<double>(step);
  const Lerp mean(1 - rule.beta1);
  const auto kept = static_cast<float>(rule.beta2);
  const auto added = static_cast<float>(1 - rule.beta2);
  const auto rate = static_cast<float>(-rule.lr / (1 - std::pow(rule.beta1, steps)));
  const auto correction = static_cast<float>(std::sqrt(1 - std::pow(rule.beta2, steps)));
  const auto eps = static_cast<float>(rule.eps);
  // AdamW shrinks the parameter; Adam adds the decay to the gradient.
  const bool decoupled = rule.kind == RuleKind::kAdamW;
  const auto shrink = static_cast<float>(decoupled ? 1 - rule.lr * rule.weightDecay : 1.0);
  withFlag(!decoupled && rule.weightDecay != 0, [&](auto decays) {
    const Descent<decays.value> descent(rule);
    withFlag(rule.amsgrad, [&](auto amsgrad) {
      update<amsgrad.value ? 3 : 2>(
          arrays, [=](float gradient, float& value, float& m, float& v, auto&... most) HVDO_INLINE {
            const float down = descent(gradient, value);
            m = mean(m, down);
            v = v * kept + added * down * down;
            float scale = v;
            // `most` exists with amsgrad only. Like torch.maximum, keeps NaN.
            ((scale = most = v > most || v != v ? v : most), ...);
            value = value * shrink + rate * m / (std::sqrt(scale) / correction + eps);
          });
    });
  });
}

void applyAdagrad(const UpdateRule& rule, std::uint64_t step, const Arrays& arrays) {
  const double slowed = 1 + static_cast<double>(step - 1) * rule.lrDecay;
  const auto rate = static_cast<float>(-rule.lr / slowed);
  const auto eps = static_cast<float>(rule.eps);
  withFlag(rule.weightDecay != 0, [&](auto decays) {
    const Descent<decays.value> descent(rule);
    update<1>(arrays, [=](float gradient, float& value, float& sum) HVDO_INLINE {
      const float down = descent(gradient, value);
      sum += down * down;
      value += rate * down / (std::sqrt(sum) + eps);
    });
  });
}

void applyRmsprop(const UpdateRule& rule, const Arrays& arrays) {
  const auto rate = static_cast<float>(-rule.lr);
  const auto kept = static_cast<float>(rule.alpha);
  const auto added = static_cast<float>(1 - rule.alpha);
  const Lerp toMean(1 - rule.alpha);
  const auto eps = static_cast<float>(rule.eps);
  const auto momentum = static_cast<float>(rule.momentum);
  withFlag(rule.weightDecay != 0, [&](auto decays) {
    const Descent<decays.value> descent(rule);
    withFlag(rule.centered, [&](auto centered) {
      withFlag(rule.momentum != 0, [&](auto hasMomentum) {
        constexpr bool kCentered = decltype(centered)::value;
        constexpr bool kHasMomentum = decltype(hasMomentum)::value;
        update<1U + kCentered + kHasMomentum>(
            arrays, [=](float gradient, float& value, float& square, auto&... more) HVDO_INLINE {
              const auto others = std::tie(more...);
              const float down = descent(gradient, value);
              square = square * kept + added * down * down;
              float variance = square;
              if constexpr (kCentered) {
                float& mean = std::get<0>(others);
                mean = toMean(mean, down);
                variance -= mean * mean;
              }
              const float spread = std::sqrt(variance) + eps;
              if constexpr (kHasMomentum) {
                float& buffer = std::get<kCentered ? 1 : 0>(others);
                buffer = buffer * momentum + down / spread;
                value += rate * buffer;
              } else {
                value += rate * down / spread;
              }
            });
      });
    });
  });
}

// `condition` is false for NaN too.
void demand(bool condition, const char* name, double value, const char* range) {
  if (!condition) {
    throw InvalidUsage(concat(name, " of an optimizer is ", value, "; it must be ", range));
  }
}

void checkMoments(const UpdateRule& rule, Moments moments) {
  if (moments.size() != momentsOf(rule)) {
    throw InvalidUsage(concat(
        "an update rule got ", moments.size(), " arrays of state; it has ", momentsOf(rule)));
  }
}

} // namespace

void validate(const UpdateRule& rule) {
  const auto notNegative = [](double value, const char* name) {
    demand(value >= 0, name, value, "at least 0");
  };
  const auto fraction = [](double value, const char* name) {
    demand(value >= 0 && value < 1, name, value, "in [0, 1)");
  };
  notNegative(rule.lr, "lr");
  notNegative(rule.weightDecay, "weight_decay");
  switch (rule.kind) {
    case RuleKind::kSgd:
      notNegative(rule.momentum, "momentum");
      demand(!std::isnan(rule.dampening), "dampening", rule.dampening, "a number");
      if (rule.nesterov && (rule.momentum == 0 || rule.dampening != 0)) {
        throw InvalidUsage("Nesterov momentum needs a momentum and no dampening");
      }
      return;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      fraction(rule.beta1, "beta1");
      fraction(rule.beta2, "beta2");
      notNegative(rule.eps, "eps");
      return;
    case RuleKind::kAdagrad:
      notNegative(rule.lrDecay, "lr_decay");
      notNegative(rule.initialAccumulator, "initial_accumulator_value");
      notNegative(rule.eps, "eps");
      return;
    case RuleKind::kRmsprop:
      notNegative(rule.momentum, "momentum");
      notNegative(rule.alpha, "alpha");
      notNegative(rule.eps, "eps");
      return;
  }
  throw InvalidUsage(concat("there is no update rule ", static_cast<int>(rule.kind)));
}

std::size_t momentsOf(const UpdateRule& rule) {
  switch (rule.kind) {
    case RuleKind::kSgd:
      return rule.momentum != 0 ? 1 : 0;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      return rule.amsgrad ? 3 : 2;
    case RuleKind::kAdagrad:
      return 1;
    case RuleKind::kRmsprop:
      return 1U + (rule.centered ? 1U : 0U) + (rule.momentum != 0 ? 1U : 0U);
  }
  throw InvalidUsage(concat("there is no update rule ", static_cast<int>(rule.kind)));
}

void initialiseMoments(const UpdateRule& rule, Moments moments) {
  validate(rule);
  checkMoments(rule, moments);
  const double start = rule.kind == RuleKind::kAdagrad ? rule.initialAccumulator : 0;
  for (const std::span<float> moment : moments) {
    std::ranges::fill(moment, static_cast<float>(start));
  }
}

void apply(
    const UpdateRule& rule,
    std::uint64_t step,
    std::span<const float> gradient,
    std::span<float> value,
    Moments moments) {
  validate(rule);
  checkMoments(rule, moments);
  if (step == 0) {
    throw InvalidUsage("the steps of an update rule count from 1");
  }
  const auto sameSize = [&](std::size_t size, const char* what) {
    if (size != value.size()) {
      throw InvalidUsage(
          concat("a parameter of ", value.size(), " numbers has ", what, " of ", size));
    }
  };
  sameSize(gradient.size(), "a gradient");
  for (const std::span<float> moment : moments) {
    sameSize(moment.size(), "a state");
  }
  const Arrays arrays{gradient, value, moments};
  switch (rule.kind) {
    case RuleKind::kSgd:
      return applySgd(rule, step, arrays);
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      return applyAdam(rule, step, arrays);
    case RuleKind::kAdagrad:
      return applyAdagrad(rule, step, arrays);
    case RuleKind::kRmsprop:
      return applyRmsprop(rule, arrays);
  }
}

} // namespace hvd_order
