#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>

namespace hvd_order {

/// Makes a function that any thread may release.
inline std::shared_ptr<pybind11::function> shareable(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* dropped) {
            const pybind11::gil_scoped_acquire gil;
            delete dropped;
          }};
}

/// Callbacks run on threads of connections: they take the GIL, and print an exception, because no
/// caller could catch it.
template <typename... Args>
std::function<void(Args...)> fromAnyThread(pybind11::function function) {
  return [shared = shareable(std::move(function))](Args... args) {
    const pybind11::gil_scoped_acquire gil;
    try {
      (*shared)(std::forward<Args>(args)...);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("hvd_order: callback of a connection");
    }
  };
}

} // namespace hvd_order
