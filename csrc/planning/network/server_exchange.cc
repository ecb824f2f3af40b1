#include "planning/network/server_exchange.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

// A slice's path: ready -> pushed by every worker in its own order (`drivePush`) -> `pushed`: the
// server works on it, one slice after the other -> `updated` -> pulled by every worker
// (`drivePull`), at once or when the worker's next step begins -> `pulled`.
//
// Links are numbered: up and down of each worker, then up and down of each server. A worker that
// represents several ranks has as many equal flows on the server's link, and one on its own.
//
// Pushes use an agreement of one rank. Pulls use a Scheduler over a second layout, in which every
// slice is a tensor. A transfer is one number, (worker * slices + slice) * 2 + isPull, because
// clock and flows store numbers.
//
// Invariant: a server starts to work on a slice only when all workers have pushed it, and finishes
// its slices one by one, in order of their last push.
//
// Sources: pull at once from P3 (Jayarajan et al., MLSys 2019, section 4.2); pull at the next step
// from TicTac (Hashemi et al., MLSys 2019).

namespace hvd_order::simulate {

namespace {

std::vector<double> capacities(const ServerNetwork& network, std::size_t workers) {
  for (const double rate : {network.workerBytesPerS, network.serverBytesPerS}) {
    if (!std::isfinite(rate) || rate <= 0) {
      throw InvalidUsage(concat("a link of ", rate, " bytes/s; a positive rate is needed"));
    }
  }
  for (const double seconds :
       {network.latencyS, network.updateSecondsPerByte, network.updateSecondsPerSlice}) {
    if (!std::isfinite(seconds) || seconds < 0) {
      throw InvalidUsage(concat("parameter servers with a time of ", seconds, " s"));
    }
  }
  if (network.servers < 1) {
    throw InvalidUsage(concat(network.servers, " parameter servers; at least 1 is needed"));
  }
  std::vector<double> all(2 * workers, network.workerBytesPerS);
  all.resize(all.size() + 2 * static_cast<std::size_t>(network.servers), network.serverBytesPerS);
  return all;
}

// A layout with every slice as a tensor in a buffer of its own, so that none is fused or cut.
std::shared_ptr<const SliceLayout> oneTensorASlice(const SliceLayout& layout) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(layout.slices().size());
  for (SliceIndex slice = 0; slice < layout.slices().size(); ++slice) {
    tensors.push_back({layout.sliceName(slice), layout.slices()[slice].sizeBytes, slice});
  }
  const ByteCount largest = std::max(layout.largestSliceBytes(), SliceLayout::kCutAlignment);
  return std::make_shared<SliceLayout>(std::move(tensors), largest);
}

} // namespace

ServerExchange::ServerExchange(
    std::shared_ptr<const SliceLayout> layout,
    const SimulatedExchangeOptions& options,
    const ServerNetwork& network,
    const Roles& roles,
    Clock& clock,
    std::vector<Device>& devices)
    : SimulatedExchange(
          std::move(layout),
          options,
          capacities(network, roles.slowness.size()),
          clock,
          devices),
      network_(network),
      serverOf_(network.serverOf),
      pushes_(layout_->slices().size()),
      pullsToGo_(layout_->slices().size()),
      pullRounds_(layout_->slices().size()),
      serverFreeS_(static_cast<std::size_t>(network.servers)) {
  const std::size_t slices = layout_->slices().size();
  const auto servers = static_cast<std::uint32_t>(network.servers);
  if (serverOf_.empty()) {
    serverOf_.reserve(slices);
    for (std::uint32_t slice = 0; slice < slices; ++slice) {
      serverOf_.push_back(slice % servers);
    }
  }
  if (serverOf_.size() != slices ||
      std::any_of(serverOf_.begin(), serverOf_.end(), [&](auto s) { return s >= servers; })) {
    throw InvalidUsage(concat(
        "the servers of slices must be ", slices, " numbers below ", servers,
        ", one for each slice"));
  }
  const auto pullLayout = oneTensorASlice(*layout_);
  for (std::size_t device = 0; device < roles.slowness.size(); ++device) {
    // Workers do not wait for each other, so each is the only rank of its agreement.
    auto push = Agreement::create(options.agreement, 0, 1, options.policy, options.creditBytes);
    push->addModel(kModel, layout_, options.plan);
    auto pull = std::make_unique<Scheduler>(network.pullPolicy, network.pullCreditBytes);
    pull->addModel(kModel, pullLayout, network.pullPlan);
    std::vector<std::uint32_t> slicesToPull;
    slicesToPull.reserve(layout_->tensors().size());
    for (TensorId tensor = 0; tensor < layout_->tensors().size(); ++tensor) {
      slicesToPull.push_back(static_cast<std::uint32_t>(layout_->slicesOf(tensor).size()));
    }
    workers_.push_back(
        {std::move(push), std::move(pull), std::move(slicesToPull), roles.ranksOf[device]});
  }
}

void ServerExchange::ready(DeviceIndex device, const std::vector<TensorId>& tensors) {
  for (const TensorId tensor : tensors) {
    for (const SliceKey slice : workers_[device].push->tensorReady({kModel, tensor})) {
      if (device == 0) {
        record(slice.index, rounds_[slice.index]).readyS = clock_.nowS();
      }
    }
  }
  drivePush(device);
}

void ServerExchange::drivePush(DeviceIndex worker) {
  decisions_.clear();
  workers_[worker].push->decide(decisions_);
  for (const SliceKey slice : decisions_.issue) {
    record(slice.index, rounds_[slice.index]).issuedS = clock_.nowS();
    begin({worker, slice.index, false});
  }
}

void ServerExchange::begin(SliceTransfer transfer) {
  if (network_.latencyS > 0) {
    const auto slices = static_cast<std::uint32_t>(layout_->slices().size());
    const std::uint32_t number =
        (transfer.worker * slices + transfer.slice) * 2 + (transfer.isPull ? 1 : 0);
    clock_.announce(network_.latencyS, EventKind::kLatencyOver, number);
  } else {
    carry(transfer);
  }
}

ServerExchange::SliceTransfer ServerExchange::transferOf(std::uint32_t number) const {
  const auto slices = static_cast<std::uint32_t>(layout_->slices().size());
  return {number / 2 / slices, number / 2 % slices, number % 2 == 1};
}

void ServerExchange::carry(SliceTransfer transfer) {
  const auto slices = static_cast<std::uint32_t>(layout_->slices().size());
  const auto workers = static_cast<std::uint32_t>(workers_.size());
  const std::uint32_t way = transfer.isPull ? 1 : 0; // pushes use the up link, pulls the down link
  const Flows::Use own{2 * transfer.worker + way, 1.0};
  const Flows::Use server{
      2 * (workers + serverOf_[transfer.slice]) + 1 - way, workers_[transfer.worker].ranks};
  if (!transfer.isPull) {
    record(transfer.slice, rounds_[transfer.slice]).startedS = clock_.nowS();
  }
  const std::uint32_t number = (transfer.worker * slices + transfer.slice) * 2 + way;
  const auto bytes = static_cast<double>(bytesOf(transfer.slice));
  flows_.start(clock_.nowS(), number, bytes, own, server);
}

void ServerExchange::flowEnded() {
  const SliceTransfer transfer = transferOf(flows_.finish());
  if (transfer.isPull) {
    pulled(transfer.worker, transfer.slice);
    return;
  }
  if (transfer.worker == 0) {
    sentBytes_ += static_cast<double>(bytesOf(transfer.slice));
  }
  // The completed tensors are ignored: a tensor has arrived only after the pull.
  (void)workers_[transfer.worker].push->sliceDone({kModel, transfer.slice});
  pushed(transfer.slice);
  drivePush(transfer.worker);
}

void ServerExchange::pushed(SliceIndex slice) {
  if (++pushes_[slice] < workers_.size()) {
    return;
  }
  pushes_[slice] = 0;
  double& freeS = serverFreeS_[serverOf_[slice]];
  const double workS = network_.updateSecondsPerSlice +
      network_.updateSecondsPerByte * static_cast<double>(bytesOf(slice));
  freeS = std::max(freeS, clock_.nowS()) + workS;
  clock_.announce(freeS - clock_.nowS(), EventKind::kServerDone, slice);
}

void ServerExchange::happened(const Event& event) {
  if (event.kind == EventKind::kLatencyOver) {
    carry(transferOf(event.a));
    return;
  }
  HVDO_CHECK(event.kind == EventKind::kServerDone, "workers send each other no messages");
  updated(event.a);
}

void ServerExchange::updated(SliceIndex slice) {
  record(slice, rounds_[slice]++).summedS = clock_.nowS();
  pullsToGo_[slice] = workers_.size();
  if (network_.pull == PullTiming::kAtOnce) {
    for (DeviceIndex worker = 0; worker < workers_.size(); ++worker) {
      offerPull(worker, slice);
      drivePull(worker);
    }
  } else if (++summed_ == layout_->slices().size()) {
    summed_ = 0;
    for (Device& device : devices_) {
      device.allSummed();
    }
  }
}

void ServerExchange::stepEnded(DeviceIndex device) {
  if (network_.pull != PullTiming::kNextStep) {
    return;
  }
  for (SliceIndex slice = 0; slice < layout_->slices().size(); ++slice) {
    offerPull(device, slice);
  }
  drivePull(device);
}

void ServerExchange::offerPull(DeviceIndex worker, SliceIndex slice) {
  for (const SliceKey key : workers_[worker].pull->tensorReady({kModel, slice})) {
    workers_[worker].pull->offer(key);
  }
}

void ServerExchange::drivePull(DeviceIndex worker) {
  while (const std::optional<SliceKey> slice = workers_[worker].pull->next()) {
    begin({worker, slice->index, true});
  }
}

void ServerExchange::pulled(DeviceIndex worker, SliceIndex slice) {
  if (--pullsToGo_[slice] == 0) {
    record(slice, pullRounds_[slice]++).finishedS = clock_.nowS();
  }
  (void)workers_[worker].pull->sliceDone({kModel, slice});
  for (const TensorId tensor : layout_->tensorsOf(slice)) {
    std::uint32_t& toGo = workers_[worker].slicesToPull[tensor];
    if (--toGo == 0) {
      toGo = static_cast<std::uint32_t>(layout_->slicesOf(tensor).size());
      devices_[worker].arrived(tensor);
    }
  }
  drivePull(worker);
}

std::string ServerExchange::linkName(Flows::Link link) const {
  const std::size_t workerLinks = 2 * workers_.size();
  const bool worker = link < workerLinks;
  return concat(
      worker ? "worker " : "server ", (worker ? link : link - workerLinks) / 2,
      link % 2 == 0 ? " up" : " down");
}

std::string ServerExchange::describe(TensorId tensor) const {
  for (const WorkerSchedulers& worker : workers_) {
    for (const SliceIndex slice : layout_->slicesOf(tensor)) {
      const std::string name = concat("slice '", layout_->sliceName(slice), "'");
      if (worker.push->scheduler().isReady({kModel, slice})) {
        const auto head = worker.push->head();
        return head ? concat(
                          name, " is ready, but slice '", layout_->sliceName(head->index),
                          "' has to go first")
                    : concat(name, " was not pushed");
      }
      for (const TensorId part : layout_->tensorsOf(slice)) {
        if (!worker.push->scheduler().isPending({kModel, part})) {
          return concat(
              name, " lacks the gradient of '", layout_->tensors()[part].name,
              "' or was not pulled");
        }
      }
    }
  }
  return concat("the gradient of '", layout_->tensors()[tensor].name, "' does not come");
}

} // namespace hvd_order::simulate
