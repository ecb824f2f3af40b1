#include "planning/sampled/sampled_training.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "planning/sampled/applied_pushes.h"
#include "planning/sampled/bounded_delay.h"
#include "planning/sampled/slots.h"
#include "planning/sampled/step_tables.h"
#include "planning/sampled/training_check.h"
#include "planning/sampled/worker_steps.h"

// A pull's path: asked for (`ask`) -> the server may answer (applied_pushes.h), else it waits in
// `held_` -> prepared by the server's end -> on the connection -> received by the worker's end ->
// the op ends. A push's path: prepared -> on the connection -> received -> the server's queue ->
// applied (`applied`), which may release pulls that are held.
//
// With a delay bound a push first asks (`kAsking`), and the rules of bounded_delay.h let it go, to
// the owner or to a helper. What goes from server to server, a helper's sum or the owner's answer
// to it, is a Relay: it uses the outgoing link of one and the incoming link of the other, in the
// connections of both directions, and is there when both are done with it.
//
// The stages off the connection are entries of `stages_`; a stage without a duration costs no
// event. Rates are computed once for all events of one moment, before time goes on.

namespace hvd_order::simulate {

namespace {

struct Stage {
  enum class Kind : std::uint8_t {
    kAsked,
    kPrepared,
    kArrived,
    kReceived,
    kApplied,
    // With a delay bound:
    kAsking,
    kAdmitted,
    kSummed,
    kRelayed,
    kRelayReceived,
  };
  Kind kind;
  bool isPull;
  Transfer transfer;
};

/// A sum, or the answer to one, between two servers. It takes no time of its sender's end.
struct Relay {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  bool isAnswer = false;
  std::vector<Transfer> answers; // that the helper sends on
  std::uint32_t linksToGo = 2;
};

class Simulation final : private WorkerSteps::TransferListener,
                         private BoundedDelay::AdmissionListener {
 public:
  Simulation(const SampledStep& step, const SampledTraining& training)
      : step_(step),
        training_(training),
        size_(static_cast<std::uint32_t>(training.slowness.size())),
        pulls_(
            size_,
            training.servers,
            training.workerBytesPerS,
            training.serverBytesPerS,
            training.pull,
            clock_,
            training.aggregates ? training.servers : 0),
        pushes_(
            size_,
            training.servers,
            training.workerBytesPerS,
            training.serverBytesPerS,
            training.push,
            clock_,
            training.aggregates ? training.servers : 0),
        tables_(step, training),
        workers_(
            step,
            training,
            tables_,
            clock_,
            static_cast<WorkerSteps::TransferListener&>(*this),
            result_),
        applied_(training, step.tensorBytes().size()),
        preparedFreeS_(
            2 * std::size_t{size_ + (training.aggregates ? training.servers : 0)} *
            training.servers),
        receivedFreeS_(preparedFreeS_.size()),
        laneFreeS_(training.servers, std::vector<double>(training.updateLanes)),
        held_(step.tensorBytes().size()) {
    result_.updateBusyS.resize(training.servers);
    if (training.delayBound) {
      delay_.emplace(
          training, tables_, clock_, step, static_cast<BoundedDelay::AdmissionListener&>(*this));
    }
  }

  SampledResult run() {
    workers_.announceStarts();
    while (workers_.isUnderWay()) {
      advance();
    }
    result_.endS = clock_.nowS();
    result_.longestDelay = delay_ ? delay_->longestDelay() : 0;
    for (std::uint32_t server = 0; server < training_.servers; ++server) {
      result_.pullBusyS.push_back(pulls_.busyS(server));
      result_.pushBusyS.push_back(pushes_.busyS(server));
    }
    return std::move(result_);
  }

 private:
  // Turns end before what else happens at that moment, so what they send on can go on with it.
  void advance() {
    for (Connections* way : {&pulls_, &pushes_}) {
      const bool moves = !clock_.empty() && clock_.nextS() <= clock_.nowS();
      if (way->hasTurnsToBegin() && !moves && way->nextEndS() > clock_.nowS()) {
        way->beginTurns();
      }
    }
    Connections& way = pulls_.nextEndS() <= pushes_.nextEndS() ? pulls_ : pushes_;
    const double endS = way.nextEndS();
    if (endS == NextEnd::kNever && clock_.empty()) {
      throw InvalidUsage("the training comes to a standstill: " + workers_.whatWaits());
    }
    if (clock_.empty() || clock_.nextS() >= endS) {
      clock_.moveTo(endS);
      endTurn(way);
    } else if (const auto event = clock_.advance(endS)) {
      handle(*event);
    }
  }

  void endTurn(Connections& way) {
    const Transfer* const transfer = way.endTurn();
    if (transfer == nullptr) {
      return;
    }
    if (transfer->worker >= size_) {
      return relaySent(*transfer);
    }
    if (&way == &pulls_) {
      sent<true>(*transfer);
    } else {
      sent<false>(*transfer);
    }
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case EventKind::kWorkerBegins:
        workers_.begin(event.a);
        return;
      case EventKind::kTaskEnd:
        workers_.taskEnded(event.a, event.b);
        return;
      case EventKind::kStageEnd: {
        const Stage stage = stages_.take(event.a);
        if (stage.isPull) {
          stageEnded<true>(stage);
        } else {
          stageEnded<false>(stage);
        }
        return;
      }
      default:
        HVDO_CHECK(false, "an event of another simulation");
    }
  }

  // ---- what workers want ----

  void wantsPull(const Transfer& pull) override {
    enter<Stage::Kind::kAsked, true>(pull, training_.pull.latencyS);
  }

  void wantsPush(const Transfer& push) override {
    if (delay_) {
      enter<Stage::Kind::kAsking, false>(push, training_.push.latencyS);
    } else {
      prepare<false>(push);
    }
  }

  // ---- transfers ----

  template <bool kIsPull>
  [[nodiscard]] const Transmission& way() const {
    return kIsPull ? training_.pull : training_.push;
  }

  template <bool kIsPull>
  [[nodiscard]] std::size_t endOf(const Transfer& transfer) const {
    return (std::size_t{transfer.worker} * training_.servers + transfer.server) * 2 +
        (kIsPull ? 0 : 1);
  }

  /// A stage begins. Most last no time, so what follows is known when this is compiled.
  template <Stage::Kind kKind, bool kIsPull>
  void enter(const Transfer& transfer, double seconds) {
    if (seconds <= 0) {
      over<kKind, kIsPull>(transfer);
      return;
    }
    clock_.announce(seconds, EventKind::kStageEnd, stages_.put({kKind, kIsPull, transfer}));
  }

  /// Seconds until an end that works on one transfer after the other is done with this one.
  double queued(double& freeS, double seconds) const {
    if (seconds > 0) {
      freeS = std::max(freeS, clock_.nowS()) + seconds;
      return freeS - clock_.nowS();
    }
    return 0;
  }

  template <bool kIsPull>
  void prepare(const Transfer& transfer) {
    const double seconds =
        way<kIsPull>().sendSeconds + way<kIsPull>().sendSecondsPerByte * transfer.leftBytes;
    enter<Stage::Kind::kPrepared, kIsPull>(
        transfer, queued(preparedFreeS_[endOf<kIsPull>(transfer)], seconds));
  }

  template <bool kIsPull>
  void sent(const Transfer& transfer) {
    if (transfer.worker == 0 && transfer.step < training_.recorded) {
      result_.transfers.push_back(
          {kIsPull, transfer.tensor, transfer.step, transfer.startS, clock_.nowS()});
    }
    if (!kIsPull && training_.stepEnd == SampledStepEnd::kPushed) {
      endPush(transfer);
    }
    // A pull's latency is that of its request, or of its answer.
    const bool late = !kIsPull || training_.pullStart == PullStart::kAnswer;
    enter<Stage::Kind::kArrived, kIsPull>(transfer, late ? way<kIsPull>().latencyS : 0);
  }

  template <bool kIsPull>
  void arrived(const Transfer& transfer) {
    const double bytes = static_cast<double>(step_.tensorBytes()[transfer.tensor]);
    const double seconds =
        way<kIsPull>().receiveSeconds + way<kIsPull>().receiveSecondsPerByte * bytes;
    enter<Stage::Kind::kReceived, kIsPull>(
        transfer, queued(receivedFreeS_[endOf<kIsPull>(transfer)], seconds));
  }

  void endPush(const Transfer& transfer) {
    workers_.transferEnded(transfer.worker, step_.pushOf(transfer.tensor));
  }

  template <bool kIsPull>
  void stageEnded(const Stage& stage) {
    switch (stage.kind) {
      case Stage::Kind::kAsked:
        return over<Stage::Kind::kAsked, kIsPull>(stage.transfer);
      case Stage::Kind::kPrepared:
        return over<Stage::Kind::kPrepared, kIsPull>(stage.transfer);
      case Stage::Kind::kArrived:
        return over<Stage::Kind::kArrived, kIsPull>(stage.transfer);
      case Stage::Kind::kReceived:
        return over<Stage::Kind::kReceived, kIsPull>(stage.transfer);
      case Stage::Kind::kApplied:
        return over<Stage::Kind::kApplied, kIsPull>(stage.transfer);
      case Stage::Kind::kAsking:
        return over<Stage::Kind::kAsking, kIsPull>(stage.transfer);
      case Stage::Kind::kAdmitted:
        return over<Stage::Kind::kAdmitted, kIsPull>(stage.transfer);
      case Stage::Kind::kSummed:
        return over<Stage::Kind::kSummed, kIsPull>(stage.transfer);
      case Stage::Kind::kRelayed:
        return over<Stage::Kind::kRelayed, kIsPull>(stage.transfer);
      case Stage::Kind::kRelayReceived:
        return over<Stage::Kind::kRelayReceived, kIsPull>(stage.transfer);
    }
  }

  template <Stage::Kind kKind, bool kIsPull>
  void over(const Transfer& transfer) {
    if constexpr (kKind == Stage::Kind::kAsked) {
      ask(transfer);
    } else if constexpr (kKind == Stage::Kind::kPrepared) {
      (kIsPull ? pulls_ : pushes_).enqueue(transfer);
    } else if constexpr (kKind == Stage::Kind::kArrived) {
      arrived<kIsPull>(transfer);
    } else if constexpr (kKind == Stage::Kind::kReceived) {
      kIsPull ? pulled(transfer) : received(transfer);
    } else if constexpr (kKind == Stage::Kind::kApplied) {
      applied(transfer);
    } else if constexpr (kKind == Stage::Kind::kAsking) {
      delay_->ask(transfer);
    } else if constexpr (kKind == Stage::Kind::kAdmitted) {
      prepare<false>(transfer);
    } else if constexpr (kKind == Stage::Kind::kSummed) {
      relay(transfer, {transfer.server, tables_.serverOf[transfer.tensor]});
    } else if constexpr (kKind == Stage::Kind::kRelayed) {
      relayArrived(transfer);
    } else {
      relayReceived(transfer);
    }
  }

  void pulled(const Transfer& transfer) {
    if (delay_) {
      delay_->reads(transfer.tensor, transfer.worker);
    }
    workers_.pulled(transfer);
  }

  // ---- the servers ----

  void ask(const Transfer& pull) {
    if (applied_.mayAnswer(pull)) {
      if (delay_) {
        delay_->answers(pull.tensor, pull.worker);
      }
      prepare<true>(pull);
    } else {
      held_[pull.tensor].push_back(pull);
    }
  }

  void received(const Transfer& push) {
    if (!applied_.came(push)) {
      return;
    }
    if (push.server != tables_.serverOf[push.tensor]) {
      ++result_.aggregatedUpdates;
      if (delay_->partCame(push.tensor)) {
        work<Stage::Kind::kSummed>(push, push.server);
      }
      return;
    }
    if (delay_) {
      delay_->came(push.tensor);
    }
    work<Stage::Kind::kApplied>(push, push.server);
  }

  /// A server sums or updates, one tensor after the other in each of its lanes.
  template <Stage::Kind kKind>
  void work(const Transfer& push, std::uint32_t server) {
    const double bytes = static_cast<double>(step_.tensorBytes()[push.tensor]);
    const double seconds = training_.updateSeconds + training_.updateSecondsPerByte * bytes;
    auto& lanes = laneFreeS_[server];
    result_.updateBusyS[server] += seconds;
    enter<kKind, false>(push, queued(*std::min_element(lanes.begin(), lanes.end()), seconds));
  }

  void applied(const Transfer& push) {
    if (delay_) {
      return appliedInTime(push.tensor);
    }
    const bool sync = training_.mode == ServerMode::kSync;
    const std::uint32_t first = sync ? 0 : push.worker;
    const std::uint32_t last = sync ? size_ : push.worker + 1;
    for (std::uint32_t worker = first; worker < last; ++worker) {
      applied_.count(push.tensor, worker);
    }
    askAgain(push.tensor);
    for (std::uint32_t worker = first; worker < last; ++worker) {
      Transfer own = push;
      own.worker = worker;
      if (training_.pullStart == PullStart::kAnswer &&
          step_.pullOf(push.tensor) != SampledStep::kNone) {
        ask(answerTo(own));
      }
      if (training_.stepEnd == SampledStepEnd::kUpdated) {
        endPush(own);
      }
    }
  }

  void askAgain(TensorId tensor) {
    for (const Transfer& pull : std::exchange(held_[tensor], {})) {
      ask(pull);
    }
  }

  /// The parameter that a worker gets once its push has been applied.
  [[nodiscard]] Transfer answerTo(const Transfer& push) const {
    Transfer answer = workers_.transferOf(push.worker, step_.pullOf(push.tensor));
    answer.step = applied_.of(push.tensor, push.worker);
    return answer;
  }

  // ---- bounded delay ----

  void admitted(const Transfer& push) override {
    enter<Stage::Kind::kAdmitted, false>(push, training_.pull.latencyS);
  }

  void tooLate(const Transfer& push) override {
    ++result_.lateUpdates;
    made(push);
    ask(answerTo(push));
    endLatePush(push);
  }

  /// A worker's update counts as made; pulls that waited for it may go.
  void made(const Transfer& push) {
    applied_.count(push.tensor, push.worker);
    askAgain(push.tensor);
  }

  void endLatePush(const Transfer& push) {
    if (training_.stepEnd != SampledStepEnd::kComputed) {
      endPush(push);
    }
  }

  /// The owner has applied an update, or the sum of several.
  void appliedInTime(TensorId tensor) {
    const std::vector<Transfer> pushes = delay_->applied(tensor);
    for (const Transfer& push : pushes) {
      made(push);
    }
    answer(tensor, pushes);
    if (training_.stepEnd == SampledStepEnd::kUpdated) {
      for (const Transfer& push : pushes) {
        endPush(push);
      }
    }
    delay_->proceed(tensor);
  }

  /// Answers the workers, by their helper if all of them may be answered now.
  void answer(TensorId tensor, const std::vector<Transfer>& pushes) {
    std::vector<Transfer> answers;
    answers.reserve(pushes.size());
    for (const Transfer& push : pushes) {
      answers.push_back(answerTo(push));
    }
    const std::uint32_t owner = tables_.serverOf[tensor];
    const std::uint32_t helper = pushes.front().server;
    const bool all = std::ranges::all_of(
        answers, [&](const Transfer& pull) { return applied_.mayAnswer(pull); });
    if (helper == owner || !all) {
      for (const Transfer& pull : answers) {
        ask(pull);
      }
      return;
    }
    for (Transfer& pull : answers) {
      delay_->answers(tensor, pull.worker);
      pull.server = helper;
    }
    relay(pushes.front(), {owner, helper, /*isAnswer=*/true, answers});
  }

  void relay(const Transfer& of, Relay relay) {
    const auto [from, to] = std::pair(relay.from, relay.to);
    Transfer transfer = of;
    transfer.step = relays_.put(std::move(relay));
    transfer.leftBytes = static_cast<double>(step_.tensorBytes()[of.tensor]);
    transfer.worker = size_ + to;
    transfer.server = from;
    pulls_.enqueue(transfer);
    transfer.worker = size_ + from;
    transfer.server = to;
    pushes_.enqueue(transfer);
  }

  void relaySent(const Transfer& sent) {
    Relay& relay = relays_[sent.step];
    if (--relay.linksToGo > 0) {
      return;
    }
    Transfer transfer = sent;
    transfer.worker = size_ + relay.from;
    transfer.server = relay.to;
    enter<Stage::Kind::kRelayed, false>(transfer, training_.push.latencyS);
  }

  void relayArrived(const Transfer& transfer) {
    const double bytes = static_cast<double>(step_.tensorBytes()[transfer.tensor]);
    const double seconds =
        training_.push.receiveSeconds + training_.push.receiveSecondsPerByte * bytes;
    enter<Stage::Kind::kRelayReceived, false>(
        transfer, queued(receivedFreeS_[endOf<false>(transfer)], seconds));
  }

  void relayReceived(const Transfer& transfer) {
    const Relay relay = relays_.take(transfer.step);
    if (relay.isAnswer) {
      for (const Transfer& pull : relay.answers) {
        prepare<true>(pull);
      }
      return;
    }
    delay_->came(transfer.tensor);
    work<Stage::Kind::kApplied>(transfer, transfer.server);
  }

  const SampledStep& step_;
  const SampledTraining& training_;
  const std::uint32_t size_;
  Clock clock_;
  Connections pulls_;
  Connections pushes_;
  const StepTables tables_;
  SampledResult result_{};
  WorkerSteps workers_;
  std::optional<BoundedDelay> delay_;
  Slots<Relay> relays_;
  Slots<Stage> stages_;
  AppliedPushes applied_;
  std::vector<double> preparedFreeS_; // by connection and direction: when its sender is free
  std::vector<double> receivedFreeS_;
  std::vector<std::vector<double>> laneFreeS_; // by server
  std::vector<std::vector<Transfer>> held_;    // by tensor: pulls that must wait
};

} // namespace

SampledResult simulateSampled(const SampledStep& step, const SampledTraining& training) {
  checkTraining(step, training);
  return Simulation(step, training).run();
}

} // namespace hvd_order::simulate
