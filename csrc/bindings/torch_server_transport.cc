#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/callback.h"
#include "servers/c10d/server_transport.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using BoundTransport =
    py::class_<ServerTransport, TorchTransport, std::shared_ptr<ServerTransport>>;

std::vector<SliceOwners> ownersOf(const std::vector<std::pair<int, int>>& places) {
  std::vector<SliceOwners> out;
  out.reserve(places.size());
  for (const auto& [owner, replica] : places) {
    out.push_back(
        {static_cast<ServerId>(owner), replica < 0 ? kNoServer : static_cast<ServerId>(replica)});
  }
  return out;
}

std::vector<std::pair<int, int>> pairs(const std::vector<SliceOwners>& places) {
  std::vector<std::pair<int, int>> out;
  out.reserve(places.size());
  for (const SliceOwners& place : places) {
    out.emplace_back(place.owner, place.replica == kNoServer ? -1 : int{place.replica});
  }
  return out;
}

void bindServers(BoundTransport& bound) {
  bound
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
      .def("close", &ServerTransport::close, py::call_guard<py::gil_scoped_release>());
}

void bindModels(BoundTransport& bound) {
  bound
      .def(
          "prepare",
          [](ServerTransport& transport, ModelId model,
             const std::vector<std::pair<int, int>>& places,
             const std::vector<std::pair<std::uint32_t, std::uint32_t>>& parameters) {
            std::vector<ServerTransport::ServedParameter> elements;
            elements.reserve(parameters.size());
            for (const auto& [count, group] : parameters) {
              elements.push_back({count, group});
            }
            transport.prepare(model, ownersOf(places), std::move(elements));
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
            const auto map = ownersOf(places);
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
      .def("steps", &ServerTransport::steps, py::arg("model"));
}

void bindFigures(BoundTransport& bound) {
  bound
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
      .def("aggregated", [](const ServerTransport& transport) {
        const auto aggregated = transport.aggregated();
        return py::make_tuple(aggregated.slices, aggregated.bytes);
      });
}

} // namespace

void bindServerTransport(py::module_& m) {
  BoundTransport bound(
      m, "ServerTransport", py::module_local(), "Carries slices to parameter servers and back.");
  bound.def(
      py::init([](Rank rank, int workers, bool ordered, bool asksFirst, py::function onLost,
                  py::function onControl) {
        const PushSettings settings{
            .rank = rank, .workers = workers, .ordered = ordered, .asksFirst = asksFirst};
        return std::make_shared<ServerTransport>(
            settings, fromAnyThread<ServerId, const std::string&>(std::move(onLost)),
            fromAnyThread<ServerId, const std::string&>(std::move(onControl)));
      }),
      py::kw_only(), py::arg("rank"), py::arg("workers"), py::arg("ordered"), py::arg("asks_first"),
      py::arg("on_lost"), py::arg("on_control"));
  bindServers(bound);
  bindModels(bound);
  bindFigures(bound);
}

} // namespace hvd_order
