#include <pybind11/stl.h>

#include <map>
#include <mutex>

#include "base/error.h"
#include "bindings/bindings.h"
#include "engine/op_gradient_queue.h"
#include "tensorflow/engine_api.h"

namespace py = pybind11;

// The C function table, and the numbers by which its callers name a queue. No number is used
// twice: an operator of a graph that outlives its queue must not reach another one.

namespace hvd_order {

namespace {

class OpGradientQueues {
 public:
  std::uint32_t add(std::shared_ptr<OpGradientQueue> queue) {
    const std::scoped_lock lock(mutex_);
    queues_.emplace(next_, std::move(queue));
    return next_++;
  }
  void remove(std::uint32_t number) {
    const std::scoped_lock lock(mutex_);
    queues_.erase(number);
  }
  std::shared_ptr<OpGradientQueue> find(std::uint32_t number) {
    const std::scoped_lock lock(mutex_);
    const auto found = queues_.find(number);
    return found == queues_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<OpGradientQueue>> queues_;
  std::uint32_t next_ = 1;
};

OpGradientQueues& queues() {
  static auto* all =
      new OpGradientQueues; // never destroyed: operators may run until the process ends
  return *all;
}

void report(const std::exception_ptr& error, void* context, hvdo_failed failed) {
  const auto say = [&](int kind, const char* name, const std::exception& e) {
    failed(context, kind, concat(name, ": ", e.what()).c_str());
  };
  try {
    std::rethrow_exception(error);
  } catch (const InvalidUsage& e) {
    say(HVDO_MISTAKE, "InvalidUsage", e);
  } catch (const PeerLost& e) {
    say(HVDO_COLLECTIVE, "PeerLost", e);
  } catch (const TransferTimeout& e) {
    say(HVDO_COLLECTIVE, "TransferTimeout", e);
  } catch (const CollectiveError& e) {
    say(HVDO_COLLECTIVE, "HorovodInternalError", e);
  } catch (const std::exception& e) {
    say(HVDO_INTERNAL, "BrokenInvariant", e);
  }
}

constexpr const char* kNotThere =
    "NotInitialized: the exchange that this operator belongs to has ended; call hvd.init(), and "
    "trace again what was traced before";

int post(
    hvdo_position position,
    const void* gradient,
    std::size_t sizeBytes,
    void* context,
    hvdo_failed failed) {
  const std::shared_ptr<OpGradientQueue> queue = queues().find(position.exchange);
  if (!queue) {
    failed(context, HVDO_NOT_THERE, kNotThere);
    return 0;
  }
  try {
    queue->post(position.index, gradient, sizeBytes);
    return 1;
  } catch (...) {
    report(std::current_exception(), context, failed);
    return 0;
  }
}

class ForeignTaker final : public OpGradientQueue::Taker {
 public:
  explicit ForeignTaker(const hvdo_taker& taker) : taker_(taker) {}

  void receive(const std::byte* sum, std::size_t sizeBytes) override {
    taker_.receive(taker_.context, sum, sizeBytes);
  }
  void finish(const std::exception_ptr& error) override {
    if (error) {
      report(error, taker_.context, taker_.failed);
    } else {
      taker_.done(taker_.context);
    }
  }

 private:
  const hvdo_taker taker_;
};

void take(hvdo_position position, const hvdo_taker* taker) {
  const std::shared_ptr<OpGradientQueue> queue = queues().find(position.exchange);
  if (!queue) {
    taker->failed(taker->context, HVDO_NOT_THERE, kNotThere);
    return;
  }
  queue->take(position.index, std::make_unique<ForeignTaker>(*taker));
}

constexpr hvdo_engine_api kApi = {
    .version = HVDO_ENGINE_API_VERSION,
    .size_bytes = sizeof(hvdo_engine_api),
    .post = post,
    .take = take,
};

// An OpGradientQueue that the table lists under a number.
class ListedOpGradientQueue {
 public:
  using PlaceTuple = std::tuple<std::string, TensorId, std::uintptr_t, std::size_t>;

  ListedOpGradientQueue(
      std::shared_ptr<Engine> engine,
      ModelId model,
      const std::vector<PlaceTuple>& places,
      std::optional<TensorId> squares) {
    std::vector<OpGradientQueue::Place> made;
    made.reserve(places.size());
    for (const auto& [name, tensor, address, sizeBytes] : places) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses as numbers
      made.push_back({tensor, reinterpret_cast<std::byte*>(address), sizeBytes, name});
    }
    queue_ = OpGradientQueue::create(std::move(engine), model, std::move(made), squares);
    number_ = queues().add(queue_);
  }
  ListedOpGradientQueue(const ListedOpGradientQueue&) = delete;
  ListedOpGradientQueue& operator=(const ListedOpGradientQueue&) = delete;
  ~ListedOpGradientQueue() {
    close();
  }

  void close() {
    queues().remove(number_);
    queue_->close();
  }
  [[nodiscard]] std::uint32_t number() const {
    return number_;
  }
  [[nodiscard]] std::uint64_t posts() const {
    return queue_->posts();
  }
  void standIn(std::uint64_t pass) {
    queue_->standIn(pass);
  }
  [[nodiscard]] std::uint64_t passes() const {
    return queue_->passes();
  }
  std::optional<std::uint64_t> waitForPass(std::uint64_t known) {
    return queue_->waitForPass(known);
  }
  void waitUntilIdle() {
    queue_->waitUntilIdle();
  }

 private:
  std::shared_ptr<OpGradientQueue> queue_;
  std::uint32_t number_ = 0;
};

} // namespace

void bindOpGradientQueue(py::module_& m) {
  py::class_<ListedOpGradientQueue>(
      m, "OpGradientQueue", py::module_local(),
      "Where operators post gradients and take their sums.")
      .def(
          py::init<
              std::shared_ptr<Engine>, ModelId,
              const std::vector<ListedOpGradientQueue::PlaceTuple>&, std::optional<TensorId>>(),
          py::arg("engine"), py::arg("model"), py::arg("places"), py::arg("squares") = py::none())
      .def_property_readonly("number", &ListedOpGradientQueue::number)
      .def_property_readonly("posts", &ListedOpGradientQueue::posts)
      .def(
          "stand_in", &ListedOpGradientQueue::standIn, py::arg("passes"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("passes", &ListedOpGradientQueue::passes)
      .def(
          "wait_for_pass", &ListedOpGradientQueue::waitForPass, py::arg("known"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_until_idle", &ListedOpGradientQueue::waitUntilIdle,
          py::call_guard<py::gil_scoped_release>())
      .def("close", &ListedOpGradientQueue::close, py::call_guard<py::gil_scoped_release>());
  m.def(
      "engine_api", [] { return reinterpret_cast<std::uintptr_t>(&kApi); },
      "Address of the C function table for libraries of operators (csrc/tensorflow/engine_api.h).");
}

} // namespace hvd_order
