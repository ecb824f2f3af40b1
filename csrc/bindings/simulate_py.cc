#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "planning/simulator.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using simulate::AgreementTraffic;
using simulate::AllReduceCost;
using simulate::ComputeOrder;
using simulate::DeviceResult;
using simulate::Interval;
using simulate::Op;
using simulate::OpIndex;
using simulate::OpRecord;
using simulate::Parameter;
using simulate::Result;
using simulate::Scenario;
using simulate::SliceRecord;
using simulate::UpdateRecord;
using simulate::Workload;

using PyOp = std::tuple<
    std::string,
    double,
    std::vector<OpIndex>,
    std::vector<TensorId>,
    std::vector<TensorId>,
    std::vector<TensorId>,
    std::uint32_t>;
using PyParameter = std::tuple<std::string, ByteCount, double, BufferId>;

std::shared_ptr<Workload> makeWorkload(
    const std::vector<PyOp>& pyOps,
    const std::vector<PyParameter>& pyParameters) {
  std::vector<Op> ops;
  for (const auto& [name, seconds, inputs, reads, produces, awaits, stream] : pyOps) {
    ops.push_back({name, seconds, inputs, reads, produces, awaits, stream});
  }
  std::vector<Parameter> parameters;
  for (const auto& [name, sizeBytes, updateSeconds, buffer] : pyParameters) {
    parameters.push_back({name, sizeBytes, updateSeconds, buffer});
  }
  return std::make_shared<Workload>(std::move(ops), std::move(parameters));
}

void bindWorkload(py::module_& m) {
  py::class_<Workload, std::shared_ptr<Workload>>(
      m, "SimulatedWorkload", py::module_local(), "What one rank computes in a step.")
      .def(py::init(&makeWorkload), py::arg("ops"), py::arg("parameters"))
      .def("merged", &Workload::merged, py::arg("groups"))
      .def("buckets", &Workload::buckets, py::arg("first_bytes"), py::arg("bucket_bytes"))
      .def(
          "layout",
          [](const Workload& workload, ByteCount sliceBytes, bool split) {
            return std::const_pointer_cast<SliceLayout>(
                simulate::layoutOf(workload, sliceBytes, split));
          },
          py::arg("slice_bytes"), py::arg("split") = false)
      .def_property_readonly(
          "op_names",
          [](const Workload& workload) {
            std::vector<std::string> names;
            for (const Op& op : workload.ops()) {
              names.push_back(op.name);
            }
            return names;
          })
      .def_property_readonly("parameter_bytes", [](const Workload& workload) {
        std::vector<ByteCount> sizes;
        for (const Parameter& parameter : workload.parameters()) {
          sizes.push_back(parameter.sizeBytes);
        }
        return sizes;
      });
}

void bindNetworks(py::module_& m) {
  py::class_<AllReduceCost>(m, "AllReduceCost", py::module_local(), "What one slice costs.")
      .def(
          py::init([](double latencyS, double sliceCostS, double secondsPerByte, double sentPerByte,
                      std::uint32_t lanes) {
            return AllReduceCost{latencyS, sliceCostS, secondsPerByte, sentPerByte, lanes};
          }),
          py::kw_only(), py::arg("latency_s"), py::arg("slice_cost_s"), py::arg("seconds_per_byte"),
          py::arg("sent_per_byte"), py::arg("lanes"))
      .def_readonly("latency_s", &AllReduceCost::latencyS)
      .def_readonly("slice_cost_s", &AllReduceCost::sliceCostS)
      .def_readonly("seconds_per_byte", &AllReduceCost::secondsPerByte)
      .def_readonly("sent_per_byte", &AllReduceCost::sentPerByte)
      .def_readonly("lanes", &AllReduceCost::lanes);
  m.def(
      "ring_all_reduce", &simulate::ringAllReduce, py::arg("ranks"), py::arg("latency_s"),
      py::arg("bytes_per_s"));
  m.def(
      "tree_all_reduce", &simulate::treeAllReduce, py::arg("ranks"), py::arg("latency_s"),
      py::arg("bytes_per_s"));
}

// Records become tuples: there are thousands of them, and Python has its own record classes.
void bindResult(py::module_& m) {
  py::class_<DeviceResult>(m, "SimulatedDevice", py::module_local(), "Ranks of one speed.")
      .def_readonly("slowness", &DeviceResult::slowness)
      .def_readonly("ranks", &DeviceResult::ranks)
      .def_readonly("step_starts_s", &DeviceResult::stepStartsS)
      .def_readonly("busy_s", &DeviceResult::busyS)
      .def_property_readonly(
          "ops",
          [](const DeviceResult& device) {
            std::vector<std::tuple<double, double, double>> out;
            for (const OpRecord& op : device.ops) {
              out.emplace_back(op.couldStartS, op.startS, op.endS);
            }
            return out;
          })
      .def_property_readonly("updates", [](const DeviceResult& device) {
        std::vector<std::tuple<std::uint32_t, std::optional<TensorId>, double, double>> out;
        for (const UpdateRecord& update : device.updates) {
          const bool all = update.tensor == simulate::kAllTensors;
          out.emplace_back(
              update.stream, all ? std::nullopt : std::optional(update.tensor), update.startS,
              update.endS);
        }
        return out;
      });
  py::class_<Result>(m, "SimulationResult", py::module_local(), "What happened.")
      .def_readonly("step_s", &Result::stepS)
      .def_readonly("end_s", &Result::endS)
      .def_readonly("sent_bytes", &Result::sentBytes)
      .def_readonly("devices", &Result::devices)
      .def_readonly("link_busy_s", &Result::linkBusyS)
      .def_property_readonly(
          "link_busy",
          [](const Result& result) {
            std::vector<std::pair<double, double>> out;
            for (const Interval& interval : result.linkBusy) {
              out.emplace_back(interval.beginS, interval.endS);
            }
            return out;
          })
      .def_property_readonly(
          "agreement",
          [](const Result& result) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> out;
            for (const AgreementTraffic& half : result.agreement) {
              out.emplace_back(
                  half.sentMessages, half.sentSlices, half.receivedMessages, half.receivedSlices);
            }
            return out;
          })
      .def_property_readonly("slices", [](const Result& result) {
        std::vector<std::tuple<double, double, double, double>> out;
        for (const SliceRecord& s : result.slices) {
          out.emplace_back(s.readyS, s.issuedS, s.startedS, s.finishedS);
        }
        return out;
      });
}

} // namespace

void bindSimulate(py::module_& m) {
  bindWorkload(m);
  bindNetworks(m);
  bindResult(m);
  m.def(
      "simulate",
      [](const Workload& workload, const AllReduceCost& network, std::vector<double> slowness,
         ByteCount sliceBytes, ByteCount creditBytes, bool split, Policy policy,
         AgreementKind agreement, std::vector<SliceIndex> plan, double controlLatencyS,
         double controlSendS, int fanOut, double reservationLeadS, bool programOrder,
         bool crossIteration, bool clipped, bool everyRank, bool everyAgreement,
         std::uint32_t steps, std::uint32_t recorded) {
        const Scenario scenario{
            .slowness = std::move(slowness),
            .network = network,
            .sliceBytes = sliceBytes,
            .creditBytes = creditBytes,
            .split = split,
            .policy = policy,
            .agreement = agreement,
            .plan = std::move(plan),
            .controlLatencyS = controlLatencyS,
            .controlSendS = controlSendS,
            .fanOut = fanOut,
            .reservationLeadS = reservationLeadS,
            .order = programOrder ? ComputeOrder::kProgram : ComputeOrder::kReady,
            .crossIteration = crossIteration,
            .clipped = clipped,
            .everyRank = everyRank,
            .everyAgreement = everyAgreement,
            .steps = steps,
            .recorded = recorded};
        const py::gil_scoped_release release;
        return simulate::simulate(workload, scenario);
      },
      py::arg("workload"), py::arg("network"), py::kw_only(), py::arg("slowness"),
      py::arg("slice_bytes"), py::arg("credit_bytes"), py::arg("split"), py::arg("policy"),
      py::arg("agreement"), py::arg("plan"), py::arg("control_latency_s"),
      py::arg("control_send_s"), py::arg("fan_out"), py::arg("reservation_lead_s"),
      py::arg("program_order"), py::arg("cross_iteration"), py::arg("clipped"),
      py::arg("every_rank"), py::arg("every_agreement"), py::arg("steps"), py::arg("recorded"));
}

} // namespace hvd_order
