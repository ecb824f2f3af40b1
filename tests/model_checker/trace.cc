#include "trace.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace hvd_order::checker {

namespace {

constexpr int kEventWidth = 34;

std::string listOf(const Slices& slices, const Layouts& layouts) {
  std::string text;
  for (const SliceKey slice : slices) {
    text += ' ' + layouts[slice.model]->sliceName(slice.index);
  }
  return text.empty() ? " (empty)" : text;
}

std::string textOf(const World& world, const Event& event) {
  const Layouts& layouts = world.layouts();
  switch (event.kind) {
    case Event::Kind::kRegister:
      return "registers model " + std::to_string(event.what);
    case Event::Kind::kReady:
      return layouts[event.model]->tensors()[event.what].name + " is ready";
    case Event::Kind::kDeliver: {
      const auto message = std::ranges::find_if(world.messages(), [&](const Message& m) {
        return m.to == event.rank && m.from == static_cast<Rank>(event.what);
      });
      return "hears rank " + std::to_string(event.what) + ':' + listOf(*message->slices, layouts);
    }
    case Event::Kind::kDone:
      return layouts[event.model]->sliceName(event.what) + " is summed";
    case Event::Kind::kDecide:
      return "decides";
    case Event::Kind::kHold:
      return "holds the plan";
    case Event::Kind::kEndPlan:
      return "learns where the plan ends";
    case Event::Kind::kReserve:
      return world.node(event.rank).reservations == 0 ? "reserves the link" : "frees the link";
    case Event::Kind::kDie:
      return "dies";
  }
  return "";
}

std::string textOf(const Decisions& decisions, const Layouts& layouts) {
  std::string text;
  for (const SliceMessage& message : decisions.messages) {
    text +=
        "tells rank " + std::to_string(message.to) + ':' + listOf(message.slices, layouts) + "; ";
  }
  if (!decisions.issue.empty()) {
    text += "issues" + listOf(decisions.issue, layouts);
  }
  return text;
}

} // namespace

std::string
textOf(const Setup& setup, const std::vector<Event>& trace, const Violation& violation) {
  const Layouts layouts = layoutsOf(setup);
  World world(setup, layouts);
  std::ostringstream out;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const std::string event = textOf(world, trace[i]);
    world.apply(trace[i]);
    out << std::right << std::setw(4) << i + 1 << "  rank " << trace[i].rank << "  " << std::left
        << std::setw(kEventWidth) << event << textOf(world.decisions(), layouts) << '\n';
  }
  out << "      " << violation.property << ": " << violation.detail << '\n';
  return out.str();
}

} // namespace hvd_order::checker
