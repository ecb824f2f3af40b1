#include "world.h"

#include <algorithm>
#include <limits>
#include <ranges>

#include "base/error.h"

// One state of the exploration, and the rules by which it changes.
//
// The agreements are the real ones. All that the properties need is counted again here: how often
// each tensor became ready, how often each slice was issued and done, on each rank. The common
// order `order_` grows by the first rank that issues its k-th slice; every other rank must issue
// the same as its k-th.

namespace hvd_order::checker {

namespace {

std::string textOf(SliceKey slice, const Layouts& layouts) {
  return layouts[slice.model]->sliceName(slice.index);
}

} // namespace

Layouts layoutsOf(const Setup& setup) {
  Layouts layouts;
  for (const TensorSet& model : setup.models) {
    std::vector<TensorSpec> tensors;
    for (const int units : model.tensorUnits) {
      const auto letter = static_cast<char>('a' + tensors.size());
      std::string name(layouts.size() + 1, letter); // model 1 has aa, bb, ...
      tensors.push_back({std::move(name), units * kUnit, 0});
    }
    layouts.push_back(
        std::make_shared<SliceLayout>(
            std::move(tensors), model.sliceUnits * kUnit, true, model.split));
  }
  return layouts;
}

World::World(const Setup& setup, const Layouts& layouts) : setup_(&setup), layouts_(&layouts) {
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    auto node = std::make_shared<Node>(Node{
        .rank = rank,
        .agreements = AgreementSequence(
            setup.agreement, rank, setup.ranks, setup.policy, setup.creditUnits * kUnit,
            setup.fanOut, setup.hearing)});
    for (const auto& layout : layouts) {
      Node::Model model;
      model.ready.assign(layout->tensors().size(), 0);
      model.issued.assign(layout->slices().size(), 0);
      model.done.assign(layout->slices().size(), 0);
      model.heard.assign(layout->slices().size(), 0);
      node->models.push_back(std::move(model));
    }
    const std::size_t later = setup.leavesPlan || setup.registerLater.contains(rank) ? 1 : 0;
    for (ModelId model = 0; model + later < layouts.size(); ++model) {
      registerModel(*node, model);
    }
    hash(*node);
    nodes_.push_back(std::move(node));
  }
}

void World::registerModel(Node& node, ModelId model) const {
  node.models[model].registered = true;
  node.agreements.current().addModel(model, (*layouts_)[model], setup_->models[model].plan);
}

// ------------------------------------------------------------------------ what can happen

std::vector<Event> World::events() const {
  std::vector<Event> events;
  for (Rank rank = 0; rank < setup_->ranks; ++rank) {
    if (rank != setup_->lags) {
      eventsOn(rank, events);
    }
  }
  if (setup_->lags) {
    std::vector<Event> late;
    eventsOn(*setup_->lags, late);
    const bool idle = events.empty() && std::ranges::all_of(late, [](const Event& event) {
                        return event.kind == Event::Kind::kReady;
                      });
    std::ranges::copy_if(late, std::back_inserter(events), [idle](const Event& event) {
      return idle || event.kind != Event::Kind::kReady;
    });
  }
  return events;
}

void World::eventsOn(Rank rank, std::vector<Event>& events) const {
  const Node& node = *nodes_[static_cast<std::size_t>(rank)];
  if (node.dead) {
    return;
  }
  const auto add = [&](Event::Kind kind, ModelId model, std::uint32_t what) {
    events.push_back(
        {kind, static_cast<std::uint8_t>(model), static_cast<std::int16_t>(rank), what});
  };
  for (Rank from = 0; from < setup_->ranks; ++from) {
    if (underWay(from, rank)) {
      add(Event::Kind::kDeliver, 0, static_cast<std::uint32_t>(from));
    }
  }
  for (const Node::InFlight& slice : node.inFlight) {
    if (slice.place < issuedByAll()) {
      add(Event::Kind::kDone, slice.slice.model, slice.slice.index);
    }
  }
  for (ModelId model = 0; model < node.models.size(); ++model) {
    if (!node.models[model].registered && (!setup_->leavesPlan || node.leftPlan)) {
      add(Event::Kind::kRegister, model, model);
    }
    for (TensorId tensor = 0; tensor < node.models[model].ready.size(); ++tensor) {
      if (mayBeReady(node, model, tensor)) {
        add(Event::Kind::kReady, model, tensor);
      }
    }
  }
  if (node.decides) {
    add(Event::Kind::kDecide, 0, 0);
  }
  if (setup_->leavesPlan && !node.held) {
    add(Event::Kind::kHold, 0, 0);
  }
  if (setup_->leavesPlan && !node.leftPlan && heldByAll()) {
    add(Event::Kind::kEndPlan, 0, 0);
  }
  if (setup_->reserves && rank == 0 && node.reservations < 2) {
    add(Event::Kind::kReserve, 0, 0);
  }
  if (rank == setup_->dies) {
    add(Event::Kind::kDie, 0, 0);
  }
}

bool World::mayBeReady(const Node& node, ModelId model, TensorId tensor) const {
  const Node::Model& m = node.models[model];
  const std::uint8_t rounds = m.ready[tensor];
  if (!m.registered || rounds == setup_->steps) {
    return false;
  }
  const auto isDone = [&](SliceIndex slice) { return m.done[slice] == rounds; };
  const SliceLayout& layout = *(*layouts_)[model];
  if (!std::ranges::all_of(layout.slicesOf(tensor), isDone)) {
    return false;
  }
  // A step begins when the squares of the step before are done.
  if (layout.isSplit() && tensor != layout.squaresTensor() && !isDone(SliceLayout::kSquares)) {
    return false;
  }
  return !setup_->wholeSteps ||
      std::ranges::all_of(m.done, [rounds](std::uint8_t done) { return done >= rounds; });
}

bool World::underWay(Rank from, Rank to) const {
  return std::ranges::any_of(
      messages_, [=](const Message& m) { return m.from == from && m.to == to; });
}

std::size_t World::issuedByAll() const {
  return std::ranges::min(nodes_ | std::views::transform([](const auto& n) { return n->issued; }));
}

bool World::heldByAll() const {
  return std::ranges::all_of(nodes_, [](const auto& node) { return node->held.has_value(); });
}

// ------------------------------------------------------------------------ what happens

std::optional<Violation> World::apply(const Event& event) {
  auto& shared = nodes_[static_cast<std::size_t>(event.rank)];
  auto node = std::make_shared<Node>(*shared);
  decisions_.clear();
  std::optional<Violation> broken;
  try {
    broken = happen(*node, event);
  } catch (const std::exception& error) {
    broken = Violation{"error", error.what()};
  }
  hash(*node);
  shared = std::move(node);
  return broken;
}

std::optional<Violation> World::happen(Node& node, const Event& event) {
  switch (event.kind) {
    case Event::Kind::kDie:
      node.dead = true;
      return std::nullopt;
    case Event::Kind::kReady:
      return ready(node, {event.model, event.what});
    case Event::Kind::kDecide:
      node.decides = false;
      return decide(node);
    case Event::Kind::kRegister:
      registerModel(node, event.what);
      break;
    case Event::Kind::kHold:
      node.held = node.agreements.holdPlan();
      return std::nullopt;
    case Event::Kind::kEndPlan:
      endPlan(node);
      break;
    case Event::Kind::kReserve:
      node.agreements.current().reserve(++node.reservations == 1 ? kUnit : Scheduler::kAnySize);
      break;
    case Event::Kind::kDeliver:
      if (auto broken = deliver(node, static_cast<Rank>(event.what))) {
        return broken;
      }
      break;
    case Event::Kind::kDone:
      if (auto broken = done(node, {event.model, event.what})) {
        return broken;
      }
      break;
  }
  node.decides = setup_->decidesLater;
  return setup_->decidesLater ? std::nullopt : decide(node);
}

// As Engine::tensorReady: the engine decides only if a slice is ready and mayDecide says so.
std::optional<Violation> World::ready(Node& node, TensorKey tensor) {
  if (setup_->retuned && node.models[tensor.model].ready[tensor.tensor] == 1 && !node.retuned) {
    retune(node);
  }
  const auto before = timesReady(node, tensor.model);
  ++node.models[tensor.model].ready[tensor.tensor];
  const Slices& slices = node.agreements.current().tensorReady(tensor);
  if (!hasBecomeReady(node, tensor.model, before, slices)) {
    return Violation{"ready", "tensorReady names other slices than those that are ready now"};
  }
  if (!slices.empty() && node.agreements.current().mayDecide()) {
    node.decides = setup_->decidesLater;
    return setup_->decidesLater ? std::nullopt : decide(node);
  }
  Decisions missed;
  if (!node.decides) {
    AgreementSequence(node.agreements).decide(missed);
  }
  if (!missed.issue.empty() || !missed.messages.empty()) {
    return Violation{"mayDecide", "the engine would not decide, but there is something to decide"};
  }
  return std::nullopt;
}

/// How many times the slice has become ready on this rank: its tensors are, and in a split layout
/// the slices that it waits for are done.
std::uint8_t World::timesReady(const Node& node, SliceKey slice) const {
  const SliceLayout& layout = *(*layouts_)[slice.model];
  const Node::Model& model = node.models[slice.model];
  if (layout.slices()[slice.index].operation == Operation::kAllGather) {
    return model.done[slice.index - layout.pairs()];
  }
  std::uint8_t times = std::numeric_limits<std::uint8_t>::max();
  for (const TensorId tensor : layout.tensorsOf(slice.index)) {
    times = std::min(times, model.ready[tensor]);
  }
  for (SliceIndex sum = 1; slice.index == SliceLayout::kSquares && sum <= layout.pairs(); ++sum) {
    times = std::min(times, model.done[sum]);
  }
  return times;
}

/// By slice.
std::vector<std::uint8_t> World::timesReady(const Node& node, ModelId model) const {
  std::vector<std::uint8_t> times((*layouts_)[model]->slices().size());
  for (SliceIndex slice = 0; slice < times.size(); ++slice) {
    times[slice] = timesReady(node, {model, slice});
  }
  return times;
}

/// Whether an event has made those slices ready that the class names.
bool World::hasBecomeReady(
    const Node& node,
    ModelId model,
    const std::vector<std::uint8_t>& before,
    Slices named) const {
  std::ranges::sort(named, {}, &SliceKey::index);
  Slices expected;
  for (SliceIndex slice = 0; slice < before.size(); ++slice) {
    if (timesReady(node, {model, slice}) > before[slice]) {
      expected.push_back({model, slice});
    }
  }
  return named == expected;
}

void World::endPlan(Node& node) const {
  std::uint64_t most = 0;
  for (const auto& other : nodes_) {
    most = std::max(most, *other->held);
  }
  node.leftPlan = true;
  node.agreements.endPlan(most, AgreementKind::kLeader, Policy::kPriority);
}

void World::retune(Node& node) const {
  node.retuned = true;
  node.agreements.current().retune(setup_->retuned->policy, creditBytes(node));
}

ByteCount World::creditBytes(const Node& node) const {
  return kUnit * (node.retuned ? setup_->retuned->creditUnits : setup_->creditUnits);
}

std::optional<Violation> World::done(Node& node, SliceKey slice) {
  std::erase_if(node.inFlight, [slice](const auto& other) { return other.slice == slice; });
  Node::Model& model = node.models[slice.model];
  const SliceLayout& layout = *(*layouts_)[slice.model];
  const auto before = timesReady(node, slice.model);
  ++model.done[slice.index];
  std::vector<TensorKey> expected;
  for (const TensorId tensor : layout.tensorsOf(slice.index)) {
    if (std::ranges::all_of(layout.slicesOf(tensor), [&](SliceIndex part) {
          return model.done[part] == model.ready[tensor];
        })) {
      expected.push_back({slice.model, tensor});
    }
  }
  if (node.agreements.current().sliceDone(slice) != expected) {
    return Violation{
        "tensors", concat("after ", textOf(slice, *layouts_), ", other tensors are complete")};
  }
  if (!hasBecomeReady(
          node, slice.model, before, node.agreements.current().scheduler().becameReady())) {
    return Violation{
        "ready", concat("after ", textOf(slice, *layouts_), ", other slices are ready")};
  }
  return std::nullopt;
}

std::optional<Violation> World::deliver(Node& node, Rank from) {
  const auto message = std::ranges::find_if(
      messages_, [&](const Message& m) { return m.from == from && m.to == node.rank; });
  const Message taken = *message;
  messages_.erase(message);
  node.agreements.received(from, taken.number, *taken.slices);
  return checkHeard(node, *taken.slices);
}

// Rank 0 decides for a rank that it hears only what that rank has reported. It had perhaps offered
// a slice before, so this holds from the slice's second decision on. With two ranks it is clear
// from outside which message answers what; more ranks may pass messages on for each other.
std::optional<Violation> World::checkHeard(Node& node, const Slices& decided) const {
  if (setup_->agreement != AgreementKind::kLeader || setup_->ranks != 2 || node.rank == 0) {
    return std::nullopt;
  }
  if (decided.empty()) {
    node.heard = !node.heard;
    for (Node::Model& model : node.models) {
      std::ranges::fill(model.heard, 0);
    }
  }
  for (const SliceKey slice : decided) {
    Node::Model& model = node.models[slice.model];
    if (model.heard[slice.index] && timesReady(node, slice) <= model.issued[slice.index]) {
      return Violation{
          "heard",
          concat(textOf(slice, *layouts_), " is decided, but this rank has not reported it")};
    }
    model.heard[slice.index] = node.heard;
  }
  return std::nullopt;
}

std::optional<Violation> World::decide(Node& node) {
  node.agreements.decide(decisions_);
  for (const SliceMessage& message : decisions_.messages) {
    HVDO_CHECK(
        message.to >= 0 && message.to < setup_->ranks && message.to != node.rank,
        "message to rank ", message.to);
    messages_.push_back(
        {node.rank, message.to, node.agreements.number(),
         std::make_shared<const Slices>(message.slices)});
  }
  for (const SliceKey slice : decisions_.issue) {
    if (auto broken = issue(node, slice)) {
      return broken;
    }
  }
  return std::nullopt;
}

// Squares take no credit.
ByteCount World::creditTaken(SliceKey slice) const {
  const SliceLayout& layout = *(*layouts_)[slice.model];
  const bool isSquares = layout.isSplit() && slice.index == SliceLayout::kSquares;
  return isSquares ? 0 : layout.slices()[slice.index].sizeBytes;
}

std::optional<Violation> World::issue(Node& node, SliceKey slice) {
  const std::string name = textOf(slice, *layouts_);
  Node::Model& model = node.models[slice.model];
  ++model.issued[slice.index];
  if (timesReady(node, slice) != model.issued[slice.index]) {
    return Violation{"once", concat(name, " is not ready, or was issued before")};
  }
  ByteCount bytes = creditTaken(slice);
  for (const Node::InFlight& other : node.inFlight) {
    bytes += creditTaken(other.slice);
  }
  node.inFlight.push_back({slice, node.issued});
  if (bytes > creditBytes(node)) {
    return Violation{"credit", concat(bytes / kUnit, " units are in flight with ", name)};
  }
  if (node.reservations == 1 && creditTaken(slice) > kUnit) {
    return Violation{"reservation", concat(name, " starts although the link is reserved")};
  }
  if (bytes != node.agreements.current().scheduler().inFlightBytes() &&
      slice == decisions_.issue.back()) {
    return Violation{"credit", "the scheduler counts other bytes in flight"};
  }
  if (node.issued == order_.size()) {
    order_.push_back(slice);
    if (setup_->agreement == AgreementKind::kNegotiated && !readyOnAll(node, slice)) {
      return Violation{"negotiated", concat(name, " is decided, but not ready on every rank")};
    }
  } else if (order_[node.issued] != slice) {
    return Violation{
        "order",
        concat(
            "rank ", node.rank, " issues ", name, " where another rank issued ",
            textOf(order_[node.issued], *layouts_))};
  }
  ++node.issued;
  return std::nullopt;
}

/// Whether the slice, which `node` issues, was ready on the other ranks as often as there.
bool World::readyOnAll(const Node& node, SliceKey slice) const {
  const std::uint8_t round = node.models[slice.model].issued[slice.index];
  return std::ranges::all_of(nodes_, [&](const auto& other) {
    return other->rank == node.rank || timesReady(*other, slice) >= round;
  });
}

// ------------------------------------------------------------------------ what must hold

std::optional<Violation> World::checkEnd() const {
  const auto dead = [](const auto& node) { return node->dead; };
  if (std::ranges::any_of(nodes_, dead)) {
    return std::nullopt; // the engine's failure ends the job; until then the order has held
  }
  for (const auto& node : nodes_) {
    for (ModelId model = 0; model < node->models.size(); ++model) {
      const std::vector<std::uint8_t>& done = node->models[model].done;
      for (SliceIndex slice = 0; slice < done.size(); ++slice) {
        if (done[slice] != setup_->steps) {
          return Violation{
              "complete",
              concat(
                  "nothing can happen any more, but rank ", node->rank, " has finished ",
                  textOf({model, slice}, *layouts_), ' ', int{done[slice]}, " times")};
        }
      }
    }
  }
  return std::nullopt;
}

} // namespace hvd_order::checker
