#include <pybind11/stl.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "base/element_sum.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "servers/arithmetic/update_rule.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

template <typename Value>
using Names = std::initializer_list<std::pair<const char*, Value>>;

constexpr Names<RuleKind> kKinds = {
    {"sgd", RuleKind::kSgd},         {"adam", RuleKind::kAdam},       {"adamw", RuleKind::kAdamW},
    {"adagrad", RuleKind::kAdagrad}, {"rmsprop", RuleKind::kRmsprop},
};

constexpr Names<ElementType> kElementTypes = {
    {"float32", ElementType::kFloat32},
    {"float64", ElementType::kFloat64},
    {"float16", ElementType::kFloat16},
    {"bfloat16", ElementType::kBfloat16},
};

template <typename Value>
Value named(const std::string& name, const Names<Value>& names) {
  for (const auto& [known, value] : names) {
    if (name == known) {
      return value;
    }
  }
  throw InvalidUsage(concat("there is no '", name, "'"));
}

// A Python buffer, held while it is used.
class HeldArray final {
 public:
  HeldArray(const py::buffer& buffer, bool writable) : info_(buffer.request(writable)) {
    if (PyBuffer_IsContiguous(info_.view(), 'C') == 0) {
      throw InvalidUsage("a buffer must be contiguous");
    }
  }

  [[nodiscard]] std::size_t sizeBytes() const {
    return static_cast<std::size_t>(info_.size * info_.itemsize);
  }
  [[nodiscard]] std::byte* bytes() const {
    return static_cast<std::byte*>(info_.ptr);
  }
  [[nodiscard]] std::span<float> floats() const {
    if (info_.format != py::format_descriptor<float>::format()) {
      throw InvalidUsage(concat("a buffer must be of float32, not of '", info_.format, "'"));
    }
    return {static_cast<float*>(info_.ptr), static_cast<std::size_t>(info_.size)};
  }

 private:
  py::buffer_info info_;
};

std::vector<HeldArray> hold(const std::vector<py::buffer>& buffers, bool writable) {
  std::vector<HeldArray> held;
  held.reserve(buffers.size());
  for (const py::buffer& buffer : buffers) {
    held.emplace_back(buffer, writable);
  }
  return held;
}

std::vector<std::span<float>> floatsOf(const std::vector<HeldArray>& buffers) {
  std::vector<std::span<float>> spans;
  spans.reserve(buffers.size());
  for (const HeldArray& buffer : buffers) {
    spans.push_back(buffer.floats());
  }
  return spans;
}

void applyToBuffers(
    const UpdateRule& rule,
    std::uint64_t step,
    const py::buffer& gradient,
    const py::buffer& value,
    const std::vector<py::buffer>& moments) {
  const HeldArray heldGradient(gradient, /*writable=*/false);
  const HeldArray heldValue(value, /*writable=*/true);
  const std::vector<HeldArray> heldMoments = hold(moments, /*writable=*/true);
  const std::span<const float> slope = heldGradient.floats();
  const std::span<float> values = heldValue.floats();
  const std::vector<std::span<float>> state = floatsOf(heldMoments);
  const py::gil_scoped_release release;
  apply(rule, step, slope, values, state);
}

void sumBuffers(
    const std::string& dtype,
    const std::vector<py::buffer>& inputs,
    const py::buffer& out) {
  const ElementType type = named(dtype, kElementTypes);
  const std::vector<HeldArray> heldInputs = hold(inputs, /*writable=*/false);
  const HeldArray heldOut(out, /*writable=*/true);
  std::vector<const std::byte*> addresses;
  for (const HeldArray& input : heldInputs) {
    if (input.sizeBytes() != heldOut.sizeBytes()) {
      throw InvalidUsage(
          concat("an input of ", input.sizeBytes(), " bytes for a sum of ", heldOut.sizeBytes()));
    }
    addresses.push_back(input.bytes());
  }
  const py::gil_scoped_release release;
  sum(type, addresses, heldOut.bytes(), heldOut.sizeBytes());
}

} // namespace

void bindUpdateRule(py::module_& m) {
  const UpdateRule defaults;
  py::class_<UpdateRule>(
      m, "UpdateRule", py::module_local(),
      "An optimizer as parameter servers apply it; see csrc/servers/update_rule.h.")
      .def(
          py::init([](const std::string& kind, double lr, double weightDecay, double momentum,
                      double dampening, double beta1, double beta2, double eps, double alpha,
                      double lrDecay, double initialAccumulator, bool nesterov, bool amsgrad,
                      bool centered, bool maximize) {
            const UpdateRule rule{
                .kind = named(kind, kKinds),
                .lr = lr,
                .weightDecay = weightDecay,
                .momentum = momentum,
                .dampening = dampening,
                .beta1 = beta1,
                .beta2 = beta2,
                .eps = eps,
                .alpha = alpha,
                .lrDecay = lrDecay,
                .initialAccumulator = initialAccumulator,
                .nesterov = nesterov,
                .amsgrad = amsgrad,
                .centered = centered,
                .maximize = maximize};
            validate(rule);
            return rule;
          }),
          py::arg("kind"), py::kw_only(), py::arg("lr") = defaults.lr,
          py::arg("weight_decay") = defaults.weightDecay, py::arg("momentum") = defaults.momentum,
          py::arg("dampening") = defaults.dampening, py::arg("beta1") = defaults.beta1,
          py::arg("beta2") = defaults.beta2, py::arg("eps") = defaults.eps,
          py::arg("alpha") = defaults.alpha, py::arg("lr_decay") = defaults.lrDecay,
          py::arg("initial_accumulator_value") = defaults.initialAccumulator,
          py::arg("nesterov") = defaults.nesterov, py::arg("amsgrad") = defaults.amsgrad,
          py::arg("centered") = defaults.centered, py::arg("maximize") = defaults.maximize)
      .def_property_readonly("moments", &momentsOf, "How many arrays of state it needs.")
      .def(
          "initialise_moments",
          [](const UpdateRule& rule, const std::vector<py::buffer>& moments) {
            const std::vector<HeldArray> held = hold(moments, /*writable=*/true);
            const std::vector<std::span<float>> state = floatsOf(held);
            const py::gil_scoped_release release;
            initialiseMoments(rule, state);
          },
          py::arg("moments"))
      .def(
          "apply", &applyToBuffers, py::arg("step"), py::arg("gradient"), py::arg("value"),
          py::arg("moments"), "One step, counted from 1, on contiguous buffers of float32.");
  m.def(
      "sum_elements", &sumBuffers, py::arg("dtype"), py::arg("inputs"), py::arg("out"),
      "Adds buffers of float32, float64, float16 or bfloat16 up in their order.");
}

} // namespace hvd_order
