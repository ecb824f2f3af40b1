#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "scheduler/agreement.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using PySlice = std::pair<ModelId, SliceIndex>;

PySlice toPython(SliceKey slice) {
  return {slice.model, slice.index};
}

template <typename Range>
std::vector<PySlice> toPython(const Range& slices) {
  std::vector<PySlice> out;
  for (const SliceKey slice : slices) {
    out.push_back(toPython(slice));
  }
  return out;
}

std::vector<std::pair<ModelId, TensorId>> tensorsToPython(const std::vector<TensorKey>& tensors) {
  std::vector<std::pair<ModelId, TensorId>> out;
  for (const TensorKey tensor : tensors) {
    out.emplace_back(tensor.model, tensor.tensor);
  }
  return out;
}

void bindLayout(py::module_& m) {
  py::enum_<Operation>(m, "Operation", py::module_local(), "What the transfer of a slice does.")
      .value("ALL_REDUCE", Operation::kAllReduce)
      .value("REDUCE_SCATTER", Operation::kReduceScatter)
      .value("ALL_GATHER", Operation::kAllGather);
  py::class_<Slice>(m, "Slice", py::module_local(), "Contiguous byte range of a gradient buffer.")
      .def_readonly("buffer", &Slice::buffer)
      .def_readonly("offset_bytes", &Slice::offsetBytes)
      .def_readonly("size_bytes", &Slice::sizeBytes)
      .def_readonly("first_tensor", &Slice::firstTensor)
      .def_readonly("last_tensor", &Slice::lastTensor)
      .def_readonly("operation", &Slice::operation);
  py::class_<SliceLayout, std::shared_ptr<SliceLayout>>(
      m, "SliceLayout", py::module_local(), "Where tensors lie in buffers and how these are cut.")
      .def(
          py::init([](const std::vector<std::tuple<std::string, ByteCount, BufferId>>& tensors,
                      ByteCount sliceBytes, bool smallFront, bool split, bool sharded,
                      std::uint32_t maximaRanks, bool byNeed) {
            std::vector<TensorSpec> specs;
            for (const auto& [name, size, buffer] : tensors) {
              specs.push_back({name, size, buffer});
            }
            return std::make_shared<SliceLayout>(
                std::move(specs), sliceBytes, smallFront, split, sharded, maximaRanks, byNeed);
          }),
          py::arg("tensors"), py::arg("slice_bytes"), py::arg("small_front") = true,
          py::arg("split") = false, py::arg("sharded") = false, py::arg("maxima_ranks") = 0,
          py::arg("by_need") = false)
      .def_property_readonly("is_split", &SliceLayout::isSplit)
      .def_property_readonly("is_sharded", &SliceLayout::isSharded)
      .def("parameter_of", &SliceLayout::parameterOf, py::arg("gradient"))
      .def_property_readonly("squares_tensor", &SliceLayout::squaresTensor)
      .def_property_readonly("squared_tensors", &SliceLayout::squaredTensors)
      .def_property_readonly("maxima_ranks", &SliceLayout::maximaRanks)
      .def("first_maximum", &SliceLayout::firstMaximum, py::arg("rank"))
      .def_property_readonly("slices", &SliceLayout::slices)
      .def_property_readonly("buffer_bytes", &SliceLayout::bufferBytes)
      .def_property_readonly("largest_slice_bytes", &SliceLayout::largestSliceBytes)
      .def("tensor_offset", &SliceLayout::tensorOffset, py::arg("tensor"))
      .def("slice_name", &SliceLayout::sliceName, py::arg("slice"))
      .def(
          "slices_of",
          [](const SliceLayout& layout, TensorId tensor) {
            const auto slices = layout.slicesOf(tensor);
            return std::vector<SliceIndex>(slices.begin(), slices.end());
          },
          py::arg("tensor"))
      .def(
          "tensors_of",
          [](const SliceLayout& layout, SliceIndex slice) {
            const auto tensors = layout.tensorsOf(slice);
            return std::vector<TensorId>(tensors.begin(), tensors.end());
          },
          py::arg("slice"));
}

void bindPolicies(py::module_& m) {
  py::enum_<Policy>(m, "Policy", py::module_local())
      .value("ARRIVAL", Policy::kArrival)
      .value("PRIORITY", Policy::kPriority)
      .value("PLANNED", Policy::kPlanned);
  py::enum_<AgreementKind>(m, "AgreementKind", py::module_local())
      .value("LEADER", AgreementKind::kLeader)
      .value("NEGOTIATED", AgreementKind::kNegotiated)
      .value("PLANNED", AgreementKind::kPlanned);
}

void bindSchedulerClass(py::module_& m) {
  py::class_<Scheduler>(m, "Scheduler", py::module_local(), "Decides which slices travel next.")
      .def(py::init<Policy, ByteCount>(), py::arg("policy"), py::arg("credit_bytes"))
      .def(
          "add_model",
          [](Scheduler& s, ModelId model, std::shared_ptr<SliceLayout> layout,
             std::vector<SliceIndex> plan) {
            s.addModel(model, std::move(layout), std::move(plan));
          },
          py::arg("model"), py::arg("layout"), py::arg("plan") = std::vector<SliceIndex>())
      .def("remove_model", &Scheduler::removeModel, py::arg("model"))
      .def("retune", &Scheduler::retune, py::arg("policy"), py::arg("credit_bytes"))
      .def("reserve", &Scheduler::reserve, py::arg("largest_bytes"))
      .def("idle", &Scheduler::idle, py::arg("model"))
      .def(
          "tensor_ready",
          [](Scheduler& s, ModelId model, TensorId tensor) {
            return toPython(s.tensorReady({model, tensor}));
          },
          py::arg("model"), py::arg("tensor"))
      .def(
          "offer", [](Scheduler& s, ModelId model, SliceIndex slice) { s.offer({model, slice}); },
          py::arg("model"), py::arg("slice"))
      .def(
          "next",
          [](Scheduler& s) -> std::optional<PySlice> {
            const auto slice = s.next();
            return slice ? std::optional(toPython(*slice)) : std::nullopt;
          })
      .def(
          "slice_done",
          [](Scheduler& s, ModelId model, SliceIndex slice) {
            return tensorsToPython(s.sliceDone({model, slice}));
          },
          py::arg("model"), py::arg("slice"))
      .def("became_ready", [](const Scheduler& s) { return toPython(s.becameReady()); })
      .def_property_readonly("in_flight_bytes", &Scheduler::inFlightBytes)
      .def_property_readonly("credit_bytes", &Scheduler::creditBytes);
}

void bindAgreement(py::module_& m) {
  py::class_<Agreement>(
      m, "Agreement", py::module_local(), "One rank's half of the order agreement.")
      .def(
          py::init([](AgreementKind kind, Rank rank, int size, Policy policy, ByteCount credit,
                      int fanOut) {
            return Agreement::create(kind, rank, size, policy, credit, fanOut);
          }),
          py::arg("kind"), py::arg("rank"), py::arg("size"), py::arg("policy"),
          py::arg("credit_bytes"), py::arg("fan_out") = kFanOut)
      .def(
          "add_model",
          [](Agreement& a, ModelId model, std::shared_ptr<SliceLayout> layout,
             std::vector<SliceIndex> plan) {
            a.addModel(model, std::move(layout), std::move(plan));
          },
          py::arg("model"), py::arg("layout"), py::arg("plan") = std::vector<SliceIndex>())
      .def("remove_model", &Agreement::removeModel, py::arg("model"))
      .def(
          "tensor_ready",
          [](Agreement& a, ModelId model, TensorId tensor) {
            return toPython(a.tensorReady({model, tensor}));
          },
          py::arg("model"), py::arg("tensor"))
      .def(
          "received",
          [](Agreement& a, Rank from, const std::vector<PySlice>& slices) {
            std::vector<SliceKey> keys;
            for (const auto& [model, index] : slices) {
              keys.push_back({model, index});
            }
            a.received(from, keys);
          },
          py::arg("sender"), py::arg("slices"))
      .def(
          "slice_done",
          [](Agreement& a, ModelId model, SliceIndex slice) {
            return tensorsToPython(a.sliceDone({model, slice}));
          },
          py::arg("model"), py::arg("slice"))
      .def(
          "decide",
          [](Agreement& a) {
            Decisions decisions;
            a.decide(decisions);
            std::vector<std::pair<Rank, std::vector<PySlice>>> messages;
            for (const SliceMessage& message : decisions.messages) {
              messages.emplace_back(message.to, toPython(message.slices));
            }
            return std::pair(toPython(decisions.issue), messages);
          })
      .def_property_readonly(
          "in_flight_bytes", [](const Agreement& a) { return a.scheduler().inFlightBytes(); });
}

} // namespace

void bindScheduler(py::module_& m) {
  bindPolicies(m);
  bindLayout(m);
  bindSchedulerClass(m);
  bindAgreement(m);
}

} // namespace hvd_order
