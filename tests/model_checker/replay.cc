#include "replay.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "visited.h"

// Finds when each message arrived and each rank decided, which a timeline does not tell.
//
// The ranks of a recording share a clock, so its marks have one order. Readiness and ends happen in
// that order. Between two marks, any message may arrive and any rank that has to may decide: a
// depth-first search places these events, first as early as possible. A place is wrong if a rank
// then issues another slice than the recording has next, or has not issued a slice when the
// recording says that it had. States that led nowhere are remembered.
//
// A slice is marked as issued a little after the rank decided it, so being decided early is right.

namespace hvd_order::checker {

namespace {

class Replay final {
 public:
  explicit Replay(const Recording& recording)
      : recording_(recording), layouts_(layoutsOf(recording.setup)) {
    for (const Recording::Mark& mark : recording.marks) {
      if (mark.kind == 'i' && mark.rank == 0) {
        order_.push_back({0, mark.slice});
      }
    }
  }

  Replayed run() {
    stack_.push_back(frameOf(World(recording_.setup, layouts_), {}));
    while (!stack_.empty() && !result_.same && !result_.violation) {
      Frame& frame = stack_.back();
      if (frame.tried < frame.events.size()) {
        place(frame, frame.events[frame.tried++]);
      } else if (!frame.isLast) {
        frame.isLast = true;
        pass(frame);
      } else {
        stack_.pop_back();
      }
    }
    return result_;
  }

 private:
  struct Progress {
    std::size_t mark = 0; // the next one
    std::size_t messages = 0;
    std::size_t questions = 0;
  };
  struct Frame {
    World world;
    Progress progress;
    std::vector<Event> events; // that may happen before the mark
    std::size_t tried = 0;
    bool isLast = false; // the mark has been tried too
  };

  Frame frameOf(World world, const Progress& progress) {
    std::vector<Event> events = world.events();
    std::erase_if(events, [](const Event& event) {
      return event.kind != Event::Kind::kDeliver && event.kind != Event::Kind::kDecide;
    });
    result_.reached = std::max(result_.reached, progress.mark);
    return {std::move(world), progress, std::move(events)};
  }

  void place(const Frame& frame, const Event& event) {
    World world = frame.world;
    ++result_.tried;
    result_.violation = world.apply(event);
    Progress progress = frame.progress;
    for (const SliceMessage& message : world.decisions().messages) {
      ++progress.messages;
      progress.questions += message.slices.empty() ? 1 : 0;
    }
    const Slices& issued = world.order();
    const bool asRecorded =
        issued.size() <= order_.size() && std::equal(issued.begin(), issued.end(), order_.begin());
    if (asRecorded && !result_.violation) {
      arrive(std::move(world), progress);
    }
  }

  void pass(const Frame& frame) {
    Progress progress = frame.progress;
    if (progress.mark == recording_.marks.size()) {
      if (frame.events.empty()) { // every message has arrived
        result_.violation = frame.world.checkEnd();
        result_.same = !result_.violation;
        result_.messages = progress.messages;
        result_.questions = progress.questions;
      }
      return;
    }
    World world = frame.world;
    if (happens(world, recording_.marks[progress.mark++])) {
      arrive(std::move(world), progress);
    }
  }

  // The mark belongs to the state: marks of slices issued change nothing else.
  void arrive(World world, const Progress& progress) {
    const std::uint64_t mark = 0x9e3779b97f4a7c15U * (progress.mark + 1);
    if (visited_.insert(world.fingerprint() ^ mark)) {
      stack_.push_back(frameOf(std::move(world), progress));
    }
  }

  /// @return whether the mark fits the world, which it changes.
  bool happens(World& world, const Recording::Mark& mark) {
    const Node& node = world.node(mark.rank);
    const SliceKey slice{0, mark.slice};
    if (mark.kind == 'i') {
      return node.models[0].issued[mark.slice] > node.models[0].done[mark.slice];
    }
    if (mark.kind == 'd') {
      return apply(world, eventOf(Event::Kind::kDone, mark.rank, mark.slice));
    }
    // The other parts of a large tensor became ready with the first, whose mark came before.
    const std::uint8_t round = node.models[0].done[slice.index] + 1;
    for (const TensorId tensor : layouts_[0]->tensorsOf(slice.index)) {
      if (world.node(mark.rank).models[0].ready[tensor] < round &&
          !apply(world, eventOf(Event::Kind::kReady, mark.rank, tensor))) {
        return false;
      }
    }
    return true;
  }

  static Event eventOf(Event::Kind kind, Rank rank, std::uint32_t what) {
    return {kind, 0, static_cast<std::int16_t>(rank), what};
  }

  bool apply(World& world, const Event& event) {
    const std::vector<Event> events = world.events();
    if (std::ranges::find(events, event) == events.end()) {
      return false;
    }
    ++result_.tried;
    result_.violation = world.apply(event);
    return !result_.violation;
  }

  const Recording& recording_;
  const Layouts layouts_;
  Slices order_; // as recorded on rank 0
  Visited visited_;
  std::vector<Frame> stack_;
  Replayed result_;
};

AgreementKind agreementOf(const std::string& name) {
  const std::map<std::string, AgreementKind> kinds{
      {"leader", AgreementKind::kLeader},
      {"negotiated", AgreementKind::kNegotiated},
      {"planned", AgreementKind::kPlanned}};
  return kinds.at(name);
}

Policy policyOf(const std::string& name) {
  const std::map<std::string, Policy> policies{
      {"arrival", Policy::kArrival},
      {"priority", Policy::kPriority},
      {"planned", Policy::kPlanned}};
  return policies.at(name);
}

// "leader priority ranks 2 credit 2 slice 1 tensors 1 2 1 plan 0 1 2"; sizes in units.
Setup readSetup(std::istream& in) {
  Setup setup{.models = {TensorSet{}}, .hearing = {}, .decidesLater = true};
  std::string agreement;
  std::string policy;
  in >> agreement >> policy;
  setup.agreement = agreementOf(agreement);
  setup.policy = policyOf(policy);
  std::string key;
  for (std::string word; in >> word;) {
    const bool isNumber = word.find_first_not_of("0123456789") == std::string::npos;
    key = isNumber ? key : word;
    const int number = isNumber ? std::stoi(word) : 0;
    if (!isNumber) {
      continue;
    }
    if (key == "ranks") {
      setup.ranks = number;
    } else if (key == "credit") {
      setup.creditUnits = number;
    } else if (key == "slice") {
      setup.models[0].sliceUnits = number;
    } else if (key == "tensors") {
      setup.models[0].tensorUnits.push_back(number);
    } else if (key == "plan") {
      setup.models[0].plan.push_back(static_cast<SliceIndex>(number));
    } else {
      throw InvalidUsage("unknown word " + key);
    }
  }
  return setup;
}

Recording::Mark markOf(const std::string& word) {
  std::istringstream in(word);
  Recording::Mark mark{};
  if (!(in >> mark.rank >> mark.kind >> mark.slice) ||
      std::string("rid").find(mark.kind) == std::string::npos) {
    throw InvalidUsage("'" + word + "' is no mark");
  }
  return mark;
}

} // namespace

Recording readRecording(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    throw InvalidUsage("cannot read " + path);
  }
  std::istringstream description(line);
  Recording recording{.setup = readSetup(description)};
  int first = 0; // rounds of slice 0 on rank 0
  for (std::string word; file >> word;) {
    const Recording::Mark mark = markOf(word);
    first += mark.kind == 'r' && mark.rank == 0 && mark.slice == 0 ? 1 : 0;
    recording.marks.push_back(mark);
  }
  recording.setup.steps = first;
  return recording;
}

Replayed replay(const Recording& recording) {
  return Replay(recording).run();
}

} // namespace hvd_order::checker
