#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/arithmetic/element_sum.h" // IWYU pragma: export

namespace hvd_order {

/// The optimizers of torch.optim that a parameter server can be.
enum class RuleKind : std::uint8_t { kSgd, kAdam, kAdamW, kAdagrad, kRmsprop };

/// An optimizer with its hyper-parameters, as torch.optim names them. What a kind does not know is
/// ignored. The defaults suit no kind in particular: whoever makes a rule names what it needs.
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

/// No rule has more moments.
inline constexpr std::size_t kMostMoments = 3;

/// The state of a rule: each moment is an array with one number for each number of the parameter.
using Moments = std::span<const std::span<float>>;

/// @throws InvalidUsage if torch.optim refuses such hyper-parameters, or one is not a number.
void validate(const UpdateRule& rule);

/// How many moments the rule needs, at most kMostMoments. SGD and RMSprop need one more once they
/// have momentum.
[[nodiscard]] std::size_t momentsOf(const UpdateRule& rule);

/// Fills the moments with what they hold before the first step.
///
/// @throws InvalidUsage for what `validate` refuses, or another number of moments than `momentsOf`.
void initialiseMoments(const UpdateRule& rule, Moments moments);

/// One step: updates `value` and the moments in place from `gradient`, in the order of operations
/// of torch.optim on a CPU. Every number depends on the numbers at its own place alone and comes
/// out bitwise the same however the parameter is cut into spans, and on every CPU of one
/// architecture.
///
/// @param step counts from 1: Adam corrects its bias by it, Adagrad lowers its rate, and in step 1
///   the momentum buffer of SGD becomes the gradient, whatever it held.
/// @param gradient, value, moments of one size; no two may overlap.
/// @throws InvalidUsage for what `validate` refuses, for step 0, and for sizes that differ. Nothing
///   is changed then.
void apply(
    const UpdateRule& rule,
    std::uint64_t step,
    std::span<const float> gradient,
    std::span<float> value,
    Moments moments);

} // namespace hvd_order
