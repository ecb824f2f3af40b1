#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels.h"
#include "process_group.h"

namespace py = pybind11;

namespace test_device {

void registerDevice();

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  registerDevice();
  m.def(
      "set_delays",
      [](std::int64_t stream, int constantUs, int randomUs, int launchUs) {
        using us = std::chrono::microseconds;
        Device::get().setDelays(stream, {us(constantUs), us(randomUs), us(launchUs)});
      },
      py::arg("stream"), py::kw_only(), py::arg("constant_us") = 0, py::arg("random_us") = 0,
      py::arg("launch_us") = 0);
  m.def("seed", [](unsigned value) { Device::get().seed(value); });
  m.def(
      "synchronize", [] { Device::get().synchronize(); }, py::call_guard<py::gil_scoped_release>());
  m.def("current_stream", [] { return currentStream(); });
  m.def(
      "busy",
      [](double seconds) {
        Device::get().stream(currentStream()).enqueue([seconds] {
          std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        });
      },
      "Occupies the current stream.");
  m.def("close_gate", &closeGate, py::arg("stream"), "Stops a stream until open_gates().");
  m.def("open_gates", &openGates);
  m.def("counts", [] {
    py::dict all;
    all["events_created"] = counts().eventsCreated.load();
    all["pool_streams_taken"] = counts().poolStreamsTaken.load();
    all["kernel_launches"] = counts().kernelLaunches.load();
    return all;
  });
  m.def(
      "fail",
      [](std::int64_t stream, const std::string& text) {
        Device::get().stream(stream).enqueue([text] { throw std::runtime_error(text); });
      },
      py::arg("stream"), py::arg("text"), "Makes a stream fail for ever.");
  m.def(
      "kernels", [] { return py::capsule(&kernels(), hvd_order::KernelTable::kCapsule); },
      "The kernels of hvd_order, for register_kernels().");
  py::class_<AsyncBackend, c10d::Backend, c10::intrusive_ptr<AsyncBackend>>(m, "AsyncBackend")
      .def(
          py::init([](int rank, int size, const c10::intrusive_ptr<c10d::Backend>& gloo) {
            return c10::make_intrusive<AsyncBackend>(rank, size, gloo);
          }),
          py::arg("rank"), py::arg("size"), py::arg("gloo"))
      .def_property_readonly("stream", &AsyncBackend::stream)
      .def_property_readonly("all_reduces", &AsyncBackend::allReduces)
      .def("set_link", &AsyncBackend::setLink, py::arg("latency_s"), py::arg("seconds_per_byte"));
}

} // namespace test_device
