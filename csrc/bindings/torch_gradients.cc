#include "bindings/bindings.h"
#include "torch/c10d/all_reduce/slice_coding.h"
#include "torch/gradients/gradient_hook.h"
#include "torch/gradients/home_streams.h"
#include "torch/gradients/use_flags.h"
#include "torch/packing/device_kernels.h"
#include "torch/packing/packing.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

void bindStreams(py::module_& m) {
  py::class_<StreamPoint, std::shared_ptr<StreamPoint>>(
      m, "StreamPoint", py::module_local(), "A point in the work of the home streams.")
      .def("passed", &StreamPoint::passed);
  py::class_<HomeStreams, std::shared_ptr<HomeStreams>>(
      m, "HomeStreams", py::module_local(),
      "The streams on which sums are unpacked and parameters updated.")
      .def(py::init<const std::vector<c10::Device>&>(), py::arg("devices"))
      .def("follow", &HomeStreams::follow)
      .def("wait_for_current", &HomeStreams::waitForCurrent, py::arg("values"));
  py::class_<OnHomeStreams>(
      m, "OnHomeStreams", py::module_local(), "A context in which work runs on the home streams.")
      .def(py::init<std::shared_ptr<HomeStreams>>(), py::arg("home"))
      .def(
          "__enter__",
          [](OnHomeStreams& context) -> OnHomeStreams& {
            context.enter();
            return context;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](OnHomeStreams& context, const py::args& /*error*/) { context.exit(); })
      .def("point", &OnHomeStreams::point);
  m.def(
      "read_use_flags", &readUseFlags, py::arg("flags"), py::call_guard<py::gil_scoped_release>(),
      "The values of use flags whose sums have arrived.");
}

using Tensors = std::vector<at::Tensor>;

void bindPacking(py::module_& m) {
  m.def(
      "register_kernels",
      [](const std::string& type, const py::capsule& kernels) {
        registerKernels(c10::Device(type).type(), kernels.get_pointer<const KernelTable>());
      },
      py::arg("device_type"), py::arg("kernels"), "Sets the kernels of a type of device.");
  m.def(
      "has_kernels",
      [](const std::string& type) { return kernelsOf(c10::Device(type).type()) != nullptr; },
      py::arg("device_type"), "Whether a type of device has kernels.");
  m.def(
      "pack",
      [](const Tensors& from, const Tensors& to, double scale) {
        std::vector<Packing> packings;
        for (std::size_t i = 0; i < from.size(); ++i) {
          packings.push_back({from[i], to.at(i), scale});
        }
        const py::gil_scoped_release noGil;
        pack(packings);
      },
      py::arg("from_"), py::arg("to"), py::arg("scale"), "to = cast(scale * from).");
  m.def(
      "encode",
      [](const at::Tensor& values, WireFormat format, const std::optional<at::Tensor>& residual,
         bool writesBack) {
        const SliceCoding coding =
            codingOf({{0, values.numel(), format}}, values, residual.value_or(at::Tensor()), 1);
        const at::Tensor message =
            at::empty({coding.shards[0].bytes()}, values.options().dtype(at::kByte));
        SliceCoder coder(values, coding);
        coder.add(0, static_cast<std::byte*>(message.mutable_data_ptr()));
        coder.encode(writesBack);
        return message;
      },
      py::arg("values"), py::arg("format"), py::arg("residual") = std::nullopt,
      py::arg("writes_back") = false, "A message of contiguous values.");
  m.def(
      "decode",
      [](const at::Tensor& messages, const at::Tensor& values, WireFormat format, int own) {
        const SliceCoding coding = codingOf({{0, values.numel(), format}}, values, {}, 1);
        if (!messages.is_contiguous() || messages.size(1) != coding.shards[0].bytes()) {
          throw InvalidUsage("messages of other values or formats");
        }
        SliceCoder coder(values, coding);
        coder.add(0, static_cast<std::byte*>(messages.mutable_data_ptr()));
        coder.decode(
            {static_cast<std::int32_t>(messages.size(0)) + (own >= 0 ? 1 : 0), own,
             coding.shards[0].bytes()});
      },
      py::arg("messages"), py::arg("values"), py::arg("format"), py::arg("own") = -1,
      "values = the sum of decoded messages, of which each is a row.");
  m.def(
      "unpack",
      [](const Tensors& from, const Tensors& to, double scale, bool squares) {
        std::vector<Unpacking> unpackings;
        for (std::size_t i = 0; i < from.size(); ++i) {
          unpackings.push_back({from[i], to.at(i)});
        }
        std::vector<std::optional<at::Tensor>> sums;
        {
          const py::gil_scoped_release noGil;
          for (at::Tensor& sum : unpack(unpackings, scale, squares)) {
            sums.push_back(sum.defined() ? std::optional(std::move(sum)) : std::nullopt);
          }
        }
        return sums;
      },
      py::arg("from_"), py::arg("to"), py::arg("scale"), py::arg("squares"),
      "to = scale * from; returns tensors whose sums are the sums of squares, or None.");
}

} // namespace

void bindGradients(py::module_& m) {
  bindStreams(m);
  bindPacking(m);
  py::class_<GradientCopier, std::shared_ptr<GradientCopier>>(
      m, "GradientCopier", py::module_local(),
      "Copies large gradients of the CPU beside the training.")
      .def(py::init<>())
      .def("release", &GradientCopier::release, "Frees the gradients that have been copied.");
  py::enum_<GradientEvent>(
      m, "GradientEvent", py::module_local(), "What moves a gradient to its next phase.")
      .value("SEND", GradientEvent::SEND)
      .value("SUM", GradientEvent::SUM)
      .value("DEFER", GradientEvent::DEFER)
      .value("UPDATE", GradientEvent::UPDATE)
      .value("BEGIN", GradientEvent::BEGIN);
  py::class_<GradientEntry, std::shared_ptr<GradientEntry>>(
      m, "GradientEntry", py::module_local(), "The part of a parameter entry that the hook needs.")
      .def(py::init<>())
      .def_readwrite("wire", &GradientEntry::wire)
      .def_property(
          "gradient", [](const GradientEntry& entry) { return entry.gradient.get(); },
          [](GradientEntry& entry, at::Tensor tensor) { entry.gradient.place(std::move(tensor)); })
      .def_property_readonly(
          "in_place", [](const GradientEntry& entry) { return entry.gradient.inPlace(); })
      .def_readwrite("on_wire", &GradientEntry::onWire)
      .def_readwrite("casts", &GradientEntry::casts)
      .def_readwrite("tensor", &GradientEntry::tensor)
      .def_readwrite("passes_to_go", &GradientEntry::passesToGo)
      .def_property_readonly("sent", &GradientEntry::isSent)
      .def_property_readonly("summed", &GradientEntry::isSummed)
      .def_property_readonly("update_pending", &GradientEntry::isUpdatePending)
      .def("advance", &GradientEntry::advance, py::arg("event"))
      .def("begin_step", &GradientEntry::beginStep, py::arg("passes"))
      .def_readwrite("late", &GradientEntry::late)
      .def_readonly("fresh", &GradientEntry::fresh)
      .def_readwrite("use_flag", &GradientEntry::useFlag)
      .def_property_readonly(
          "gradient_is_held", [](const GradientEntry& entry) { return entry.gradient.isHeld(); })
      .def(
          "name_locks",
          [](GradientEntry& entry, std::string ofGradient, std::string ofParameter) {
            entry.gradientLock.message = std::move(ofGradient);
            entry.parameterLock.message = std::move(ofParameter);
          },
          py::arg("of_gradient"), py::arg("of_parameter"))
      .def(
          "lock_gradient",
          [](GradientEntry& entry) { entry.gradientLock.close(entry.gradient.get()); })
      .def("unlock_gradient", [](GradientEntry& entry) { entry.gradientLock.open(); })
      .def(
          "lock_parameter",
          [](GradientEntry& entry, const at::Tensor& parameter,
             const std::vector<at::Tensor>& state) {
            entry.parameterLock.close(parameter);
            for (const at::Tensor& tensor : state) {
              entry.stateLocks.emplace_back().message = entry.parameterLock.message;
              entry.stateLocks.back().close(tensor);
            }
          },
          py::arg("parameter"), py::arg("state"))
      .def("unlock_parameter", [](GradientEntry& entry) {
        entry.parameterLock.open();
        entry.stateLocks.clear();
      });
  py::class_<GradientSender, std::shared_ptr<GradientSender>>(
      m, "GradientSender", py::module_local(), "Sends the gradients of one optimizer.")
      .def(
          py::init<
              std::shared_ptr<Engine>, std::shared_ptr<TorchTransport>,
              std::shared_ptr<GradientCopier>, double, py::type, py::str>(),
          py::arg("engine"), py::arg("transport"), py::arg("copier"), py::arg("scale"),
          py::arg("in_flight_class"), py::arg("guard_attribute"))
      .def_readwrite("model", &GradientSender::model)
      .def_readwrite("in_backward", &GradientSender::inBackward)
      .def_readwrite("copies_beside", &GradientSender::copiesBeside)
      .def(
          "begin_pass", &GradientSender::beginPass, py::arg("entries"), py::arg("parameters"),
          "Begins a backward pass.")
      .def(
          "hand_over", &GradientSender::handOver, py::arg("entry"),
          "Marks a gradient ready, at the end of the pass if it is the last.")
      .def("release", &GradientSender::release, "Marks the gradient ready that is held back.")
      .def("take_back", &GradientSender::takeBack, "Forgets the gradient that is held back.")
      .def(
          "hook", &GradientSender::hook, py::arg("entry"), py::arg("guard"), py::arg("otherwise"),
          "A hook that sends the ordinary gradient and calls `otherwise` for any other.")
      .def(
          "send", &GradientSender::send, py::arg("entry"), py::arg("gradient"),
          "Does entry.wire = scale * gradient and marks the gradient ready, now or soon; false: "
          "the two differ in kind, nothing was done.");
  py::enum_<Places>(m, "Places", py::module_local(), "Where gradients are.")
      .value("KEPT", Places::KEPT, "Where they were put.")
      .value("LEFT", Places::LEFT, "Some have been given other memory.")
      .value(
          "UNFIT", Places::UNFIT,
          "Gradients have another shape, dtype or device than their places.");
  m.def(
      "gradient_dtype", &gradientDtype, py::arg("parameter"),
      "The dtype of a parameter's gradients.");
  m.def(
      "hooked", &hooked, py::arg("parameters"),
      "For each parameter, whether anything is called when its gradient has come.");
  m.def(
      "place_in", &placeIn, py::arg("buffer"), py::arg("sizes"), py::arg("strides"),
      py::arg("offset"),
      "A tensor in a buffer, at an offset in elements, with a storage of its own.");
  py::enum_<GradientReach>(
      m, "GradientReach", py::module_local(), "Who reaches a gradient beside its parameter.")
      .value("ALONE", GradientReach::ALONE, "Nobody.")
      .value("SHARED", GradientReach::SHARED, "Something shares its memory, maybe autograd itself.")
      .value("HELD", GradientReach::HELD, "The program has the tensor, or has made its memory.");
  m.def(
      "find_given_up", &findGivenUp, py::arg("entries"),
      "The first of the entries whose sum lacks a rank that has given up the step, or -1.");
  m.def(
      "advance", py::overload_cast<const py::sequence&, GradientEvent>(&advance),
      py::arg("entries"), py::arg("event"), "Advances the phases of gradients.");
  m.def(
      "unlock_gradients", &unlockGradients, py::arg("entries"),
      "Makes the memory of gradients accessible, whose sums have come.");
  m.def(
      "gradient_reach", &gradientReach, py::arg("entry"), py::arg("parameter"),
      "Who reaches the gradient of a parameter beside the parameter and its entry.");
  m.def(
      "move_out", &moveOut, py::arg("gradient"),
      "Gives a tensor in a buffer, and all that share its storage, memory of their own.");
  m.def("places", &places, py::arg("entries"), py::arg("parameters"), "Where all gradients are.");
  m.def(
      "mark_ready_when_computed", &markReadyWhenComputed, py::arg("engine"), py::arg("transport"),
      py::arg("model"), py::arg("tensor"), py::arg("gradient"),
      py::call_guard<py::gil_scoped_release>(),
      "Marks a gradient ready once its device has computed it.");
}

} // namespace hvd_order
