#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "c10d/server/pair_connection.h"
#include "c10d/server/server_transport.h"
#include "server/server_core.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

// Makes a function that any thread may release.
std::shared_ptr<py::function> shareable(py::function function) {
  return {new py::function(std::move(function)), [](py::function* dropped) {
            const py::gil_scoped_acquire gil;
            delete dropped;
          }};
}

// Callbacks run on threads of connections: they take the GIL, and print an exception, because no
// caller could catch it.
template <typename... Args>
std::function<void(Args...)> fromAnyThread(py::function function) {
  return [shared = shareable(std::move(function))](Args... args) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(std::forward<Args>(args)...);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("hvd_order: callback of a connection");
    }
  };
}

Peer peer(const std::string& kind, int number) {
  static const std::map<std::string, Peer::Kind> kinds{
      {"worker", Peer::Kind::kWorker},
      {"server", Peer::Kind::kServer},
      {"observer", Peer::Kind::kObserver}};
  const auto found = kinds.find(kind);
  if (found == kinds.end()) {
    throw InvalidUsage("a peer is a worker, a server or an observer, not a " + kind);
  }
  return {found->second, number};
}

py::tuple tupleOf(Peer peer) {
  const std::string name = nameOf(peer);
  return py::make_tuple(name.substr(0, name.find(' ')), peer.number);
}

std::vector<Placement> placements(const std::vector<std::pair<int, int>>& places) {
  std::vector<Placement> out;
  out.reserve(places.size());
  for (const auto& [owner, replica] : places) {
    out.push_back(
        {static_cast<ServerId>(owner), replica < 0 ? kNoServer : static_cast<ServerId>(replica)});
  }
  return out;
}

std::vector<std::pair<int, int>> pairs(const std::vector<Placement>& places) {
  std::vector<std::pair<int, int>> out;
  out.reserve(places.size());
  for (const Placement& place : places) {
    out.emplace_back(place.owner, place.replica == kNoServer ? -1 : int{place.replica});
  }
  return out;
}

} // namespace

void bindServer(py::module_& m) {
  py::class_<Connection, std::shared_ptr<Connection>>(
      m, "Connection", py::module_local(),
      "Carries frames between a parameter server and another.");
  py::class_<PairConnection, Connection, std::shared_ptr<PairConnection>>(
      m, "PairConnection", py::module_local(), "A connection over a Gloo group of two members.")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Backend>& group, std::uint64_t sends,
                      std::uint64_t receives, std::size_t largestPayload) {
            return std::make_shared<PairConnection>(group, sends, receives, largestPayload);
          }),
          py::arg("group"), py::arg("sends"), py::arg("receives"), py::arg("largest_payload"));

  py::class_<ServerCore, std::shared_ptr<ServerCore>>(
      m, "ServerCore", py::module_local(), "A parameter server.")
      .def(
          py::init([](int server, int workers, bool synchronous, std::optional<Round> staleness,
                      std::optional<Round> delayBound, bool aggregates, bool ordered,
                      double divergenceBound, py::function log, py::function onControl,
                      py::function onGone, py::function wasAway) {
            ServerOptions options;
            options.server = static_cast<ServerId>(server);
            options.workers = workers;
            options.consistency =
                synchronous ? Consistency::kSynchronous : Consistency::kAsynchronous;
            options.staleness = staleness.value_or(options.staleness);
            options.delayBound = delayBound;
            options.aggregates = aggregates;
            options.ordered = ordered;
            options.divergenceBound = divergenceBound;
            options.log = fromAnyThread<const std::string&>(std::move(log));
            const auto control = fromAnyThread<py::tuple, const std::string&>(std::move(onControl));
            options.onControl = [control](Peer from, const std::string& text) {
              const py::gil_scoped_acquire gil;
              control(tupleOf(from), text);
            };
            const auto gone = fromAnyThread<py::tuple, const std::string&>(std::move(onGone));
            options.onGone = [gone](Peer from, const std::string& why) {
              const py::gil_scoped_acquire gil;
              gone(tupleOf(from), why);
            };
            options.wasAway = [away = shareable(std::move(wasAway))] {
              const py::gil_scoped_acquire gil;
              try {
                return (*away)().cast<bool>();
              } catch (py::error_already_set& error) {
                error.discard_as_unraisable("hvd_order: callback of a server");
                return false;
              }
            };
            return std::make_shared<ServerCore>(std::move(options));
          }),
          py::kw_only(), py::arg("server"), py::arg("workers"), py::arg("synchronous"),
          py::arg("staleness"), py::arg("delay_bound"), py::arg("aggregates"), py::arg("ordered"),
          py::arg("divergence_bound"), py::arg("log"), py::arg("on_control"), py::arg("on_gone"),
          py::arg("was_away"))
      .def(
          "connect",
          [](ServerCore& core, const std::string& kind, int number,
             std::shared_ptr<Connection> connection) {
            core.connect(peer(kind, number), std::move(connection));
          },
          py::arg("kind"), py::arg("number"), py::arg("connection"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "send_control",
          [](ServerCore& core, const std::string& kind, int number, const std::string& text) {
            core.sendControl(peer(kind, number), text);
          },
          py::arg("kind"), py::arg("number"), py::arg("text"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "peers",
          [](const ServerCore& core) {
            py::list peers;
            for (const Peer peer : core.peers()) {
              peers.append(tupleOf(peer));
            }
            return peers;
          })
      .def(
          "audit",
          [](const ServerCore& core) {
            py::list held;
            for (const auto& slice : core.audit()) {
              held.append(
                  py::make_tuple(
                      slice.model, slice.layout, slice.slice, slice.owned, slice.version,
                      slice.checksum));
            }
            return held;
          })
      .def("late_workers", &ServerCore::lateWorkers)
      .def("has_failed", &ServerCore::hasFailed)
      .def("stop", &ServerCore::stop, py::call_guard<py::gil_scoped_release>());

  py::class_<ServerTransport, TorchTransport, std::shared_ptr<ServerTransport>>(
      m, "ServerTransport", py::module_local(), "Carries slices to parameter servers and back.")
      .def(
          py::init([](Rank rank, int workers, bool ordered, bool asksFirst, py::function onLost,
                      py::function onControl) {
            return std::make_shared<ServerTransport>(
                rank, workers, ordered, asksFirst,
                fromAnyThread<ServerId, const std::string&>(std::move(onLost)),
                fromAnyThread<ServerId, const std::string&>(std::move(onControl)));
          }),
          py::kw_only(), py::arg("rank"), py::arg("workers"), py::arg("ordered"),
          py::arg("asks_first"), py::arg("on_lost"), py::arg("on_control"))
      .def(
          "connect", &ServerTransport::connect, py::arg("server"), py::arg("connection"),
          py::call_guard<py::gil_scoped_release>())
      .def("servers", &ServerTransport::servers)
      .def(
          "give_up", &ServerTransport::giveUp, py::arg("servers"), py::arg("why"),
          py::call_guard<py::gil_scoped_release>())
      .def("frames_from", &ServerTransport::framesFrom)
      .def("waits", &ServerTransport::waits)
      .def(
          "send_control", &ServerTransport::sendControl, py::arg("server"), py::arg("text"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare",
          [](ServerTransport& transport, ModelId model,
             const std::vector<std::pair<int, int>>& places,
             const std::vector<std::pair<std::uint32_t, std::uint32_t>>& parameters) {
            std::vector<ServerTransport::Parameter> elements;
            elements.reserve(parameters.size());
            for (const auto& [count, group] : parameters) {
              elements.push_back({count, group});
            }
            transport.prepare(model, placements(places), std::move(elements));
          },
          py::arg("model"), py::arg("places"), py::arg("parameters"))
      .def(
          "begin_with_buffers", &ServerTransport::beginWithBuffers, py::arg("model"),
          py::arg("part"), py::arg("parts"), py::arg("steps_before"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "set_rules",
          [](ServerTransport& transport, ModelId model, const std::vector<UpdateRule>& rules) {
            transport.setRules(model, rules);
          },
          py::arg("model"), py::arg("rules"))
      .def(
          "set_map",
          [](ServerTransport& transport, ModelId model,
             const std::vector<std::pair<int, int>>& places) {
            const auto map = placements(places);
            const py::gil_scoped_release noGil;
            transport.setMap(model, map);
          },
          py::arg("model"), py::arg("places"))
      .def(
          "places",
          [](const ServerTransport& transport, ModelId model) {
            return pairs(transport.places(model));
          },
          py::arg("model"))
      .def(
          "pull",
          [](ServerTransport& transport, ModelId model, std::uint32_t part, double timeout) {
            const std::chrono::duration<double> seconds(timeout);
            return transport.pull(
                model, part, std::chrono::duration_cast<std::chrono::nanoseconds>(seconds));
          },
          py::arg("model"), py::arg("part"), py::arg("timeout_s"),
          py::call_guard<py::gil_scoped_release>())
      .def("steps", &ServerTransport::steps, py::arg("model"))
      .def(
          "take_figures",
          [](ServerTransport& transport) {
            py::list figures;
            for (const auto& figure : transport.takeFigures()) {
              figures.append(py::make_tuple(figure.server, figure.bytes, figure.busySeconds));
            }
            return figures;
          })
      .def(
          "dropped",
          [](const ServerTransport& transport) {
            const auto dropped = transport.dropped();
            return py::make_tuple(dropped.slices, dropped.bytes);
          })
      .def(
          "aggregated",
          [](const ServerTransport& transport) {
            const auto aggregated = transport.aggregated();
            return py::make_tuple(aggregated.slices, aggregated.bytes);
          })
      .def("close", &ServerTransport::close, py::call_guard<py::gil_scoped_release>());
}

} // namespace hvd_order
