#include "simulate/sampled/sampled_training.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "base/error.h"
#include "simulate/sampled/bounded_delay.h"
#include "simulate/sampled/random.h"
#include "simulate/sampled/step_tables.h"
#include "simulate/sampled/training_check.h"

// A pull's path: asked for (`ask`) -> the server may answer (`mayAnswer`), else it waits in
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
// event. Rates are settled once for all events of one moment, before time goes on.
//
// Invariant: `rounds_` counts, for each tensor and worker, the pushes that a server has applied;
// with ServerMode::kSync all workers of a tensor have one number.

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

struct Stream {
  bool busy = false;
  std::size_t next = 0; // ComputeOrder::kProgram: place of the next op
  std::priority_queue<OpIndex, std::vector<OpIndex>, std::greater<>> ready;
  OpIndex running = 0;
};

struct Worker {
  std::uint32_t step = 0;
  std::size_t sample = 0;
  std::size_t toGo = 0; // ops of the step that have not ended
  std::vector<std::uint32_t> inputsToGo;
  std::vector<bool> ready; // ComputeOrder::kProgram
  std::vector<Stream> streams;
  std::vector<std::uint32_t> answers; // by tensor: steps for which the parameter is here
  bool begun = false;
};

/// A sum, or the answer to one, between two servers. It takes no time of its sender's end.
struct Relay {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  bool isAnswer = false;
  std::vector<Transfer> answers; // that the helper sends on
  std::uint32_t linksToGo = 2;
};

class Simulation final : private BoundedDelay::Listener {
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
        random_(training.seed),
        tables_(step, training),
        workers_(size_),
        unfinished_(size_),
        preparedFreeS_(
            2 * std::size_t{size_ + (training.aggregates ? training.servers : 0)} *
            training.servers),
        receivedFreeS_(preparedFreeS_.size()),
        laneFreeS_(training.servers, std::vector<double>(training.updateLanes)),
        rounds_(step.tensorBytes().size(), std::vector<std::uint32_t>(size_)),
        pushed_(step.tensorBytes().size()),
        held_(step.tensorBytes().size()) {
    result_.stepEndsS.resize(size_);
    result_.opEndsS.resize(size_);
    result_.updateBusyS.resize(training.servers);
    if (training.delayBound) {
      delay_.emplace(training, tables_, clock_, step, static_cast<BoundedDelay::Listener&>(*this));
    }
    if (tables_.awaited == 0) {
      throw InvalidUsage("a step that waits for nothing");
    }
  }

  SampledResult run() {
    for (std::uint32_t worker = 0; worker < size_; ++worker) {
      Worker& each = workers_[worker];
      each.streams.resize(step_.streams());
      each.answers.assign(step_.tensorBytes().size(), 1); // of the first step
      each.ready.resize(step_.ops().size());
      const double startS = training_.startsS.empty() ? training_.spreadS * random_.fraction()
                                                      : training_.startsS[worker];
      clock_.announce(startS, Event::Kind::kWorkerBegins, worker);
    }
    while (unfinished_ > 0) {
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
      if (way->isUnsettled() && !moves && way->nextEndS() > clock_.nowS()) {
        way->settle();
      }
    }
    Connections& way = pulls_.nextEndS() <= pushes_.nextEndS() ? pulls_ : pushes_;
    const double endS = way.nextEndS();
    if (endS == NextEnd::kNever && clock_.empty()) {
      throw InvalidUsage("the training comes to a standstill: " + whatWaits());
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
      case Event::Kind::kWorkerBegins:
        begin(event.a);
        return;
      case Event::Kind::kTaskEnd: {
        Stream& stream = workers_[event.a].streams[event.b];
        stream.busy = false;
        ended(event.a, stream.running);
        proceed(event.a);
        return;
      }
      case Event::Kind::kStageEnd: {
        const Stage stage = stages_[event.a];
        freeStages_.push_back(event.a);
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

  // ---- a worker ----

  void begin(std::uint32_t number) {
    Worker& worker = workers_[number];
    worker.begun = true;
    worker.sample = random_.below(step_.samples());
    worker.toGo = tables_.awaited;
    worker.inputsToGo = tables_.inputs;
    std::fill(worker.ready.begin(), worker.ready.end(), false);
    for (Stream& stream : worker.streams) {
      stream.next = 0;
    }
    if (worker.step < training_.recorded) {
      result_.opEndsS[number].resize(result_.opEndsS[number].size() + step_.ops().size());
    }
    for (const OpIndex index : step_.firstOps(worker.sample)) {
      start(number, index);
    }
    proceed(number);
  }

  /// All inputs of an op have ended.
  void start(std::uint32_t number, OpIndex index) {
    Worker& worker = workers_[number];
    switch (tables_.kinds[index]) {
      case SampledOp::Kind::kCompute:
        if (training_.order == ComputeOrder::kReady) {
          worker.streams[step_.ops()[index].stream].ready.push(index);
        } else {
          worker.ready[index] = true;
        }
        return;
      case SampledOp::Kind::kPull:
        if (training_.pullStart == PullStart::kAnswer) {
          if (worker.answers[tables_.transfers[index].tensor] > worker.step) {
            ended(number, index);
          }
          return;
        }
        enter<Stage::Kind::kAsked, true>(transferOf(number, index), training_.pull.latencyS);
        return;
      case SampledOp::Kind::kPush:
        if (delay_) {
          enter<Stage::Kind::kAsking, false>(transferOf(number, index), training_.push.latencyS);
        } else {
          prepare<false>(transferOf(number, index));
        }
        return;
    }
  }

  [[nodiscard]] Transfer transferOf(std::uint32_t number, OpIndex index) const {
    Transfer transfer = tables_.transfers[index];
    transfer.worker = number;
    transfer.step = workers_[number].step;
    return transfer;
  }

  /// Starts the computations that can run.
  void proceed(std::uint32_t number) {
    Worker& worker = workers_[number];
    for (std::uint32_t i = 0; i < worker.streams.size(); ++i) {
      Stream& stream = worker.streams[i];
      if (stream.busy) {
        continue;
      }
      if (training_.order == ComputeOrder::kReady) {
        if (stream.ready.empty()) {
          continue;
        }
        stream.running = stream.ready.top();
        stream.ready.pop();
      } else {
        const auto ops = step_.opsOfStream(i);
        if (stream.next == ops.size() || !worker.ready[ops[stream.next]]) {
          continue;
        }
        stream.running = ops[stream.next++];
      }
      stream.busy = true;
      const double seconds =
          step_.seconds(worker.sample)[stream.running] * training_.slowness[number];
      clock_.announce(seconds, Event::Kind::kTaskEnd, number, i);
    }
  }

  /// An op has ended; with the last one the step ends.
  void ended(std::uint32_t number, OpIndex index) {
    Worker& worker = workers_[number];
    if (worker.step < training_.recorded) {
      const std::size_t first = std::size_t{worker.step} * step_.ops().size();
      result_.opEndsS[number][first + index] = clock_.nowS();
    }
    for (const OpIndex next : step_.successorsOf(index)) {
      if (--worker.inputsToGo[next] == 0) {
        start(number, next);
      }
    }
    if (!tables_.isAwaited(index) || --worker.toGo > 0) {
      return;
    }
    result_.stepEndsS[number].push_back(clock_.nowS());
    if (++worker.step == training_.steps) {
      --unfinished_;
    }
    begin(number);
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
    if (freeStages_.empty()) {
      freeStages_.push_back(static_cast<std::uint32_t>(stages_.size()));
      stages_.emplace_back();
    }
    const std::uint32_t place = freeStages_.back();
    freeStages_.pop_back();
    stages_[place] = {kKind, kIsPull, transfer};
    clock_.announce(seconds, Event::Kind::kStageEnd, place);
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
    ended(transfer.worker, step_.pushOf(transfer.tensor));
    proceed(transfer.worker);
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
    Worker& worker = workers_[transfer.worker];
    worker.answers[transfer.tensor] = transfer.step + 1;
    if (delay_) {
      delay_->reads(transfer.tensor, transfer.worker);
    }
    // An answer may come before its step has begun.
    if (worker.begun && worker.step == transfer.step) {
      const OpIndex op = step_.pullOf(transfer.tensor);
      if (worker.inputsToGo[op] == 0) {
        ended(transfer.worker, op);
        proceed(transfer.worker);
      }
    }
  }

  // ---- the servers ----

  void ask(const Transfer& pull) {
    if (mayAnswer(pull)) {
      if (delay_) {
        delay_->answers(pull.tensor, pull.worker);
      }
      prepare<true>(pull);
    } else {
      held_[pull.tensor].push_back(pull);
    }
  }

  [[nodiscard]] bool mayAnswer(const Transfer& pull) const {
    const auto& rounds = rounds_[pull.tensor];
    const std::uint32_t wanted = pull.step;
    if (training_.mode == ServerMode::kSync && rounds[pull.worker] < wanted) {
      return false;
    }
    if (!training_.staleness || training_.mode == ServerMode::kSync) {
      return true;
    }
    const std::uint32_t slowest = *std::min_element(rounds.begin(), rounds.end());
    return slowest + *training_.staleness >= wanted;
  }

  void received(const Transfer& push) {
    if (training_.mode == ServerMode::kSync) {
      if (++pushed_[push.tensor] < size_) {
        return;
      }
      pushed_[push.tensor] = 0;
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
    auto& rounds = rounds_[push.tensor];
    for (std::uint32_t worker = first; worker < last; ++worker) {
      ++rounds[worker];
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
    Transfer answer = transferOf(push.worker, step_.pullOf(push.tensor));
    answer.step = rounds_[push.tensor][push.worker];
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
    ++rounds_[push.tensor][push.worker];
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
    const bool all =
        std::ranges::all_of(answers, [&](const Transfer& pull) { return mayAnswer(pull); });
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
    Transfer transfer = of;
    transfer.leftBytes = static_cast<double>(step_.tensorBytes()[of.tensor]);
    transfer.step = static_cast<std::uint32_t>(relays_.size());
    if (!freeRelays_.empty()) {
      transfer.step = freeRelays_.back();
      freeRelays_.pop_back();
    } else {
      relays_.emplace_back();
    }
    transfer.worker = size_ + relay.to;
    transfer.server = relay.from;
    pulls_.enqueue(transfer);
    transfer.worker = size_ + relay.from;
    transfer.server = relay.to;
    pushes_.enqueue(transfer);
    relays_[transfer.step] = std::move(relay);
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
    const Relay relay = std::exchange(relays_[transfer.step], {});
    freeRelays_.push_back(transfer.step);
    if (relay.isAnswer) {
      for (const Transfer& pull : relay.answers) {
        prepare<true>(pull);
      }
      return;
    }
    delay_->came(transfer.tensor);
    work<Stage::Kind::kApplied>(transfer, transfer.server);
  }

  [[nodiscard]] std::string whatWaits() const {
    for (std::uint32_t number = 0; number < size_; ++number) {
      for (OpIndex i = 0; i < step_.ops().size(); ++i) {
        if (workers_[number].begun && workers_[number].inputsToGo[i] > 0) {
          return concat("op '", step_.ops()[i].name, "' of worker ", number, " waits");
        }
      }
    }
    return "no op waits for another";
  }

  const SampledStep& step_;
  const SampledTraining& training_;
  const std::uint32_t size_;
  Clock clock_;
  Connections pulls_;
  Connections pushes_;
  Random random_;
  const StepTables tables_;
  std::optional<BoundedDelay> delay_;
  std::vector<Relay> relays_;
  std::vector<std::uint32_t> freeRelays_;
  std::vector<Worker> workers_;
  std::uint32_t unfinished_; // workers that have not ended their steps
  std::vector<Stage> stages_;
  std::vector<std::uint32_t> freeStages_;
  std::vector<double> preparedFreeS_; // by connection and direction: when its sender is free
  std::vector<double> receivedFreeS_;
  std::vector<std::vector<double>> laneFreeS_;     // by server
  std::vector<std::vector<std::uint32_t>> rounds_; // by tensor and worker: applied pushes
  std::vector<std::uint32_t> pushed_;              // by tensor: pushes of the round, kSync
  std::vector<std::vector<Transfer>> held_;        // by tensor: pulls that must wait
  SampledResult result_{};
};

} // namespace

SampledResult simulateSampled(const SampledStep& step, const SampledTraining& training) {
  checkTraining(step, training);
  return Simulation(step, training).run();
}

} // namespace hvd_order::simulate
