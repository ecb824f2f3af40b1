#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "transport/polled.h"

namespace py = pybind11;

namespace hvd_order {

void bindPolled(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PolledPort, std::shared_ptr<PolledPort>>(
      m, "PolledPort", py::module_local(),
      "Transport and control channel whose bytes a thread of Python moves.")
      .def(py::init(&PolledPort::create))
      .def("transport", &PolledPort::transport)
      .def("control", &PolledPort::control)
      .def(
          "set_buffers",
          [](PolledPort& port, ModelId model, const std::vector<std::uintptr_t>& addresses) {
            std::vector<std::byte*> buffers;
            buffers.reserve(addresses.size());
            for (const std::uintptr_t address : addresses) {
              // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses as numbers
              buffers.push_back(reinterpret_cast<std::byte*>(address));
            }
            port.setBuffers(model, std::move(buffers));
          },
          py::arg("model"), py::arg("addresses"))
      .def("remove_buffers", &PolledPort::removeBuffers, py::arg("model"))
      .def(
          "wait",
          [](PolledPort& port, double seconds) {
            port.wait(
                std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::duration<double>(seconds)));
          },
          py::arg("seconds"), Release(), "Until there is something to do, at most so long.")
      .def(
          "next_slice",
          [](PolledPort& port) -> py::object {
            const auto slice = port.nextSlice();
            if (!slice) {
              return py::none();
            }
            return py::make_tuple(
                slice->number, slice->model, slice->buffer,
                reinterpret_cast<std::uintptr_t>(slice->memory), slice->sizeBytes);
          },
          "(number, model, buffer, address, size in bytes) of a slice to be summed, or None.")
      .def(
          "next_message",
          [](PolledPort& port) -> py::object {
            auto message = port.nextMessage();
            if (!message) {
              return py::none();
            }
            return py::make_tuple(message->to, std::move(message->words));
          },
          "(rank, words) of a message to be sent, or None.")
      .def("done", &PolledPort::done, py::arg("number"), py::arg("error") = "", Release())
      .def("received", &PolledPort::received, py::arg("sender"), py::arg("words"), Release())
      .def("lost", &PolledPort::lost, py::arg("peer"), py::arg("why"), Release())
      .def("close", &PolledPort::close, Release());
}

} // namespace hvd_order
