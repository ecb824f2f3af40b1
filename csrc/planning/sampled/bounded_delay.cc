#include "planning/sampled/bounded_delay.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

// A request's path: it waits in `asks`; `admitNext` then skips it, if it would be too late, or
// admits it, alone or in a group. The admission is open until the push, or the helper's sum, has
// come to the owner (`came`), waits as `arrived` until it is applied, and then the next one is
// admitted.
//
// Invariants: at most one admission is open for each tensor, and nothing is admitted while an
// update waits to be applied: what is late is known only then. A listener is told only after the
// state has changed, because it may ask again at once.
namespace hvd_order::simulate {

class BoundedDelay::WaitingTensor final : public PushWindows::WaitingSlice {
 public:
  WaitingTensor(BoundedDelay& owner, TensorId tensor) : owner_(owner), tensor_(tensor) {}
  void admit() override {
    owner_.admitNext(tensor_);
  }

 private:
  BoundedDelay& owner_;
  const TensorId tensor_;
};

BoundedDelay::BoundedDelay(
    const SampledTraining& training,
    const StepTables& tables,
    const Clock& clock,
    const SampledStep& step,
    AdmissionListener& listener)
    : bound_(training.delayBound.value()),
      aggregates_(training.aggregates),
      tables_(tables),
      clock_(clock),
      sizes_(step.tensorBytes()),
      listener_(listener),
      urgency_(sizes_.size()),
      tensors_(sizes_.size()) {
  const std::size_t workers = training.slowness.size();
  std::vector<TensorId> order(sizes_.size());
  std::iota(order.begin(), order.end(), TensorId{0});
  const auto priorityOf = [&](TensorId tensor) {
    const OpIndex push = step.pushOf(tensor);
    return push == SampledStep::kNone ? 0 : step.ops()[push].priority;
  };
  std::ranges::stable_sort(order, {}, priorityOf);
  for (TensorId tensor = 0; tensor < order.size(); ++tensor) {
    urgency_[order[tensor]] = tensor;
    tensors_[tensor].sent.resize(workers);
    tensors_[tensor].read.resize(workers);
    waiters_.push_back(std::make_shared<WaitingTensor>(*this, tensor));
  }
  for (std::uint32_t server = 0; server < training.servers; ++server) {
    rooms_.push_back(std::make_unique<Room>());
  }
}

BoundedDelay::~BoundedDelay() = default;

BoundedDelay::Room& BoundedDelay::roomOf(TensorId number) const {
  return *rooms_[tables_.serverOf[number]];
}

PushWindows::Key BoundedDelay::keyOf(TensorId number) const {
  return {urgency_[number], ModelId{0}, 0};
}

void BoundedDelay::ask(const Transfer& push) {
  SimulatedTensor& tensor = tensors_[push.tensor];
  tensor.asks.push_back({push, tensor.read[push.worker]});
  admitNext(push.tensor);
}

bool BoundedDelay::partCame(TensorId number) {
  SimulatedAdmission& group = tensors_[number].admission.value();
  return ++group.parts == group.asks.size();
}

void BoundedDelay::came(TensorId number) {
  SimulatedTensor& tensor = tensors_[number];
  HVDO_CHECK(tensor.admission && !tensor.arrived, "a push that was not admitted");
  tensor.arrived = std::exchange(tensor.admission, std::nullopt);
  const SimulatedAdmission& ended = *tensor.arrived;
  Room& room = roomOf(number);
  const bool isDirect = ended.helper == Routes::kDirect;
  PushWindows& windows = isDirect ? room.windows : room.helperWindows;
  const int sender =
      isDirect ? static_cast<int>(ended.asks.front().push.worker) : static_cast<int>(ended.helper);
  const double nowS = clock_.nowS();
  windows.giveBack(sender, sizes_[number], /*came=*/true, nowS);
  freed_.emplace_back(&windows, sender);
  room.routes.took(ended.helper, (nowS - ended.sinceS) / static_cast<double>(sizes_[number]));
}

std::vector<Transfer> BoundedDelay::applied(TensorId number) {
  SimulatedTensor& tensor = tensors_[number];
  std::vector<Transfer> pushes;
  const SimulatedAdmission arrived = std::exchange(tensor.arrived, std::nullopt).value();
  for (const SimulatedRequest& ask : arrived.asks) {
    longestDelay_ = std::max(longestDelay_, tensor.version++ - ask.read);
    pushes.push_back(ask.push);
  }
  return pushes;
}

void BoundedDelay::proceed(TensorId number) {
  admitNext(number);
  for (const auto& [windows, sender] : std::exchange(freed_, {})) {
    while (const auto next = windows->next(sender)) {
      next->admit();
    }
  }
}

void BoundedDelay::answers(TensorId number, std::uint32_t worker) {
  tensors_[number].sent[worker] = tensors_[number].version;
}

void BoundedDelay::reads(TensorId number, std::uint32_t worker) {
  tensors_[number].read[worker] = tensors_[number].sent[worker];
}

void BoundedDelay::admitNext(TensorId number) {
  SimulatedTensor& tensor = tensors_[number];
  if (tensor.arrived || tensor.asks.empty()) {
    return;
  }
  const std::vector<WaitingUpdate> updates = waitingUpdates(tensor, number);
  const NextUpdates next = nextUpdates(updates);
  std::vector<Transfer> late;
  for (const std::size_t index : next.late) {
    late.push_back(tensor.asks[index].push);
    tensor.asks[index].isServed = true;
  }
  std::vector<Transfer> admitted;
  if (!tensor.admission) {
    if (!admitGroup(tensor, number, updates)) {
      admitOneOf(tensor, number, next.candidates, updates);
    }
    if (tensor.admission) {
      for (const SimulatedRequest& ask : tensor.admission->asks) {
        admitted.push_back(ask.push);
      }
    }
  }
  std::erase_if(tensor.asks, [](const SimulatedRequest& ask) { return ask.isServed; });
  for (const Transfer& push : late) {
    listener_.tooLate(push);
  }
  for (const Transfer& push : admitted) {
    listener_.admitted(push);
  }
}

std::vector<WaitingUpdate> BoundedDelay::waitingUpdates(
    const SimulatedTensor& tensor,
    TensorId number) const {
  const auto turnsTaken =
      static_cast<std::int64_t>(tensor.admission ? tensor.admission->asks.size() : 0);
  const PushWindows& windows = roomOf(number).windows;
  std::vector<WaitingUpdate> updates;
  updates.reserve(tensor.asks.size());
  for (const SimulatedRequest& ask : tensor.asks) {
    const std::int64_t delay = std::int64_t{tensor.version} - ask.read;
    const auto worker = static_cast<int>(ask.push.worker);
    updates.push_back(
        {std::int64_t{bound_} - delay - turnsTaken,
         windows.expectedSeconds(worker, sizes_[number])});
  }
  return updates;
}

// Admits the first candidate whose connection has room; if none has, the waiter is called when one
// has.
void BoundedDelay::admitOneOf(
    SimulatedTensor& tensor,
    TensorId number,
    std::vector<std::size_t> candidates,
    const std::vector<WaitingUpdate>& updates) {
  std::ranges::stable_sort(
      candidates, {}, [&](std::size_t index) { return updates[index].seconds; });
  Room& room = roomOf(number);
  std::vector<int> workers;
  for (const std::size_t index : candidates) {
    SimulatedRequest& ask = tensor.asks[index];
    workers.push_back(static_cast<int>(ask.push.worker));
    if (room.windows.take(workers.back(), sizes_[number], clock_.nowS())) {
      room.routes.taken(Routes::kDirect);
      tensor.admission = SimulatedAdmission{{ask}, Routes::kDirect, clock_.nowS()};
      ask.isServed = true;
      return;
    }
  }
  room.windows.await(workers, keyOf(number), waiters_[number]);
}

// Admits all updates that are in time, through a helper. If the helper has no room, they wait.
// @return false if there are fewer than two updates, or no helper is faster.
bool BoundedDelay::admitGroup(
    SimulatedTensor& tensor,
    TensorId number,
    const std::vector<WaitingUpdate>& updates) {
  if (!aggregates_) {
    return false;
  }
  const std::vector<std::size_t> able = delayBoundedOrder(updates).order;
  if (able.size() < 2) {
    return false;
  }
  std::vector<ServerId> helpers;
  for (std::uint32_t server = 0; server < rooms_.size(); ++server) {
    if (server != tables_.serverOf[number]) {
      helpers.push_back(static_cast<ServerId>(server));
    }
  }
  Room& room = roomOf(number);
  const ServerId helper = room.routes.best(able.size(), helpers);
  if (helper == Routes::kDirect) {
    return false;
  }
  if (!room.helperWindows.take(helper, sizes_[number], clock_.nowS())) {
    room.helperWindows.await({helper}, keyOf(number), waiters_[number]);
    return true;
  }
  room.routes.taken(helper);
  tensor.admission = SimulatedAdmission{{}, helper, clock_.nowS()};
  for (const std::size_t index : able) {
    tensor.asks[index].isServed = true;
    tensor.admission->asks.push_back(tensor.asks[index]);
    tensor.admission->asks.back().push.server = helper;
  }
  return true;
}

} // namespace hvd_order::simulate
