#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "planning/sampled/sampled_training.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using simulate::ComputeOrder;
using simulate::OpIndex;
using simulate::PullStart;
using simulate::SampledKind;
using simulate::SampledOp;
using simulate::SampledResult;
using simulate::SampledStep;
using simulate::SampledStepEnd;
using simulate::SampledTraining;
using simulate::ServerMode;
using simulate::Sharing;
using simulate::TransferRecord;
using simulate::Transmission;
using simulate::Turns;

using PySampledOp = std::
    tuple<std::string, SampledKind, std::vector<OpIndex>, std::uint32_t, TensorId, std::int32_t>;

std::shared_ptr<SampledStep> makeStep(
    const std::vector<PySampledOp>& pyOps,
    std::vector<ByteCount> tensorBytes,
    std::vector<std::vector<double>> seconds,
    const std::vector<std::vector<OpIndex>>& pullOrders) {
  std::vector<SampledOp> ops;
  for (const auto& [name, kind, inputs, stream, tensor, priority] : pyOps) {
    ops.push_back({name, kind, inputs, stream, tensor, priority});
  }
  return std::make_shared<SampledStep>(
      std::move(ops), std::move(tensorBytes), std::move(seconds), pullOrders);
}

void bindEnums(py::module_& m) {
  py::enum_<SampledKind>(m, "SampledKind", py::module_local())
      .value("COMPUTE", SampledKind::kCompute)
      .value("PULL", SampledKind::kPull)
      .value("PUSH", SampledKind::kPush);
  py::enum_<Turns>(m, "Turns", py::module_local())
      .value("WHOLE", Turns::kWhole)
      .value("WINDOW", Turns::kWindow)
      .value("PRIORITY", Turns::kPriority);
  py::enum_<Sharing>(m, "Sharing", py::module_local())
      .value("FAIR", Sharing::kFair)
      .value("FIFO", Sharing::kFifo);
  py::enum_<SampledStepEnd>(m, "SampledStepEnd", py::module_local())
      .value("COMPUTED", SampledStepEnd::kComputed)
      .value("PUSHED", SampledStepEnd::kPushed)
      .value("UPDATED", SampledStepEnd::kUpdated);
}

} // namespace

void bindSampled(py::module_& m) {
  bindEnums(m);
  py::class_<SampledStep, std::shared_ptr<SampledStep>>(
      m, "SampledStep", py::module_local(), "A worker's step, measured several times.")
      .def(
          py::init(&makeStep), py::arg("ops"), py::arg("tensor_bytes"), py::arg("seconds"),
          py::arg("pull_orders") = std::vector<std::vector<OpIndex>>{});
  py::class_<Transmission>(
      m, "Transmission", py::module_local(), "How tensors get from one process to another.")
      .def(
          py::init([](Turns turns, double windowBytes, double coldWindowBytes, double coldS,
                      Sharing sharing, double latencyS, double sendSecondsPerByte,
                      double sendSeconds, double receiveSecondsPerByte, double receiveSeconds) {
            return Transmission{turns,
                                windowBytes,
                                coldWindowBytes,
                                coldS,
                                sharing,
                                latencyS,
                                sendSecondsPerByte,
                                sendSeconds,
                                receiveSecondsPerByte,
                                receiveSeconds};
          }),
          py::kw_only(), py::arg("turns"), py::arg("window_bytes"), py::arg("cold_window_bytes"),
          py::arg("cold_s"), py::arg("sharing"), py::arg("latency_s"),
          py::arg("send_seconds_per_byte"), py::arg("send_seconds"),
          py::arg("receive_seconds_per_byte"), py::arg("receive_seconds"));
  py::class_<SampledResult>(m, "SampledResult", py::module_local(), "What happened.")
      .def_readonly("step_ends_s", &SampledResult::stepEndsS)
      .def_readonly("op_ends_s", &SampledResult::opEndsS)
      .def_property_readonly(
          "transfers",
          [](const SampledResult& result) {
            std::vector<std::tuple<bool, TensorId, std::uint32_t, double, double>> out;
            for (const TransferRecord& t : result.transfers) {
              out.emplace_back(t.isPull, t.tensor, t.step, t.startS, t.endS);
            }
            return out;
          })
      .def_readonly("pull_busy_s", &SampledResult::pullBusyS)
      .def_readonly("push_busy_s", &SampledResult::pushBusyS)
      .def_readonly("update_busy_s", &SampledResult::updateBusyS)
      .def_readonly("late_updates", &SampledResult::lateUpdates)
      .def_readonly("aggregated_updates", &SampledResult::aggregatedUpdates)
      .def_readonly("longest_delay", &SampledResult::longestDelay)
      .def_readonly("end_s", &SampledResult::endS);
  m.def(
      "simulate_sampled",
      [](const SampledStep& step, std::vector<double> slowness, std::uint32_t servers,
         std::vector<std::uint32_t> serverOf, double workerBytesPerS, double serverBytesPerS,
         const Transmission& pull, const Transmission& push, bool sync, bool pullsAreAnswers,
         SampledStepEnd stepEnd, std::optional<std::uint32_t> staleness,
         std::optional<std::uint32_t> delayBound, bool aggregates, double updateSecondsPerByte,
         double updateSeconds, std::uint32_t updateLanes, bool programOrder,
         std::vector<double> startsS, double spreadS, std::uint64_t seed, std::uint32_t steps,
         std::uint32_t recorded) {
        const SampledTraining training{
            .slowness = std::move(slowness),
            .servers = servers,
            .serverOf = std::move(serverOf),
            .workerBytesPerS = workerBytesPerS,
            .serverBytesPerS = serverBytesPerS,
            .pull = pull,
            .push = push,
            .mode = sync ? ServerMode::kSync : ServerMode::kAsync,
            .pullStart = pullsAreAnswers ? PullStart::kAnswer : PullStart::kRequest,
            .stepEnd = stepEnd,
            .staleness = staleness,
            .delayBound = delayBound,
            .aggregates = aggregates,
            .updateSecondsPerByte = updateSecondsPerByte,
            .updateSeconds = updateSeconds,
            .updateLanes = updateLanes,
            .order = programOrder ? ComputeOrder::kProgram : ComputeOrder::kReady,
            .startsS = std::move(startsS),
            .spreadS = spreadS,
            .seed = seed,
            .steps = steps,
            .recorded = recorded};
        const py::gil_scoped_release release;
        return simulate::simulateSampled(step, training);
      },
      py::arg("step"), py::kw_only(), py::arg("slowness"), py::arg("servers"), py::arg("server_of"),
      py::arg("worker_bytes_per_s"), py::arg("server_bytes_per_s"), py::arg("pull"),
      py::arg("push"), py::arg("sync"), py::arg("pulls_are_answers"), py::arg("step_end"),
      py::arg("staleness"), py::arg("delay_bound"), py::arg("aggregates"),
      py::arg("update_seconds_per_byte"), py::arg("update_seconds"), py::arg("update_lanes"),
      py::arg("program_order"), py::arg("starts_s"), py::arg("spread_s"), py::arg("seed"),
      py::arg("steps"), py::arg("recorded"));
}

} // namespace hvd_order
