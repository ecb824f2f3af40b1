#include <pybind11/stl.h>

#include <algorithm>

#include "base/error.h"
#include "bindings/bindings.h"
#include "engine/activity.h"
#include "engine/engine.h"
#include "transport/control_channel.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

// Time between two checks for Ctrl-C while a Python thread waits.
constexpr std::chrono::milliseconds kSignalCheck{100};

void waitInterruptibly(Engine& engine, ModelId model, TensorId tensor, Stage stage) {
  const py::gil_scoped_release release;
  while (!engine.wait({model, tensor}, Completion::Clock::now() + kSignalCheck, stage)) {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

// Time limit for transfers under way whose gradients no update needs any more: those of a backward
// pass that no step() followed, which the other ranks may never produce.
constexpr std::chrono::seconds kUnwantedTime{2};
// Time for rank 0 to answer which ranks are late.
constexpr std::chrono::seconds kAnswerTime{1};

// Calls `wait` with a deadline until it returns true, and checks for Ctrl-C in between.
template <typename Wait>
bool waitInParts(Completion::Clock::time_point end, const Wait& wait) {
  while (true) {
    const auto now = Completion::Clock::now();
    if (wait(std::min(end, now + kSignalCheck))) {
      return true;
    }
    if (now >= end) {
      return false;
    }
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

std::vector<Rank> shutdownBarrier(Engine& engine, double timeout) {
  const py::gil_scoped_release release;
  const auto now = Completion::Clock::now();
  const auto patience = nanoseconds(timeout);
  waitInParts(now + std::min<std::chrono::nanoseconds>(patience, kUnwantedTime), [&](auto until) {
    return engine.drain(until);
  });
  engine.enterShutdownBarrier();
  if (waitInParts(now + patience, [&](auto until) { return engine.mayLeave(until); })) {
    return {};
  }
  return engine.awaited(Completion::Clock::now() + kAnswerTime);
}

std::shared_ptr<Engine> startEngine(
    Rank rank,
    int size,
    AgreementKind agreement,
    Policy policy,
    ByteCount creditBytes,
    double timeout,
    double stallWarning,
    std::shared_ptr<Transport> transport,
    std::shared_ptr<ControlChannel> control) {
  EngineOptions options;
  options.rank = rank;
  options.size = size;
  options.agreement = agreement;
  options.policy = policy;
  options.creditBytes = creditBytes;
  options.timeout = nanoseconds(timeout);
  options.stallWarning = nanoseconds(stallWarning);
  auto engine =
      std::make_shared<Engine>(std::move(options), std::move(transport), std::move(control));
  engine->start();
  return engine;
}

void bindAdapters(py::module_& m) {
  py::class_<Transport, std::shared_ptr<Transport>>(
      m, "Transport", py::module_local(), "Adapter to an engine that moves bytes.");
  py::class_<ControlChannel, std::shared_ptr<ControlChannel>>(
      m, "ControlChannel", py::module_local(), "Carries messages beside the data.");
}

void bindSliceEvent(py::module_& m) {
  py::class_<SliceEvent>(m, "SliceEvent", py::module_local(), "One journey of one slice.")
      .def_property_readonly("model", [](const SliceEvent& e) { return e.slice.model; })
      .def_property_readonly("slice", [](const SliceEvent& e) { return e.slice.index; })
      .def_readonly("ready_ns", &SliceEvent::readyNs)
      .def_readonly("issued_ns", &SliceEvent::issuedNs)
      .def_readonly("done_ns", &SliceEvent::doneNs);
}

} // namespace

void bindEngine(py::module_& m) {
  bindAdapters(m);
  bindSliceEvent(m);
  m.def(
      "set_activity", &setActivity, py::arg("text"),
      "What this process waits in, for other ranks that wait for it; empty: nothing.");
  py::enum_<Stage>(m, "Stage", py::module_local(), "How far the exchange of a tensor has come.")
      .value("ENDED", Stage::kEnded, "Its sum has arrived.")
      .value("UNDER_WAY", Stage::kUnderWay, "It has begun.")
      .value("ENQUEUED", Stage::kEnqueued, "A stream of its device can wait for the sum.");
  py::class_<Engine, std::shared_ptr<Engine>>(
      m, "Engine", py::module_local(), "Moves ready slices in the agreed order.")
      .def(
          py::init(&startEngine), py::kw_only(), py::arg("rank"), py::arg("size"),
          py::arg("agreement"), py::arg("policy"), py::arg("credit_bytes"), py::arg("timeout_s"),
          py::arg("stall_warning_s"), py::arg("transport"), py::arg("control"))
      .def(
          "add_model",
          [](Engine& engine, ModelId model, std::shared_ptr<SliceLayout> layout,
             std::vector<SliceIndex> plan) {
            engine.addModel(model, std::move(layout), std::move(plan));
          },
          py::arg("model"), py::arg("layout"), py::arg("plan") = std::vector<SliceIndex>(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "remove_model", &Engine::removeModel, py::arg("model"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "retune",
          [](Engine& engine, AgreementKind agreement, Policy policy, ByteCount creditBytes,
             double lead) { engine.retune(agreement, policy, creditBytes, nanoseconds(lead)); },
          py::arg("agreement"), py::arg("policy"), py::arg("credit_bytes"), py::arg("lead_s"),
          py::call_guard<py::gil_scoped_release>())
      .def("hold_plan", &Engine::holdPlan, py::call_guard<py::gil_scoped_release>())
      .def(
          "end_plan", &Engine::endPlan, py::arg("issued"), py::arg("agreement"), py::arg("policy"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "take_counts",
          [](Engine& engine) {
            const Engine::AgreementCounts counts = engine.takeCounts();
            return py::make_tuple(counts.messages, counts.holdUps);
          })
      .def(
          "tensor_ready",
          [](Engine& engine, ModelId model, TensorId tensor) {
            engine.tensorReady({model, tensor});
          },
          py::arg("model"), py::arg("tensor"), py::call_guard<py::gil_scoped_release>())
      .def(
          "wait", &waitInterruptibly, py::arg("model"), py::arg("tensor"),
          py::arg("stage") = Stage::kEnded)
      .def(
          "stages",
          [](const Engine& engine, ModelId model) {
            const std::vector<std::uint8_t> stages = engine.stages(model);
            return py::bytes(reinterpret_cast<const char*>(stages.data()), stages.size());
          },
          py::arg("model"))
      .def(
          "ready_times",
          [](const Engine& engine, ModelId model) {
            std::vector<double> seconds;
            for (const auto at : engine.readyTimes(model)) {
              seconds.push_back(std::chrono::duration<double>(at.time_since_epoch()).count());
            }
            return seconds;
          },
          py::arg("model"))
      .def("check", &Engine::check)
      .def("check_stalled", &Engine::checkStalled, py::call_guard<py::gil_scoped_release>())
      .def(
          "fail",
          [](Engine& engine, const std::string& reason, bool lost) {
            engine.fail(
                lost ? std::make_exception_ptr(PeerLost(reason))
                     : std::make_exception_ptr(CollectiveError(reason)));
          },
          py::arg("reason"), py::arg("lost") = false, py::call_guard<py::gil_scoped_release>())
      .def("shutdown_barrier", &shutdownBarrier, py::arg("timeout_s"))
      .def("shutdown", &Engine::shutdown, py::call_guard<py::gil_scoped_release>())
      .def(
          "slice_times",
          [](Engine& engine, ModelId model) {
            const std::vector<SliceEvent> events = engine.timeline().last(model);
            std::vector<TimeNs> times;
            times.reserve(3 * events.size());
            for (const SliceEvent& event : events) {
              times.insert(times.end(), {event.readyNs, event.issuedNs, event.doneNs});
            }
            return py::bytes(
                reinterpret_cast<const char*>(times.data()), times.size() * sizeof(TimeNs));
          },
          py::arg("model"))
      .def("start_recording", [](Engine& engine) { engine.timeline().start(); })
      .def("stop_recording", [](Engine& engine) { engine.timeline().stop(); })
      .def("take_events", [](Engine& engine) { return engine.timeline().take(); });
}

} // namespace hvd_order
