#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/callback.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("hvd_order.base.errors").attr(name);
  PyErr_SetObject(type.ptr(), decoded(error.what()).ptr());
}

} // namespace

// The tree of error classes is in Python (hvd_order/base/errors.py); C++ errors are translated to
// it only here.
void bindErrors(py::module_& /*m*/) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) {
      return;
    }
    try {
      std::rethrow_exception(pointer);
    } catch (const InvalidUsage& e) {
      raise("InvalidUsage", e);
    } catch (const PeerLost& e) {
      raise("PeerLost", e);
    } catch (const TransferTimeout& e) {
      raise("TransferTimeout", e);
    } catch (const CollectiveError& e) {
      raise("HorovodInternalError", e);
    } catch (const BrokenInvariant& e) {
      raise("BrokenInvariant", e);
    } catch (const Error& e) {
      raise("HvdOrderError", e);
    }
  });
}

} // namespace hvd_order
