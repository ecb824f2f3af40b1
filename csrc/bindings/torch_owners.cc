// Who could observe a deferred update without being asked: owners of a parameter's memory, and of
// the state that the optimizer keeps about it. Plain tensors in the program's own dicts and lists
// (a kept state_dict) are owners whom the update can guard as it guards the parameter.

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings/bindings.h"
#include "torch/gradients/owners.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

enum class Reach { SHARED, HELD, FOREIGN };

c10::StorageImpl* storageOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

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
  if (ownersOf(*storageOf(tensor)) != 1) {
    return Reach::SHARED;
  }
  return isOurs(*storageOf(tensor)) ? std::nullopt : std::optional(Reach::FOREIGN);
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

// ---- tensors that the program keeps ------------------------------------------------------------

// Whether readers of the object can be guarded: a tensor of no other class than torch's own, or
// than the one that it has while it is guarded.
bool isPlainTensor(PyObject* object, const py::type& guarded) {
  return object != nullptr &&
      (reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass ||
       reinterpret_cast<PyObject*>(Py_TYPE(object)) == guarded.ptr());
}

// Whether the tensor can be reached through so many references in Python and by nothing else. An
// array made from the tensor holds it by one more.
bool isReachedBy(PyObject* object, std::size_t references) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return static_cast<std::size_t>(Py_REFCNT(object)) == references && tensor.use_count() == 1 &&
      tensor.layout() == at::kStrided && !tensor.requires_grad();
}

// The element of a container at a key, borrowed; null if there is none.
PyObject* elementAt(PyObject* container, PyObject* key) {
  if (PyDict_Check(container)) {
    return PyDict_GetItem(container, key);
  }
  const Py_ssize_t place = PyLong_AsSsize_t(key);
  if (PyList_Check(container)) {
    return place < PyList_GET_SIZE(container) ? PyList_GET_ITEM(container, place) : nullptr;
  }
  return PyTuple_GET_ITEM(container, place); // a container is a dict, a list or a tuple
}

// Calls found(key, element) for all elements of a dict with names or numbers as keys, a list or a
// tuple.
template <typename Found>
void forEachElement(PyObject* container, const Found& found) {
  if (PyDict_Check(container)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t place = 0;
    while (PyDict_Next(container, &place, &key, &value) != 0) {
      if (PyUnicode_Check(key) || PyLong_Check(key)) { // no code of the program compares them
        found([&] { return py::reinterpret_borrow<py::object>(key); }, value);
      }
    }
  } else if (PyList_Check(container) || PyTuple_Check(container)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(container); ++i) {
      found([&] { return py::int_(i); }, PySequence_Fast_GET_ITEM(container, i));
    }
  }
}

// Where in dicts, lists and tuples among `objects` there are plain tensors of the parameters'
// memory: (place of the parameter, container, key).
py::list
findKept(const py::list& objects, const py::sequence& parameters, const py::type& guarded) {
  std::unordered_map<c10::StorageImpl*, std::size_t> places;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    places.emplace(storageOf(THPVariable_Unpack(py::object(parameters[i]).ptr())), i);
  }
  std::unordered_map<PyObject*, std::size_t> tensors;
  for (const py::handle object : objects) {
    if (isPlainTensor(object.ptr(), guarded)) {
      const auto place = places.find(storageOf(THPVariable_Unpack(object.ptr())));
      if (place != places.end()) {
        tensors.emplace(object.ptr(), place->second);
      }
    }
  }
  py::list found;
  if (tensors.empty()) {
    return found;
  }
  for (const py::handle container : objects) {
    forEachElement(container.ptr(), [&](const auto& key, PyObject* element) {
      const auto tensor = tensors.find(element);
      if (tensor != tensors.end()) {
        found.append(py::make_tuple(tensor->second, container, key()));
      }
    });
  }
  return found;
}

// The tensors at some positions, (place of a container, key), if nothing else reaches the
// parameter's memory beside the parameter; else None.
py::object keptTensors(
    const py::handle& parameter,
    const py::list& containers,
    const py::list& positions,
    const py::type& guarded) {
  c10::StorageImpl* storage = storageOf(THPVariable_Unpack(parameter.ptr()));
  std::unordered_map<PyObject*, std::size_t> references;
  for (const py::handle position : positions) {
    const auto place = position.cast<std::pair<std::size_t, py::object>>();
    PyObject* tensor =
        elementAt(PyList_GET_ITEM(containers.ptr(), place.first), place.second.ptr());
    if (isPlainTensor(tensor, guarded) && storageOf(THPVariable_Unpack(tensor)) == storage) {
      ++references[tensor];
    }
  }
  if (references.size() + 1 != ownersOf(*storage)) {
    return py::none();
  }
  for (const auto& [tensor, count] : references) {
    if (!isReachedBy(tensor, count)) {
      return py::none();
    }
  }
  py::list tensors;
  for (const auto& [tensor, count] : references) {
    tensors.append(py::reinterpret_borrow<py::object>(tensor));
  }
  return tensors;
}

// Of each object of a list, whether only the list holds it.
std::vector<bool> heldAlone(const py::list& objects) {
  std::vector<bool> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    found.push_back(Py_REFCNT(PyList_GET_ITEM(objects.ptr(), i)) == 1);
  }
  return found;
}

// ---- the optimizer's state ---------------------------------------------------------------------

bool isPrivateValue(PyObject* value) {
  if (!THPVariable_Check(value)) {
    return true; // numbers do not change, and no known optimizer keeps containers of tensors
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  return Py_REFCNT(value) == 1 && tensor.use_count() == 1 &&
      (!tensor.has_storage() || (ownersOf(*storageOf(tensor)) == 1 && isOurs(*storageOf(tensor))));
}

// Whether readers of one parameter's state can be guarded: it consists of plain tensors. Empty, the
// update may put something there.
bool canBeGuarded(PyObject* kept, const py::type& guarded) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(kept, &place, &key, &value) != 0) {
    if (!isPlainTensor(value, guarded)) {
      return false;
    }
  }
  return place > 0;
}

bool hasPrivateValues(PyObject* kept) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(kept, &place, &key, &value) != 0) {
    if (!isPrivateValue(value)) {
      return false;
    }
  }
  return true;
}

// The state of parameters, by their places, that the program can read without the optimizer: a dict
// whose tensors can be guarded, else None.
std::map<std::size_t, py::object>
heldStates(const py::object& optimizer, const py::sequence& parameters, const py::type& guarded) {
  const py::object attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(optimizer.ptr(), nullptr));
  PyObject* state = PyDict_GetItemString(attributes.ptr(), "state");
  const bool isKnown = state != nullptr && PyDict_Check(state) && Py_REFCNT(state) == 1;
  std::map<std::size_t, py::object> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    PyObject* kept =
        isKnown ? PyDict_GetItemWithError(state, py::object(parameters[i]).ptr()) : nullptr;
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    if (kept == nullptr) {
      if (!isKnown) {
        found.emplace(i, py::none());
      }
    } else if (!PyDict_Check(kept) || !hasPrivateValues(kept)) {
      found.emplace(i, py::none());
    } else if (Py_REFCNT(kept) != 1) {
      const bool can = canBeGuarded(kept, guarded);
      found.emplace(i, can ? py::reinterpret_borrow<py::object>(kept) : py::none());
    }
  }
  return found;
}

} // namespace

void bindOwners(py::module_& m) {
  py::enum_<Reach>(m, "Reach", py::module_local(), "Who else reaches a tensor's memory.")
      .value("SHARED", Reach::SHARED, "Another tensor, array or storage as well.")
      .value("HELD", Reach::HELD, "C++ holds the tensor itself.")
      .value("FOREIGN", Reach::FOREIGN, "Whoever has allocated the memory, which torch has not.");
  m.def(
      "reached", &reached, py::arg("parameters"),
      "Who else reaches the memory of parameters, by their places.");
  m.def(
      "find_kept", &findKept, py::arg("objects"), py::arg("parameters"), py::arg("guarded"),
      "Where dicts, lists and tuples among objects have plain tensors of the parameters' memory.");
  m.def(
      "kept_tensors", &keptTensors, py::arg("parameter"), py::arg("containers"),
      py::arg("positions"), py::arg("guarded"),
      "The tensors at these positions, if they are all that reaches the parameter's memory.");
  m.def(
      "held_alone", &heldAlone, py::arg("objects"),
      "Of each object of a list, whether only the list holds it.");
  m.def(
      "held_states", &heldStates, py::arg("optimizer"), py::arg("parameters"), py::arg("guarded"),
      "The state of parameters, by their places, that the program can read without the optimizer.");
}

} // namespace hvd_order
