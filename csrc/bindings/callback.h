#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace hvd_order {

/// Makes a function that any thread may release.
inline std::shared_ptr<pybind11::function> shareable(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* dropped) {
            const pybind11::gil_scoped_acquire gil;
            delete dropped;
          }};
}

/// Returns the text for Python. Libraries and operating systems report errors in any encoding:
/// bytes that are not UTF-8 are replaced, since a text that cannot be decoded would hide the error.
inline pybind11::str decoded(const std::string& text) {
  return pybind11::reinterpret_steal<pybind11::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

/// Arguments of callbacks as Python gets them.
template <typename T>
T&& forPython(T& argument) {
  return std::forward<T>(argument);
}
inline pybind11::str forPython(const std::string& text) {
  return decoded(text);
}

/// Callbacks run on threads of connections: they take the GIL, and print an exception, because no
/// caller could catch it.
template <typename... Args>
std::function<void(Args...)> fromAnyThread(pybind11::function function) {
  return [shared = shareable(std::move(function))](Args... args) {
    const pybind11::gil_scoped_acquire gil;
    try {
      (*shared)(forPython(args)...);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("hvd_order: callback of a connection");
    }
  };
}

} // namespace hvd_order
