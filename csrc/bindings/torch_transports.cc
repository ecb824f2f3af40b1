#include <cxxabi.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "torch/c10d/all_reduce/c10d_transport.h"
#include "torch/c10d/all_reduce/horovod_transport.h"
#include "torch/c10d/c10d_control.h"
#include "torch/c10d/text_star.h"

namespace py = pybind11;

namespace hvd_order {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Accessed under the GIL.
std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>>& watchedGroups() {
  static std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups;
  return groups;
}

void watchGroup(const Group& group) {
  std::erase_if(watchedGroups(), [](const auto& watched) { return watched.expired(); });
  watchedGroups().emplace_back(group);
}

// Destroying a group waits for its threads, which a forked child does not have.
void keepWatchedGroups() {
  for (const auto& watched : watchedGroups()) {
    watched.lock().release();
  }
}

bool isPythonEnding() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

[[noreturn]] void stayHere() {
  while (true) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Calls a function without the GIL. A thread that requests the GIL after Python has ended is
// unwound by force, through C++ frames that forbid it, and this ends the process. So the thread
// stays here.
template <typename Function>
auto withoutGil(const Function& function) {
  if (isPythonEnding()) { // this thread ends Python
    return function();
  }
  std::optional<decltype(function())> result;
  std::exception_ptr error;
  PyThreadState* const thread = PyEval_SaveThread();
  try {
    result = function();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    if (!isPythonEnding()) {
      PyEval_RestoreThread(thread);
      if (error) {
        std::rethrow_exception(error);
      }
      return *std::move(result);
    }
  } catch (abi::__forced_unwind&) { // Python has ended meanwhile
    stayHere();
  }
  stayHere();
}

void waitFor(const c10::intrusive_ptr<c10d::Work>& work, double seconds) {
  const std::chrono::milliseconds timeout(static_cast<std::int64_t>(seconds * 1000));
  withoutGil([&] { return work->wait(timeout); });
}

using PyNews = std::tuple<Rank, std::string, py::bytes>;

std::optional<PyNews> nextOf(TextStar& star) {
  const std::optional<TextStar::News> news = withoutGil([&] { return star.next(); });
  if (!news) {
    return std::nullopt;
  }
  const char* const kind = news->kind == NewsKind::kText ? "text"
      : news->kind == NewsKind::kLost                    ? "lost"
                                                         : "malformed";
  return PyNews{news->from, kind, py::bytes(news->text)};
}

} // namespace

void bindTransports(py::module_& m) {
  py::enum_<WireFormat>(m, "WireFormat", py::module_local(), "How elements of a gradient travel.")
      .value("EXACT", WireFormat::kExact)
      .value("BFLOAT16", WireFormat::kBfloat16)
      .value("FLOAT16", WireFormat::kFloat16)
      .value("INT8", WireFormat::kInt8);
  py::class_<TorchTransport, Transport, std::shared_ptr<TorchTransport>>(
      m, "TorchTransport", py::module_local(), "Carries slices of tensors.")
      .def(
          "set_buffers", &TorchTransport::setBuffers, py::arg("model"), py::arg("buffers"),
          py::arg("layout"))
      .def("remove_buffers", &TorchTransport::removeBuffers, py::arg("model"))
      .def(
          "set_formats", &TorchTransport::setFormats, py::arg("model"), py::arg("formats"),
          py::arg("residuals"))
      .def("order_transfers_behind", &TorchTransport::orderTransfersBehind, py::arg("device"))
      .def("set_issues_ahead", &TorchTransport::setIssuesAhead, py::arg("ahead"))
      .def(
          "order_behind_sums",
          [](TorchTransport& transport, ModelId model, TensorId tensor, const c10::Device& device) {
            transport.orderBehindSums({model, tensor}, device);
          },
          py::arg("model"), py::arg("tensor"), py::arg("device"))
      .def(
          "time_stream", &TorchTransport::timeStream, py::arg("pieces"), py::arg("in_flight"),
          py::arg("operation") = Operation::kAllReduce, py::call_guard<py::gil_scoped_release>());
  m.def(
      "shard_of",
      [](std::int64_t elements, int rank, int size) {
        const Shard shard = shardOf(elements, rank, size);
        return std::pair(shard.begin, shard.length);
      },
      py::arg("elements"), py::arg("rank"), py::arg("size"),
      "First element and length of a rank's shard of a slice.");
  py::enum_<HalfForm>(m, "HalfForm", py::module_local(), "How halves of an all-reduce travel.")
      .value("COLLECTIVE", HalfForm::kCollective)
      .value("EXCHANGE", HalfForm::kExchange);
  py::class_<C10dTransport, TorchTransport, std::shared_ptr<C10dTransport>>(
      m, "C10dTransport", py::module_local(), "Carries slices over a process group.")
      .def(
          py::init([](const Group& group) { return std::make_shared<C10dTransport>(group); }),
          py::arg("group"))
      .def(
          "set_half_forms", &C10dTransport::setHalfForms, py::arg("reduce_scatter"),
          py::arg("all_gather"))
      .def(
          "set_hosts",
          [](C10dTransport& transport, const std::vector<int>& hosts, const Group& between,
             const std::optional<Group>& scatter, const std::optional<Group>& gather) {
            transport.setHosts(hosts, between, scatter.value_or(nullptr), gather.value_or(nullptr));
          },
          py::arg("hosts"), py::arg("between"), py::arg("scatter"), py::arg("gather"));
  py::class_<HorovodTransport, TorchTransport, std::shared_ptr<HorovodTransport>>(
      m, "HorovodTransport", py::module_local(), "Carries slices over Horovod's engine.")
      .def(
          py::init([](const std::string& library, bool gpuOnHost) {
            return std::make_shared<HorovodTransport>(library, gpuOnHost);
          }),
          py::arg("library"), py::arg("gpu_on_host"));
  py::class_<C10dControl, ControlChannel, std::shared_ptr<C10dControl>>(
      m, "C10dControl", py::module_local(), "Control messages over a Gloo process group.")
      .def(
          py::init([](const Group& group, Rank rank, int size) {
            return std::make_shared<C10dControl>(group, rank, size, neighboursInTree(rank, size));
          }),
          py::arg("group"), py::arg("rank"), py::arg("size"));
  py::class_<TextStar, std::shared_ptr<TextStar>>(
      m, "TextStar", py::module_local(), "Texts between rank 0 and every other rank.")
      .def(
          py::init([](const Group& group, Rank rank, int size) {
            return std::make_shared<TextStar>(group, rank, size);
          }),
          py::arg("group"), py::arg("rank"), py::arg("size"))
      .def("start", &TextStar::start)
      .def(
          "send", [](TextStar& star, Rank to, const py::bytes& text) { star.send(to, text); },
          py::arg("to"), py::arg("text"))
      .def("next", &nextOf)
      .def("close", [](TextStar& star) {
        withoutGil([&] {
          star.close();
          return true;
        });
      });
  m.def("watch_group", &watchGroup, py::arg("group"));
  m.def("keep_watched_groups", &keepWatchedGroups);
  m.def("wait_for", &waitFor, py::arg("work"), py::arg("seconds"));
}

} // namespace hvd_order
