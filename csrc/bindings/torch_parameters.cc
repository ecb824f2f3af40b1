// Protection of a deferred update from the code that could observe it: interception of a
// parameter's readers in Python, and a clean thread state for the update itself.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

// ---- the clean thread state ------------------------------------------------------------------

// State of a new thread: no tracing, no modes, no hooks, gradients enabled.
const at::ThreadLocalState& freshThreadState() {
  static const at::ThreadLocalState state = [] {
    std::optional<at::ThreadLocalState> fresh;
    std::thread([&fresh] { fresh.emplace(); }).join();
    return *fresh;
  }();
  return state;
}

// A context in which torch sees this thread as a new one.
class CleanRoom {
 public:
  void enter() {
    state_ = std::make_unique<at::ThreadLocalStateGuard>(freshThreadState());
    // After the guard: in a state that excludes the tracer's key, as where TorchScript runs, torch
    // refuses to set it.
    tracing_ = torch::jit::tracer::getTracingState();
    torch::jit::tracer::setTracingState(nullptr);
  }

  void exit(const py::args& /*error*/) {
    torch::jit::tracer::setTracingState(std::move(tracing_));
    state_.reset();
  }

 private:
  std::unique_ptr<at::ThreadLocalStateGuard> state_;
  std::shared_ptr<torch::jit::tracer::TracingState> tracing_;
};

// ---- readers in Python -----------------------------------------------------------------------

// Inside this context, functions of torch find no __torch_function__ of a tensor's class.
class SubclassesDisabled {
 public:
  SubclassesDisabled() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    if (before_ == at::impl::ENABLED) {
      at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::SUBCLASSES_DISABLED);
    }
  }
  SubclassesDisabled(const SubclassesDisabled&) = delete;
  SubclassesDisabled& operator=(const SubclassesDisabled&) = delete;
  ~SubclassesDisabled() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(before_);
  }

 private:
  at::impl::TorchFunctionDisabledState before_;
};

// A __torch_function__ without a Python frame while the function runs: torch.jit.trace records the
// innermost frame with every operator, and reports a difference if a second run lacks our frame.
py::cpp_function torchFunction(const py::function& before) {
  return py::cpp_function(
      [before](
          const py::object& /*type*/, const py::object& function, const py::object& types,
          const py::tuple& args, const py::object& kwargs) {
        const py::dict named = kwargs.is_none() ? py::dict() : py::dict(kwargs);
        const py::object answer = before(function, types, args, named);
        if (py::isinstance<py::tuple>(answer)) {
          return py::object(answer.cast<py::tuple>()[0]);
        }
        std::optional<SubclassesDisabled> aside;
        if (!answer.is_none()) {
          aside.emplace();
        }
        PyObject* result = PyObject_Call(function.ptr(), args.ptr(), named.ptr());
        if (result == nullptr) {
          throw py::error_already_set();
        }
        return py::reinterpret_steal<py::object>(result);
      },
      py::arg("type"), py::arg("func"), py::arg("types"), py::arg("args") = py::tuple(),
      py::arg("kwargs") = py::none());
}

} // namespace

void bindParameters(py::module_& m) {
  m.def(
      "torch_function", &torchFunction, py::arg("before"),
      "A __torch_function__ that calls before(func, types, args, kwargs), then the function: with "
      "other classes' __torch_function__ if the answer is None, without if it is False. The "
      "element of a tuple is the result instead.");
  py::class_<CleanRoom>(
      m, "CleanRoom", py::module_local(), "A context in which torch finds this thread as new.")
      .def(py::init<>())
      .def("__enter__", &CleanRoom::enter)
      .def("__exit__", &CleanRoom::exit);
}

} // namespace hvd_order
