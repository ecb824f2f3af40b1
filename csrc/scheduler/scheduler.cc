#include "scheduler/scheduler.h"

#include <algorithm>

#include "base/error.h"

// Priority queue and window for slices; counters replace searches.
//
// Each slice counts what it waits for: tensors that are not ready yet, and in a split layout slices
// that are not done yet. Each tensor counts its unfinished slices. `tensorReady` and `sliceDone`
// decrement these counters, so an event costs O(1) for each slice touched. A slice starts to count
// for its next step when it is done.
//
// Candidates lie in a binary heap. The key is the slice's number (kPriority) or the number of its
// offer (kArrival). Numbers follow consumption order, and in a split layout come first the squares,
// then the reduce-scatters: what the norms wait for. kPlanned needs no heap: only the slice whose
// turn it is can be issued.
//
// Only the front of the heap is considered. If it does not fit the credit or the reservation,
// `next` returns nothing, even if a less urgent slice would fit. So small slices cannot starve an
// urgent large one.
//
// Invariants: inFlightBytes_ is what the slices in state kInFlight take of the credit: their sizes,
// apart from squares. It never exceeds the credit when a slice is put in flight. Every slice fits
// the credit, so the front is always issued once enough slices have ended. A tensor is pending
// while slicesToGo is not 0.
//
// In a split layout no gradient of a step is ready before the squares of the step before are done.
// So the counter of the squares never mixes steps, and a reduce-scatter does not write squares that
// are still in flight. Slices of a tensor are pending from its readiness to the end of its
// all-gathers, so the counter of an all-gather does not mix steps either. In a sharded layout an
// all-gather counts its parameters, which become ready after the squares of their step.
//
// Sources: slices in consumption order from P3 (Jayarajan et al., MLSys 2019); the credit from
// Peng et al., SOSP 2019.

namespace hvd_order {

namespace {

// std::push_heap keeps the largest in front; the most urgent candidate has the smallest number.
constexpr auto kLessUrgent = [](const auto& a, const auto& b) { return a.urgency > b.urgency; };

/// A plan is followed strictly: a slice before one that it waits for would never be ready.
void checkHalves(const SliceLayout& layout, const std::vector<SliceIndex>& plan) {
  std::vector<std::size_t> place(plan.size());
  for (std::size_t i = 0; i < plan.size(); ++i) {
    place[plan[i]] = i;
  }
  const auto check = [&](SliceIndex waits, SliceIndex before) {
    if (place[waits] < place[before]) {
      throw InvalidUsage(concat(
          "the planned order sends '", layout.sliceName(waits), "' before '",
          layout.sliceName(before), "', for which it waits; make the plan again"));
    }
  };
  for (SliceIndex sum = 1; sum <= layout.pairs(); ++sum) {
    check(layout.gatherOf(sum), sum);
    check(SliceLayout::kSquares, sum);
    if (layout.isSharded()) { // a rank may need the squares to update its shards
      check(layout.gatherOf(sum), SliceLayout::kSquares);
    }
  }
}

} // namespace

Scheduler::Scheduler(Policy policy, ByteCount creditBytes)
    : policy_(policy), creditBytes_(creditBytes) {
  if (creditBytes <= 0) {
    throw InvalidUsage(concat("credit is ", creditBytes, " bytes; it must be positive"));
  }
}

void Scheduler::addModel(
    ModelId model,
    std::shared_ptr<const SliceLayout> layout,
    std::vector<SliceIndex> plan) {
  if (model >= SliceKey::kMaxModels) {
    throw InvalidUsage(concat("at most ", SliceKey::kMaxModels, " models can be registered"));
  }
  if (hasModel(model)) {
    throw InvalidUsage(concat("model ", model, " is registered already"));
  }
  if (layout->largestSliceBytes() > creditBytes_) {
    throw InvalidUsage(concat(
        "the largest slice has ", layout->largestSliceBytes(), " bytes, the credit is ",
        creditBytes_, " bytes: such a slice could never be sent; raise the credit or cut finer"));
  }
  const std::size_t slices = layout->slices().size();
  if (policy_ == Policy::kPlanned && !leavingPlan_) {
    if (std::any_of(models_.begin(), models_.end(), [](const auto& m) { return m.has_value(); })) {
      throw InvalidUsage(
          "a planned order covers one model; with several optimizers use leader or negotiated");
    }
    std::vector<SliceIndex> sorted = plan;
    std::sort(sorted.begin(), sorted.end());
    bool permutation = sorted.size() == slices;
    for (SliceIndex i = 0; permutation && i < slices; ++i) {
      permutation = sorted[i] == i;
    }
    if (!permutation) {
      throw InvalidUsage(concat(
          "the planned order must list each of the ", slices, " slices once; it lists ",
          plan.size(), " entries; make the plan again for this model and slice size"));
    }
    checkHalves(*layout, plan);
  } else if (!plan.empty()) {
    throw InvalidUsage("only the planned policy takes a planned order");
  }

  ModelState added;
  added.state.assign(slices, SlicePhase::kWaiting);
  added.offered.assign(slices, 0);
  for (SliceIndex slice = 0; slice < slices; ++slice) {
    added.toCome.push_back(prerequisites(*layout, slice));
  }
  added.slicesToGo.assign(layout->tensors().size(), 0);
  added.readyCounts.assign(layout->tensors().size(), 0);
  added.layout = std::move(layout);
  added.plan = std::move(plan);
  if (models_.size() <= model) {
    models_.resize(model + 1);
  }
  models_[model] = std::move(added);
  candidates_.reserve(candidates_.size() + slices);
  becameReady_.reserve(slices);
}

void Scheduler::removeModel(ModelId model) {
  if (!idle(model)) {
    throw InvalidUsage(
        concat("model ", model, " still has gradients in flight; finish them first"));
  }
  models_[model].reset();
}

void Scheduler::retune(Policy policy, ByteCount creditBytes) {
  if ((policy == Policy::kPlanned) != (policy_ == Policy::kPlanned)) {
    throw InvalidUsage("a planned order cannot be taken up or given up while training");
  }
  for (const auto& model : models_) {
    if (model && model->layout->largestSliceBytes() > creditBytes) {
      throw InvalidUsage(concat(
          "the largest slice has ", model->layout->largestSliceBytes(),
          " bytes and would not fit a credit of ", creditBytes, " bytes"));
    }
  }
  policy_ = policy;
  creditBytes_ = creditBytes;
}

void Scheduler::leavePlan(Policy policy) {
  HVDO_CHECK(policy_ == Policy::kPlanned && policy != policy_, "no plan to leave");
  policy_ = policy;
  leavingPlan_ = false;
  for (auto& model : models_) {
    if (model) {
      model->plan.clear();
      std::fill(model->offered.begin(), model->offered.end(), std::uint8_t{0});
    }
  }
}

std::vector<ModelId> Scheduler::models() const {
  std::vector<ModelId> known;
  for (ModelId model = 0; model < models_.size(); ++model) {
    if (models_[model]) {
      known.push_back(model);
    }
  }
  return known;
}

bool Scheduler::hasModel(ModelId model) const {
  return model < models_.size() && models_[model].has_value();
}

bool Scheduler::idle(ModelId model) const {
  return modelOf(model).pendingTensors == 0;
}

const SliceLayout& Scheduler::layout(ModelId model) const {
  return *modelOf(model).layout;
}

Scheduler::ModelState& Scheduler::modelOf(ModelId model) {
  if (!hasModel(model)) {
    throw InvalidUsage(concat("no model ", model, " is registered"));
  }
  return *models_[model];
}

const Scheduler::ModelState& Scheduler::modelOf(ModelId model) const {
  return const_cast<Scheduler*>(this)->modelOf(model); // NOLINT: same body for both
}

const std::vector<SliceKey>& Scheduler::tensorReady(TensorKey tensor) {
  ModelState& m = modelOf(tensor.model);
  if (tensor.tensor >= m.slicesToGo.size()) {
    throw InvalidUsage(concat(
        "model ", tensor.model, " has ", m.slicesToGo.size(), " tensors, none with number ",
        tensor.tensor));
  }
  if (m.slicesToGo[tensor.tensor] != 0) {
    throw InvalidUsage(concat(
        "tensor '", m.layout->tensors()[tensor.tensor].name,
        "' became ready again before its last gradient was exchanged"));
  }
  if (m.layout->isSplit() && tensor.tensor != m.layout->squaresTensor() &&
      m.readyCounts[tensor.tensor] > squaresDone(m)) {
    throw InvalidUsage(concat(
        "tensor '", m.layout->tensors()[tensor.tensor].name,
        "' became ready again before the squares of its last step were exchanged"));
  }
  const std::span<const SliceIndex> slices = m.layout->slicesOf(tensor.tensor);
  m.slicesToGo[tensor.tensor] = static_cast<std::uint32_t>(slices.size());
  ++m.readyCounts[tensor.tensor];
  ++m.pendingTensors;
  becameReady_.clear();
  for (const SliceIndex slice : slices) {
    if (waitsForTensors(*m.layout, slice)) {
      count(m, {tensor.model, slice});
    }
  }
  return becameReady_;
}

// Number of steps whose squares are done.
std::uint32_t Scheduler::squaresDone(const ModelState& model) {
  const TensorId squares = model.layout->squaresTensor();
  return model.readyCounts[squares] - (model.slicesToGo[squares] == 0 ? 0 : 1);
}

// Whether the tensors of a slice make it ready, and not its reduce-scatter alone.
bool Scheduler::waitsForTensors(const SliceLayout& layout, SliceIndex slice) {
  return layout.isSharded() || layout.slices()[slice].operation != Operation::kAllGather;
}

// How many events make a slice ready: its tensors, or the slices that must be done before it.
std::uint32_t Scheduler::prerequisites(const SliceLayout& layout, SliceIndex slice) {
  if (!waitsForTensors(layout, slice)) {
    return 1;
  }
  const auto tensors = static_cast<std::uint32_t>(layout.tensorsOf(slice).size());
  return layout.isSplit() && slice == SliceLayout::kSquares ? tensors + layout.pairs() : tensors;
}

// One of the events that a slice waits for has happened.
void Scheduler::count(ModelState& model, SliceKey slice) {
  if (--model.toCome[slice.index] == 0) {
    model.state[slice.index] = SlicePhase::kReady;
    becameReady_.push_back(slice);
  }
}

void Scheduler::offer(SliceKey slice) {
  ModelState& m = modelOf(slice.model);
  HVDO_CHECK(slice.index < m.state.size(), "slice ", slice.index, " of ", m.state.size());
  if (policy_ == Policy::kPlanned) {
    m.offered[slice.index] = 1;
    return;
  }
  // Slices of several models interleave by place; the model id breaks ties.
  const std::uint64_t urgency = policy_ == Policy::kArrival
      ? arrivals_++
      : m.layout->urgency(slice.index) * SliceKey::kMaxModels + slice.model;
  candidates_.push_back({urgency, slice});
  std::push_heap(candidates_.begin(), candidates_.end(), kLessUrgent);
}

std::optional<SliceKey> Scheduler::next() {
  if (policy_ == Policy::kPlanned) {
    return nextPlanned();
  }
  if (candidates_.empty()) {
    return std::nullopt;
  }
  const SliceKey slice = candidates_.front().slice;
  if (layout(slice.model).creditBytes(slice.index) > largestBytes_ || !putInFlight(slice)) {
    return std::nullopt;
  }
  std::pop_heap(candidates_.begin(), candidates_.end(), kLessUrgent);
  candidates_.pop_back();
  return slice;
}

std::optional<SliceKey> Scheduler::turn() const {
  for (ModelId model = 0; model < models_.size(); ++model) {
    if (models_[model] && !models_[model]->plan.empty()) {
      return SliceKey{model, models_[model]->plan[models_[model]->planned]};
    }
  }
  return std::nullopt;
}

std::optional<SliceKey> Scheduler::nextPlanned() {
  const std::optional<SliceKey> slice = turn();
  if (!slice) {
    return std::nullopt;
  }
  ModelState& m = modelOf(slice->model);
  if (!m.offered[slice->index] || !putInFlight(*slice)) {
    return std::nullopt;
  }
  m.offered[slice->index] = 0;
  m.planned = (m.planned + 1) % m.plan.size();
  return slice;
}

bool Scheduler::take(SliceKey slice) {
  return hasModel(slice.model) && isReady(slice) && putInFlight(slice);
}

bool Scheduler::putInFlight(SliceKey slice) {
  ModelState& m = modelOf(slice.model);
  const ByteCount size = m.layout->creditBytes(slice.index);
  if (inFlightBytes_ + size > creditBytes_) {
    return false;
  }
  HVDO_CHECK(
      m.state[slice.index] == SlicePhase::kReady, "slice '", m.layout->sliceName(slice.index),
      "' was to be issued before it was ready");
  m.state[slice.index] = SlicePhase::kInFlight;
  inFlightBytes_ += size;
  return true;
}

const std::vector<TensorKey>& Scheduler::sliceDone(SliceKey slice) {
  ModelState& m = modelOf(slice.model);
  HVDO_CHECK(
      m.state.at(slice.index) == SlicePhase::kInFlight, "slice '", m.layout->sliceName(slice.index),
      "' is done, but was not in flight");
  const std::span<const TensorId> tensors = m.layout->tensorsOf(slice.index);
  inFlightBytes_ -= m.layout->creditBytes(slice.index);
  m.state[slice.index] = SlicePhase::kWaiting;
  m.toCome[slice.index] = prerequisites(*m.layout, slice.index);
  becameReady_.clear();
  if (m.layout->slices()[slice.index].operation == Operation::kReduceScatter) {
    if (!m.layout->isSharded()) {
      count(m, {slice.model, m.layout->gatherOf(slice.index)});
    }
    count(m, {slice.model, SliceLayout::kSquares});
  }
  completed_.clear();
  for (const TensorId tensor : tensors) {
    if (--m.slicesToGo[tensor] == 0) {
      --m.pendingTensors;
      completed_.push_back({slice.model, tensor});
    }
  }
  return completed_;
}

bool Scheduler::isReady(SliceKey slice) const {
  const ModelState& model = modelOf(slice.model);
  HVDO_CHECK(
      slice.index < model.state.size(), "slice ", slice.index, " of model ", slice.model,
      ", which has ", model.state.size(), ": ranks have different models, or a message is wrong");
  return model.state[slice.index] == SlicePhase::kReady;
}

bool Scheduler::isPending(TensorKey tensor) const {
  return modelOf(tensor.model).slicesToGo.at(tensor.tensor) != 0;
}

std::vector<TensorKey> Scheduler::pendingTensors(ModelId model) const {
  std::vector<TensorKey> pending;
  const std::vector<std::uint32_t>& slicesToGo = modelOf(model).slicesToGo;
  for (TensorId tensor = 0; tensor < slicesToGo.size(); ++tensor) {
    if (slicesToGo[tensor] != 0) {
      pending.push_back({model, tensor});
    }
  }
  return pending;
}

std::uint32_t Scheduler::readyCount(TensorKey tensor) const {
  return modelOf(tensor.model).readyCounts.at(tensor.tensor);
}

void Scheduler::appendState(StateWords& words) const {
  words.insert(
      words.end(),
      {static_cast<std::uint64_t>(policy_), leavingPlan_, static_cast<std::uint64_t>(creditBytes_),
       static_cast<std::uint64_t>(largestBytes_), models_.size()});
  for (const auto& model : models_) {
    words.push_back(model ? 1 + model->planned : 0);
    if (model) {
      for (const SlicePhase state : model->state) {
        words.push_back(static_cast<std::uint64_t>(state));
      }
      words.insert(words.end(), model->offered.begin(), model->offered.end());
      words.insert(words.end(), model->toCome.begin(), model->toCome.end());
      words.insert(words.end(), model->slicesToGo.begin(), model->slicesToGo.end());
    }
  }
  // Numbers of offers grow forever; only their order matters.
  std::vector<Candidate> byUrgency = candidates_;
  std::ranges::sort(byUrgency, {}, &Candidate::urgency);
  words.push_back(byUrgency.size());
  for (const Candidate& candidate : byUrgency) {
    words.push_back(candidate.slice.word());
  }
}

} // namespace hvd_order
