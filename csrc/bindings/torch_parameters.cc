// Protection of a deferred update from the code that could observe it: detection of references to
// a parameter's memory, a lock on that memory, interception of its readers in Python, and a clean
// thread state for the update itself.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "torch/gradients/owners.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

// ---- references to a parameter ---------------------------------------------------------------

enum class Reach { SHARED, HELD, FOREIGN };

// What else reaches a parameter's memory.
std::optional<Reach> reachOf(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return Reach::FOREIGN;
  }
  // The Python object, and the node that accumulates the gradient while a graph has it.
  const bool hasNode = torch::autograd::impl::try_get_grad_accumulator(tensor) != nullptr;
  if (tensor.use_count() != (hasNode ? 2 : 1)) {
    return Reach::HELD;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (ownersOf(*storage) != 1) {
    return Reach::SHARED;
  }
  return isOurs(*storage) ? std::nullopt : std::optional(Reach::FOREIGN);
}

// Of each parameter, by its place.
std::map<std::size_t, Reach> reached(const py::sequence& parameters) {
  std::map<std::size_t, Reach> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (const auto reach = reachOf(py::object(parameters[i]).ptr())) {
      found.emplace(i, *reach);
    }
  }
  return found;
}

bool isPrivateValue(PyObject* value) {
  if (!THPVariable_Check(value)) {
    return true; // numbers do not change, and no known optimizer keeps containers of tensors
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  return Py_REFCNT(value) == 1 && tensor.use_count() == 1 &&
      (!tensor.has_storage() || ownersOf(*tensor.storage().unsafeGetStorageImpl()) == 1);
}

// For each parameter, whether only the optimizer refers to the parameter's state.
std::vector<bool> statePrivate(const py::object& optimizer, const py::sequence& parameters) {
  const py::object attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(optimizer.ptr(), nullptr));
  PyObject* state = PyDict_GetItemString(attributes.ptr(), "state");
  if (state == nullptr || !PyDict_Check(state) || Py_REFCNT(state) != 1) {
    return std::vector<bool>(parameters.size(), false);
  }
  std::vector<bool> found;
  found.reserve(parameters.size());
  for (const py::object parameter : parameters) {
    PyObject* kept = PyDict_GetItemWithError(state, parameter.ptr());
    if (kept == nullptr) {
      if (PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
      found.push_back(true);
      continue;
    }
    bool isPrivate = PyDict_Check(kept) && Py_REFCNT(kept) == 1;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t place = 0;
    while (isPrivate && PyDict_Next(kept, &place, &key, &value) != 0) {
      isPrivate = isPrivateValue(value);
    }
    found.push_back(isPrivate);
  }
  return found;
}

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
  py::enum_<Reach>(m, "Reach", py::module_local(), "Who else reaches a tensor's memory.")
      .value("SHARED", Reach::SHARED, "Another tensor, array or storage as well.")
      .value("HELD", Reach::HELD, "C++ holds the tensor itself.")
      .value("FOREIGN", Reach::FOREIGN, "Whoever has allocated the memory, which torch has not.");
  m.def(
      "reached", &reached, py::arg("parameters"),
      "Who else reaches the memory of parameters, by their places.");
  m.def(
      "state_private", &statePrivate, py::arg("optimizer"), py::arg("parameters"),
      "For each parameter, whether nobody but the optimizer has what it keeps about it.");
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
