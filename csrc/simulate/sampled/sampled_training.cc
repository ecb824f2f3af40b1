#include "simulate/sampled/sampled_training.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "base/error.h"

// A pull's path: asked for (`ask`) -> the server may answer (`mayAnswer`), else it waits in
// `held_` -> prepared by the server's end -> on the connection -> received by the worker's end ->
// the op ends. A push's path: prepared -> on the connection -> received -> the server's queue ->
// applied (`applied`), which may release pulls that are held.
//
// The stages off the connection are entries of `stages_`; a stage without a duration costs no
// event. Rates are settled once for all events of one moment, before time goes on.
//
// Invariant: `rounds_` counts, for each tensor and worker, the pushes that a server has applied;
// with ServerMode::kSync all workers of a tensor have one number.

namespace hvd_order::simulate {

namespace {

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the same numbers with every standard library.
class Random final {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t mixed = (state_ += 0x9E3779B97F4A7C15U);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
    return mixed ^ (mixed >> 31);
  }
  std::size_t below(std::size_t limit) {
    return static_cast<std::size_t>(next() % limit);
  }
  double fraction() {
    return static_cast<double>(next() >> 11) * 0x1.0p-53;
  }

 private:
  std::uint64_t state_;
};

struct Stage {
  enum class Kind : std::uint8_t { kAsked, kPrepared, kArrived, kReceived, kApplied };
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

void check(const SampledStep& step, const SampledTraining& training) {
  const auto positive = [](double value) { return std::isfinite(value) && value > 0; };
  const auto notNegative = [](double value) { return std::isfinite(value) && value >= 0; };
  if (training.slowness.empty()) {
    throw InvalidUsage("a training without workers");
  }
  for (const double slowness : training.slowness) {
    if (!positive(slowness)) {
      throw InvalidUsage(concat("a worker with slowness ", slowness, "; expected more than 0"));
    }
  }
  const auto& starts = training.startsS;
  if (!starts.empty() && starts.size() != training.slowness.size()) {
    throw InvalidUsage(concat(starts.size(), " starts of ", training.slowness.size(), " workers"));
  }
  for (const double startS : starts) {
    if (!notNegative(startS)) {
      throw InvalidUsage(concat("a worker begins at ", startS, " s; expected 0 or more"));
    }
  }
  if (training.servers < 1) {
    throw InvalidUsage("0 parameter servers; at least 1 is needed");
  }
  for (const double rate : {training.workerBytesPerS, training.serverBytesPerS}) {
    if (!positive(rate)) {
      throw InvalidUsage(concat("a link of ", rate, " bytes/s; a positive rate is needed"));
    }
  }
  for (const Transmission* way : {&training.pull, &training.push}) {
    if (way->turns == Turns::kWindow &&
        !(positive(way->windowBytes) && positive(way->coldWindowBytes))) {
      throw InvalidUsage(concat("a window of ", way->windowBytes, " bytes; expected more than 0"));
    }
    for (const double seconds :
         {way->latencyS, way->sendSecondsPerByte, way->sendSeconds, way->receiveSecondsPerByte,
          way->receiveSeconds, way->coldS}) {
      if (!notNegative(seconds)) {
        throw InvalidUsage(concat("a transmission with a time of ", seconds, " s"));
      }
    }
  }
  for (const double seconds :
       {training.updateSecondsPerByte, training.updateSeconds, training.spreadS}) {
    if (!notNegative(seconds)) {
      throw InvalidUsage(concat("a time of ", seconds, " s; expected 0 or more"));
    }
  }
  if (training.steps < 1 || training.updateLanes < 1) {
    throw InvalidUsage("0 steps, or a server without a lane for updates");
  }
  const auto& servers = training.serverOf;
  if (!servers.empty() && servers.size() != step.tensorBytes().size()) {
    throw InvalidUsage(
        concat(servers.size(), " servers of ", step.tensorBytes().size(), " tensors"));
  }
  for (const std::uint32_t server : servers) {
    if (server >= training.servers) {
      throw InvalidUsage(concat("a tensor on server ", server, " of ", training.servers));
    }
  }
}

class Simulation final {
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
            clock_),
        pushes_(
            size_,
            training.servers,
            training.workerBytesPerS,
            training.serverBytesPerS,
            training.push,
            clock_),
        random_(training.seed),
        workers_(size_),
        unfinished_(size_),
        preparedFreeS_(2 * std::size_t{size_} * training.servers),
        receivedFreeS_(preparedFreeS_.size()),
        laneFreeS_(training.servers, std::vector<double>(training.updateLanes)),
        rounds_(step.tensorBytes().size(), std::vector<std::uint32_t>(size_)),
        pushed_(step.tensorBytes().size()),
        held_(step.tensorBytes().size()) {
    result_.stepEndsS.resize(size_);
    result_.opEndsS.resize(size_);
    result_.updateBusyS.resize(training.servers);
    for (const SampledOp& op : step.ops()) {
      awaited_ += isAwaited(op) ? 1 : 0;
    }
    if (awaited_ == 0) {
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
    for (std::uint32_t server = 0; server < training_.servers; ++server) {
      result_.pullBusyS.push_back(pulls_.busyS(server));
      result_.pushBusyS.push_back(pushes_.busyS(server));
    }
    return std::move(result_);
  }

 private:
  [[nodiscard]] bool isAwaited(const SampledOp& op) const {
    return op.kind != SampledOp::Kind::kPush || training_.stepEnd != SampledStepEnd::kComputed;
  }
  [[nodiscard]] std::uint32_t serverOf(TensorId tensor) const {
    return training_.serverOf.empty() ? tensor % training_.servers : training_.serverOf[tensor];
  }

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
    if (!clock_.empty() && clock_.nextS() < endS) {
      if (const auto event = clock_.advance(endS)) {
        handle(*event);
      }
      return;
    }
    clock_.moveTo(endS);
    if (const Transfer* transfer = way.endTurn()) {
      sent(*transfer, &way == &pulls_);
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
        stageEnded(stage);
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
    worker.toGo = awaited_;
    const auto& ops = step_.ops();
    worker.inputsToGo.resize(ops.size());
    for (OpIndex i = 0; i < ops.size(); ++i) {
      worker.inputsToGo[i] = static_cast<std::uint32_t>(ops[i].inputs.size());
    }
    std::fill(worker.ready.begin(), worker.ready.end(), false);
    for (Stream& stream : worker.streams) {
      stream.next = 0;
    }
    if (worker.step < training_.recorded) {
      result_.opEndsS[number].resize(result_.opEndsS[number].size() + ops.size());
    }
    for (OpIndex i = 0; i < ops.size(); ++i) {
      if (ops[i].inputs.empty()) {
        start(number, i);
      }
    }
    proceed(number);
  }

  /// All inputs of an op have ended.
  void start(std::uint32_t number, OpIndex index) {
    Worker& worker = workers_[number];
    const SampledOp& op = step_.ops()[index];
    switch (op.kind) {
      case SampledOp::Kind::kCompute:
        if (training_.order == ComputeOrder::kReady) {
          worker.streams[op.stream].ready.push(index);
        } else {
          worker.ready[index] = true;
        }
        return;
      case SampledOp::Kind::kPull:
        if (training_.pullStart == PullStart::kAnswer) {
          if (worker.answers[op.tensor] > worker.step) {
            ended(number, index);
          }
          return;
        }
        enter(Stage::Kind::kAsked, true, transferOf(number, op), training_.pull.latencyS);
        return;
      case SampledOp::Kind::kPush:
        prepare(transferOf(number, op), false);
        return;
    }
  }

  [[nodiscard]] Transfer transferOf(std::uint32_t number, const SampledOp& op) const {
    const auto bytes = static_cast<double>(step_.tensorBytes()[op.tensor]);
    return {number, op.tensor, workers_[number].step, op.priority, bytes};
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
    if (!isAwaited(step_.ops()[index]) || --worker.toGo > 0) {
      return;
    }
    result_.stepEndsS[number].push_back(clock_.nowS());
    if (++worker.step == training_.steps) {
      --unfinished_;
    }
    begin(number);
  }

  // ---- transfers ----

  [[nodiscard]] std::size_t endOf(const Transfer& transfer, bool isPull) const {
    return (std::size_t{transfer.worker} * training_.servers + serverOf(transfer.tensor)) * 2 +
        (isPull ? 0 : 1);
  }

  void enter(Stage::Kind kind, bool isPull, const Transfer& transfer, double seconds) {
    const Stage stage{kind, isPull, transfer};
    if (seconds <= 0) {
      stageEnded(stage);
      return;
    }
    if (freeStages_.empty()) {
      freeStages_.push_back(static_cast<std::uint32_t>(stages_.size()));
      stages_.emplace_back();
    }
    const std::uint32_t place = freeStages_.back();
    freeStages_.pop_back();
    stages_[place] = stage;
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

  void prepare(const Transfer& transfer, bool isPull) {
    const Transmission& way = isPull ? training_.pull : training_.push;
    const double seconds = way.sendSeconds + way.sendSecondsPerByte * transfer.leftBytes;
    enter(
        Stage::Kind::kPrepared, isPull, transfer,
        queued(preparedFreeS_[endOf(transfer, isPull)], seconds));
  }

  void sent(const Transfer& transfer, bool isPull) {
    if (!isPull && training_.stepEnd == SampledStepEnd::kPushed) {
      endPush(transfer);
    }
    const Transmission& way = isPull ? training_.pull : training_.push;
    // A pull's latency is that of its request, or of its answer.
    const bool late = !isPull || training_.pullStart == PullStart::kAnswer;
    enter(Stage::Kind::kArrived, isPull, transfer, late ? way.latencyS : 0);
  }

  void endPush(const Transfer& transfer) {
    ended(transfer.worker, step_.pushOf(transfer.tensor));
    proceed(transfer.worker);
  }

  void stageEnded(const Stage& stage) {
    const Transfer& transfer = stage.transfer;
    const Transmission& way = stage.isPull ? training_.pull : training_.push;
    switch (stage.kind) {
      case Stage::Kind::kAsked:
        ask(transfer);
        return;
      case Stage::Kind::kPrepared:
        (stage.isPull ? pulls_ : pushes_).enqueue(transfer, serverOf(transfer.tensor));
        return;
      case Stage::Kind::kArrived: {
        const double bytes = static_cast<double>(step_.tensorBytes()[transfer.tensor]);
        const double seconds = way.receiveSeconds + way.receiveSecondsPerByte * bytes;
        enter(
            Stage::Kind::kReceived, stage.isPull, transfer,
            queued(receivedFreeS_[endOf(transfer, stage.isPull)], seconds));
        return;
      }
      case Stage::Kind::kReceived:
        stage.isPull ? pulled(transfer) : received(transfer);
        return;
      case Stage::Kind::kApplied:
        applied(transfer);
        return;
    }
  }

  void pulled(const Transfer& transfer) {
    Worker& worker = workers_[transfer.worker];
    worker.answers[transfer.tensor] = transfer.step + 1;
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
      prepare(pull, true);
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
    const double bytes = static_cast<double>(step_.tensorBytes()[push.tensor]);
    const double seconds = training_.updateSeconds + training_.updateSecondsPerByte * bytes;
    const std::uint32_t server = serverOf(push.tensor);
    auto& lanes = laneFreeS_[server];
    result_.updateBusyS[server] += seconds;
    enter(
        Stage::Kind::kApplied, false, push,
        queued(*std::min_element(lanes.begin(), lanes.end()), seconds));
  }

  void applied(const Transfer& push) {
    const bool sync = training_.mode == ServerMode::kSync;
    const std::uint32_t first = sync ? 0 : push.worker;
    const std::uint32_t last = sync ? size_ : push.worker + 1;
    auto& rounds = rounds_[push.tensor];
    for (std::uint32_t worker = first; worker < last; ++worker) {
      ++rounds[worker];
    }
    std::vector<Transfer> waiting = std::exchange(held_[push.tensor], {});
    for (const Transfer& pull : waiting) {
      ask(pull);
    }
    for (std::uint32_t worker = first; worker < last; ++worker) {
      Transfer own = push;
      own.worker = worker;
      if (training_.pullStart == PullStart::kAnswer &&
          step_.pullOf(push.tensor) != SampledStep::kNone) {
        const SampledOp& op = step_.ops()[step_.pullOf(push.tensor)];
        Transfer answer = transferOf(worker, op);
        answer.step = rounds[worker];
        ask(answer);
      }
      if (training_.stepEnd == SampledStepEnd::kUpdated) {
        endPush(own);
      }
    }
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
  std::vector<Worker> workers_;
  std::size_t awaited_ = 0;  // ops of a step that it waits for
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
  check(step, training);
  return Simulation(step, training).run();
}

} // namespace hvd_order::simulate
