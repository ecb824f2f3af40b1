#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/element_sum.h" // IWYU pragma: export

namespace hvd_order {

/// Optimizers of torch.optim that a parameter server can run.
enum class RuleKind : std::uint8_t { kSgd, kAdam, kAdamW, kAdagrad, kRmsprop };

/// An optimizer with its hyper-parameters, named as in torch.optim. A kind ignores the fields that
/// it does not use. The defaults suit no particular kind: the code that makes a rule sets every
/// field that the kind uses.
struct UpdateRule {
  RuleKind kind = RuleKind::kSgd;
  double lr = 1e-3;
  double weightDecay = 0;
  double momentum = 0;           // SGD, RMSprop
  double dampening = 0;          // SGD
  double beta1 = 0.9;            // Adam, AdamW
  double beta2 = 0.999;          // Adam, AdamW
  double eps = 1e-8;             // all but SGD
  double alpha = 0.99;           // RMSprop
  double lrDecay = 0;            // Adagrad
  double initialAccumulator = 0; // Adagrad
  bool nesterov = false;         // SGD
  bool amsgrad = false;          // Adam, AdamW
  bool centered = false;         // RMSprop
  bool maximize = false;
  friend bool operator==(const UpdateRule&, const UpdateRule&) = default;
};

/// Largest number of moments of any rule.
inline constexpr std::size_t kMostMoments = 3;

/// The state of a rule: each moment is an array with one number per number of the parameter.
using Moments = std::span<const std::span<float>>;

/// Checks the hyper-parameters.
/// @throws InvalidUsage if torch.optim refuses them, or one is not a number.
void validate(const UpdateRule& rule);

/// Number of moments that the rule needs, at most kMostMoments. SGD and RMSprop need one more with
/// momentum.
[[nodiscard]] std::size_t momentsOf(const UpdateRule& rule);

/// Fills the moments with their values before the first step.
///
/// @throws InvalidUsage for what `validate` refuses, or if the number of moments differs from
///   `momentsOf`.
void initialiseMoments(const UpdateRule& rule, Moments moments);

/// Performs one step: updates `value` and the moments in place from `gradient`, in the order of
/// operations of torch.optim on a CPU. Every number depends only on the numbers at its own place.
/// The result is bitwise the same however the parameter is cut into spans, and on every CPU of one
/// architecture.
///
/// @param step counts from 1. Adam corrects its bias by it, Adagrad lowers its rate, and in step 1
///   the momentum buffer of SGD becomes the gradient, regardless of its content.
/// @param gradient, value, moments of one size; no two may overlap.
/// @throws InvalidUsage for what `validate` refuses, for step 0, and for sizes that differ.
///   Nothing is changed then.
void apply(
    const UpdateRule& rule,
    std::uint64_t step,
    std::span<const float> gradient,
    std::span<float> value,
    Moments moments);

} // namespace hvd_order
