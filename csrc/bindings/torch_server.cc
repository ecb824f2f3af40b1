#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/callback.h"
#include "servers/c10d/pair_connection.h"
#include "servers/server_core.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

Peer peer(const std::string& kind, int number) {
  static const std::map<std::string, PeerKind> kinds{
      {"worker", PeerKind::kWorker},
      {"server", PeerKind::kServer},
      {"observer", PeerKind::kObserver}};
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

// A callback about a peer, which Python sees as a tuple of kind and number.
std::function<void(Peer, const std::string&)> aboutPeer(py::function function) {
  return [callback = fromAnyThread<py::tuple, const std::string&>(std::move(function))](
             Peer from, const std::string& text) {
    const py::gil_scoped_acquire gil;
    callback(tupleOf(from), text);
  };
}

// A question to Python; an exception there is printed, and counts as no.
std::function<bool()> question(py::function function) {
  return [shared = shareable(std::move(function))] {
    const py::gil_scoped_acquire gil;
    try {
      return (*shared)().cast<bool>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("hvd_order: callback of a server");
      return false;
    }
  };
}

std::shared_ptr<ServerCore> makeServer(
    int server,
    int workers,
    bool synchronous,
    std::optional<Round> staleness,
    std::optional<Round> delayBound,
    bool aggregates,
    bool ordered,
    double divergenceBound,
    py::function log,
    py::function onControl,
    py::function onGone,
    py::function wasAway) {
  ServerOptions options;
  options.server = static_cast<ServerId>(server);
  options.workers = workers;
  options.consistency = synchronous ? Consistency::kSynchronous : Consistency::kAsynchronous;
  options.staleness = staleness.value_or(options.staleness);
  options.delayBound = delayBound;
  options.aggregates = aggregates;
  options.ordered = ordered;
  options.divergenceBound = divergenceBound;
  options.log = fromAnyThread<const std::string&>(std::move(log));
  options.onControl = aboutPeer(std::move(onControl));
  options.onGone = aboutPeer(std::move(onGone));
  options.wasAway = question(std::move(wasAway));
  return std::make_shared<ServerCore>(std::move(options));
}

} // namespace

void bindConnections(py::module_& m) {
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
          py::arg("group"), py::arg("sends"), py::arg("receives"), py::arg("largest_payload"))
      .def(
          "record", [](PairConnection& connection, bool on) { connection.received.turn(on); },
          py::arg("on"))
      .def("take_received", [](PairConnection& connection) {
        py::list received;
        for (const ReceivedTimes& times : connection.received.take()) {
          received.append(
              py::make_tuple(
                  times.sizeBytes, times.beforeNs, times.freeNs, times.beganNs, times.cameNs,
                  times.handledNs, times.thread));
        }
        return received;
      });
}

void bindServer(py::module_& m) {
  py::class_<ServerCore, std::shared_ptr<ServerCore>>(
      m, "ServerCore", py::module_local(), "A parameter server.")
      .def(
          py::init(&makeServer), py::kw_only(), py::arg("server"), py::arg("workers"),
          py::arg("synchronous"), py::arg("staleness"), py::arg("delay_bound"),
          py::arg("aggregates"), py::arg("ordered"), py::arg("divergence_bound"), py::arg("log"),
          py::arg("on_control"), py::arg("on_gone"), py::arg("was_away"))
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
      .def(
          "record_updates", [](ServerCore& core, bool on) { core.updates().turn(on); },
          py::arg("on"))
      .def(
          "take_updates",
          [](ServerCore& core) {
            py::list updates;
            for (const UpdateTimes& times : core.updates().take()) {
              updates.append(
                  py::make_tuple(times.sizeBytes, times.beginNs, times.endNs, times.thread));
            }
            return updates;
          })
      .def("has_failed", &ServerCore::hasFailed)
      .def("stop", &ServerCore::stop, py::call_guard<py::gil_scoped_release>());
}

} // namespace hvd_order
