#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "event.h"
#include "setup.h"

namespace hvd_order::checker {

using Slices = std::vector<SliceKey>;
using Layouts = std::vector<std::shared_ptr<const SliceLayout>>; // by model

/// A broken property; README.md lists the properties.
struct Violation {
  std::string property;
  std::string detail;
};

/// A message under way.
struct Message {
  Rank from;
  Rank to;
  std::uint32_t number; // of the sender's agreement
  std::shared_ptr<const Slices> slices;
};

/// One rank: its real agreements, and a plain account of what has happened to it, kept without help
/// of the classes under test.
struct Node {
  struct InFlight {
    SliceKey slice;
    std::size_t place; // in the order of issue
  };
  struct Model {
    bool registered = false;
    std::vector<std::uint8_t> ready;  // by tensor: number of times it became ready
    std::vector<std::uint8_t> issued; // by slice
    std::vector<std::uint8_t> done;   // by slice
    std::vector<std::uint8_t> heard;  // by slice: decided by rank 0 since it hears this rank
  };

  Rank rank;
  AgreementSequence agreements;
  std::vector<Model> models;
  std::size_t issued = 0;         // number of slices
  std::vector<InFlight> inFlight; // in order of issue
  bool decides = false;           // has to decide (Setup::decidesLater)
  int reservations = 0;           // begun and ended, counted separately
  bool retuned = false;
  std::optional<std::uint64_t> held; // slices issued when the rank held the plan
  bool leftPlan = false;             // the rank knows where the plan ends
  bool dead = false;
  bool heard = false;     // rank 0 has answered that it hears this rank
  std::uint64_t hash = 0; // of all above except `issued` and places
};

/// All ranks of a setup, and the messages under way, at one time.
///
/// A copy shares the ranks' states: `apply` copies only that of the rank on which the event
/// happens. Every event happens on one rank, takes at most the oldest message of one sender, and
/// appends messages; so events on two ranks can change places (search.h uses this).
class World final {
 public:
  explicit World(const Setup& setup, const Layouts& layouts);

  /// Events that can happen now.
  [[nodiscard]] std::vector<Event> events() const;
  /// Lets an enabled event happen. @return the property that it breaks.
  std::optional<Violation> apply(const Event& event);
  /// The property that is broken if no event can happen.
  [[nodiscard]] std::optional<Violation> checkEnd() const;
  /// Equal for states with the same future. 64 bits: two states of a search of ten million differ
  /// but look alike with a probability of three in a million.
  [[nodiscard]] std::uint64_t fingerprint() const;

  /// What the last `apply` decided.
  [[nodiscard]] const Decisions& decisions() const {
    return decisions_;
  }
  [[nodiscard]] const Node& node(Rank rank) const {
    return *nodes_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] const std::vector<Message>& messages() const {
    return messages_;
  }
  [[nodiscard]] bool underWay(Rank from, Rank to) const;
  /// Number of slices that every rank has issued.
  [[nodiscard]] std::size_t issuedByAll() const;
  /// Whether every rank has held the plan (Setup::leavesPlan).
  [[nodiscard]] bool heldByAll() const;
  /// The slices that ranks have issued, in the common order.
  [[nodiscard]] const Slices& order() const {
    return order_;
  }
  [[nodiscard]] const Setup& setup() const {
    return *setup_;
  }
  [[nodiscard]] const Layouts& layouts() const {
    return *layouts_;
  }

 private:
  void eventsOn(Rank rank, std::vector<Event>& events) const;
  [[nodiscard]] bool mayBeReady(const Node& node, ModelId model, TensorId tensor) const;
  std::optional<Violation> happen(Node& node, const Event& event);
  std::optional<Violation> ready(Node& node, TensorKey tensor);
  [[nodiscard]] std::uint8_t timesReady(const Node& node, SliceKey slice) const;
  [[nodiscard]] std::vector<std::uint8_t> timesReady(const Node& node, ModelId model) const;
  [[nodiscard]] bool hasBecomeReady(
      const Node& node,
      ModelId model,
      const std::vector<std::uint8_t>& before,
      Slices named) const;
  void retune(Node& node) const;
  void endPlan(Node& node) const;
  [[nodiscard]] ByteCount creditBytes(const Node& node) const;
  [[nodiscard]] ByteCount creditTaken(SliceKey slice) const;
  std::optional<Violation> done(Node& node, SliceKey slice);
  std::optional<Violation> deliver(Node& node, Rank from);
  [[nodiscard]] std::optional<Violation> checkHeard(Node& node, const Slices& decided) const;
  void registerModel(Node& node, ModelId model) const;
  std::optional<Violation> decide(Node& node);
  std::optional<Violation> issue(Node& node, SliceKey slice);
  [[nodiscard]] bool readyOnAll(const Node& node, SliceKey slice) const;
  void hash(Node& node) const;

  const Setup* setup_;
  const Layouts* layouts_;
  std::vector<std::shared_ptr<const Node>> nodes_;
  std::vector<Message> messages_; // of each pair of ranks in the order in which they were sent
  Slices order_;
  Decisions decisions_;
};

/// @return the layouts of the setup's models.
Layouts layoutsOf(const Setup& setup);

} // namespace hvd_order::checker
