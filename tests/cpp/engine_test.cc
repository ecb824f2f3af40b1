#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <future>
#include <latch>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "base/error.h"
#include "check.h"
#include "loopback.h"

// Several engines with their real threads in one process, joined by a LoopbackWorld. Each rank's
// training loop is a thread of its own. Tests wait for events; only those of a link reservation,
// which are about time, sleep.

namespace hvd_order {

namespace {

using namespace std::chrono_literals;
using Clock = Completion::Clock;

constexpr auto kForever = 60s;        // far beyond what any test here takes
constexpr auto kShortTimeout = 400ms; // where the timeout is what is tested

using Tensors = std::vector<TensorSpec>;

/// All ranks of one job.
class Job {
 public:
  explicit Job(int size, const EngineOptions& options = {})
      : Job(size, [&options](Rank) { return options; }) {}
  /// @param options by rank.
  Job(int size, const std::function<EngineOptions(Rank)>& options)
      : size_(size), world_(LoopbackWorld::create(size)), buffers_(static_cast<std::size_t>(size)) {
    for (Rank rank = 0; rank < size; ++rank) {
      EngineOptions own = options(rank);
      own.rank = rank;
      own.size = size;
      engines_.push_back(
          std::make_shared<Engine>(
              own, world_->transport(rank), size > 1 ? world_->control(rank) : nullptr));
      engines_.back()->start();
    }
  }
  ~Job() {
    for (const auto& engine : engines_) {
      if (engine) {
        engine->shutdown();
      }
    }
    engines_.clear();
    world_.reset(); // joins its thread: only then the buffers may go
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Registers the model on one rank.
  void addModel(
      Rank rank,
      ModelId model,
      const Tensors& tensors,
      ByteCount sliceBytes,
      const std::vector<SliceIndex>& plan = {},
      bool split = false) {
    const auto layout = std::make_shared<SliceLayout>(tensors, sliceBytes, true, split);
    Model& m = modelOf(rank, model);
    m.layout = layout;
    m.data.clear();
    std::vector<float*> pointers;
    for (const ByteCount bytes : layout->bufferBytes()) {
      m.data.emplace_back(static_cast<std::size_t>(bytes) / sizeof(float), 0.0F);
    }
    for (auto& buffer : m.data) {
      pointers.push_back(buffer.data());
    }
    world_->setBuffers(rank, model, pointers);
    engine(rank).addModel(model, layout, plan);
  }

  void addModelEverywhere(
      ModelId model,
      const Tensors& tensors,
      ByteCount sliceBytes,
      const std::vector<SliceIndex>& plan = {},
      bool split = false) {
    for (Rank rank = 0; rank < size_; ++rank) {
      addModel(rank, model, tensors, sliceBytes, plan, split);
    }
  }

  /// The tensor's place in the rank's gradient buffer.
  std::span<float> values(Rank rank, TensorKey tensor) {
    Model& m = modelOf(rank, tensor.model);
    const TensorSpec& spec = m.layout->tensors()[tensor.tensor];
    const auto at = static_cast<std::size_t>(m.layout->tensorOffset(tensor.tensor));
    return std::span(m.data[spec.buffer])
        .subspan(at / sizeof(float), static_cast<std::size_t>(spec.sizeBytes) / sizeof(float));
  }

  Engine& engine(Rank rank) {
    return *engines_[static_cast<std::size_t>(rank)];
  }
  std::shared_ptr<LoopbackWorld>& world() {
    return world_;
  }

  void ready(Rank rank, TensorKey tensor) {
    engine(rank).tensorReady(tensor);
  }
  void wait(Rank rank, TensorKey tensor) {
    CHECK(engine(rank).wait(tensor, Clock::now() + kForever));
  }

  /// One training step of one rank: gradients in a random order, then all sums are looked at. The
  /// squares of a split layout are numbers like others here, summed by the loopback as float.
  void step(Rank rank, ModelId model, int number, std::mt19937& random) {
    const std::size_t count = modelOf(rank, model).layout->tensors().size();
    std::vector<TensorId> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const TensorId tensor : order) {
      const TensorKey key{model, tensor};
      std::ranges::fill(values(rank, key), gradient(rank, key, number));
      ready(rank, key);
    }
    for (TensorId tensor = 0; tensor < count; ++tensor) { // as forward does
      const TensorKey key{model, tensor};
      wait(rank, key);
      float sum = 0;
      for (Rank r = 0; r < size_; ++r) {
        sum += gradient(r, key, number);
      }
      for (const float value : values(rank, key)) {
        CHECK_EQUAL(value, sum);
      }
    }
  }

 private:
  struct Model {
    std::shared_ptr<const SliceLayout> layout;
    std::vector<std::vector<float>> data;
  };

  // A rank may have several threads, each with a model of its own.
  Model& modelOf(Rank rank, ModelId model) {
    const std::scoped_lock lock(mutex_);
    return buffers_[static_cast<std::size_t>(rank)][model];
  }

  // Whole numbers, so that sums are exact.
  static float gradient(Rank rank, TensorKey tensor, int step) {
    return static_cast<float>(
        1 + rank * 64 + static_cast<int>(tensor.tensor) * 3 + step * 7 +
        static_cast<int>(tensor.model));
  }

  int size_;
  std::shared_ptr<LoopbackWorld> world_;
  std::mutex mutex_; // guards the maps, not the models in them
  std::vector<std::map<ModelId, Model>> buffers_;
  std::vector<std::shared_ptr<Engine>> engines_;
};

// One element, fused neighbours, sizes that no slice divides, two dtypes.
const Tensors kNetwork{
    {"embedding", 1040, 0},
    {"bias", 16, 0},
    {"norm", 48, 1},
    {"gain", 32, 0},
    {"head", 272, 1}};
constexpr ByteCount kSliceBytes = 128;
const Tensors kTwo{{"front", 64, 0}, {"back", 64, 0}};

// Split, kTwo has five slices of 64 bytes or less, and one more tensor.
constexpr SliceKey kSquares{0, 0};
constexpr SliceKey kSumOfFront{0, 1};
constexpr SliceKey kSumOfBack{0, 2};
constexpr SliceKey kPartsOfFront{0, 3};
constexpr SliceKey kPartsOfBack{0, 4};
constexpr TensorKey kFront{0, 0};
constexpr TensorKey kBack{0, 1};
constexpr TensorKey kSquaresTensor{0, 2};

/// A random order in which every slice comes after those that it waits for.
std::vector<SliceIndex> shuffledPlan(const SliceLayout& layout, std::mt19937 random) {
  std::vector<SliceIndex> plan(layout.slices().size());
  std::iota(plan.begin(), plan.end(), 0);
  std::shuffle(plan.begin(), plan.end(), random);
  if (!layout.isSplit()) {
    return plan;
  }
  std::erase(plan, SliceLayout::kSquares);
  auto lastSum = plan.begin();
  for (SliceIndex sum = 1; sum <= layout.pairs(); ++sum) {
    auto first = std::ranges::find(plan, sum);
    const auto second = std::ranges::find(plan, layout.gatherOf(sum));
    if (second < first) {
      std::iter_swap(first, second);
      first = second;
    }
    lastSum = std::max(lastSum, first);
  }
  const auto after = plan.end() - lastSum; // places behind the last sum
  plan.insert(plan.end() - static_cast<std::ptrdiff_t>(random()) % after, SliceLayout::kSquares);
  return plan;
}

EngineOptions withTimeout(std::chrono::nanoseconds timeout) {
  EngineOptions options;
  options.timeout = timeout;
  return options;
}

struct Setting {
  AgreementKind agreement;
  Policy policy;
};

const std::vector<Setting> kSettings{
    {AgreementKind::kLeader, Policy::kPriority},     {AgreementKind::kLeader, Policy::kArrival},
    {AgreementKind::kNegotiated, Policy::kPriority}, {AgreementKind::kNegotiated, Policy::kArrival},
    {AgreementKind::kPlanned, Policy::kPlanned},
};

/// A backend that the test plays: it keeps the callbacks.
class HeldTransport final : public Transport {
 public:
  void issue(SliceKey key, const Slice& /*slice*/, Done done) override {
    const std::scoped_lock lock(mutex_);
    if (refuses) {
      throw CollectiveError("the backend refuses");
    }
    held_.emplace_back(key, std::move(done));
    changed_.notify_all();
  }
  void onEnqueued(const Enqueued& told) override {
    enqueued = told;
  }
  void abort() noexcept override {
    ++aborts;
  }

  /// Waits until `count` slices have been issued and takes their callbacks.
  std::vector<std::pair<SliceKey, Done>> take(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_.size() >= count; });
    return std::exchange(held_, {});
  }

  Enqueued enqueued;
  std::atomic<bool> refuses = false;
  std::atomic<int> aborts = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<SliceKey, Done>> held_;
};

/// An engine of one rank over a HeldTransport, with model 0 = kTwo in one slice each, or split.
struct Lonely {
  explicit Lonely(EngineOptions options = {}, bool split = false) {
    engine = std::make_shared<Engine>(std::move(options), transport, nullptr);
    engine->start();
    engine->addModel(0, std::make_shared<SliceLayout>(kTwo, 64, true, split), {});
  }
  ~Lonely() {
    if (engine) {
      engine->shutdown();
    }
  }

  std::shared_ptr<HeldTransport> transport = std::make_shared<HeldTransport>();
  std::shared_ptr<Engine> engine;
};

/// Engines of the first ranks of a world of `size`, over these transports.
std::vector<std::shared_ptr<Engine>> enginesOf(
    LoopbackWorld& world,
    int size,
    const std::vector<std::shared_ptr<Transport>>& transports) {
  std::vector<std::shared_ptr<Engine>> engines;
  for (Rank rank = 0; rank < static_cast<Rank>(transports.size()); ++rank) {
    EngineOptions options;
    options.rank = rank;
    options.size = size;
    engines.push_back(
        std::make_shared<Engine>(
            options, transports[static_cast<std::size_t>(rank)], world.control(rank)));
    engines.back()->start();
  }
  return engines;
}

/// Every wait of these ranks throws; @return the messages.
std::vector<std::string> allFail(Job& job, const std::vector<Rank>& ranks, TensorKey tensor) {
  std::vector<std::string> texts(ranks.size());
  test::onThreads(static_cast<int>(ranks.size()), [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    texts[index] = CHECK_THROWS(CollectiveError, job.wait(ranks[index], tensor));
  });
  return texts;
}

} // namespace

TEST(sumsAreRightAndTheOrderIsOneOnAllRanks) {
  // A rank that issued another slice than the rest would get an error from the world.
  constexpr int kSteps = 15;
  for (const Setting& setting : kSettings) {
    for (const int size : {1, 2, 3, 4, 7}) {
      for (const bool split : {false, true}) {
        EngineOptions options;
        options.agreement = setting.agreement;
        options.policy = setting.policy;
        options.creditBytes = 3 * kSliceBytes;
        Job job(size, options);
        const SliceLayout layout(kNetwork, kSliceBytes, true, split);
        std::vector<SliceIndex> plan;
        if (setting.policy == Policy::kPlanned) {
          plan = shuffledPlan(layout, std::mt19937(7));
        }
        job.addModelEverywhere(0, kNetwork, kSliceBytes, plan, split);
        test::onThreads(size, [&](int rank) {
          std::mt19937 random(static_cast<unsigned>(rank));
          for (int step = 0; step < kSteps; ++step) {
            job.step(rank, 0, step, random);
          }
        });
        std::vector<int> times(layout.slices().size(), 0);
        for (const SliceKey slice : job.world()->history()) {
          ++times[slice.index];
        }
        CHECK_EQUAL(times, std::vector<int>(layout.slices().size(), kSteps));
      }
    }
  }
}

TEST(aFailureBetweenTheHalvesWakesWhoWaits) {
  enum class Fails { kGather, kSquares, kNextIssue };
  for (const Fails what : {Fails::kGather, Fails::kSquares, Fails::kNextIssue}) {
    Lonely lonely({}, true);
    for (const TensorKey tensor : {kSquaresTensor, kBack, kFront}) {
      lonely.engine->tensorReady(tensor);
    }
    auto sums = lonely.transport->take(2);
    std::vector<std::future<std::string>> waiting;
    for (const TensorKey tensor : {kSquaresTensor, kBack, kFront}) {
      waiting.push_back(std::async(std::launch::async, [&, tensor] {
        return CHECK_THROWS(CollectiveError, lonely.engine->wait(tensor, Clock::now() + kForever));
      }));
    }
    lonely.transport->refuses = what == Fails::kNextIssue;
    for (auto& [slice, done] : sums) {
      done(nullptr);
    }
    if (what != Fails::kNextIssue) {
      for (auto& [slice, done] : lonely.transport->take(3)) {
        if ((slice == kSquares) == (what == Fails::kSquares)) { // the others stay in flight
          done(std::make_exception_ptr(CollectiveError("the backend fails")));
        }
      }
    }
    for (auto& waiter : waiting) {
      CHECK_CONTAINS(waiter.get(), what == Fails::kNextIssue ? "refuses" : "fails");
    }
  }
}

TEST(bothHalvesAndTheSquaresAreRecorded) {
  for (const Setting& setting : kSettings) {
    EngineOptions options;
    options.agreement = setting.agreement;
    options.policy = setting.policy;
    Job job(2, options);
    const bool planned = setting.policy == Policy::kPlanned;
    job.addModelEverywhere(
        0, kTwo, 64, planned ? std::vector<SliceIndex>{2, 4, 1, 0, 3} : std::vector<SliceIndex>{},
        true);
    job.engine(1).timeline().start();
    test::onThreads(2, [&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      job.step(rank, 0, 0, random);
    });
    std::map<SliceIndex, SliceEvent> events;
    for (const SliceEvent& event : job.engine(1).timeline().take()) {
      CHECK(event.readyNs <= event.issuedNs && event.issuedNs <= event.doneNs);
      CHECK(events.emplace(event.slice.index, event).second);
    }
    CHECK_EQUAL(events.size(), 5U);
    for (const auto& [sum, later] : std::vector<std::pair<SliceKey, SliceKey>>{
             {kSumOfFront, kPartsOfFront},
             {kSumOfBack, kPartsOfBack},
             {kSumOfFront, kSquares},
             {kSumOfBack, kSquares}}) {
      CHECK(events[sum.index].doneNs <= events[later.index].readyNs);
    }
  }
}

TEST(aSplitSumIsEnqueuedWithItsSecondHalfAndThenTheNextGradientWaits) {
  Lonely lonely({}, true);
  const auto carry = [&](std::size_t count) {
    auto held = lonely.transport->take(count);
    for (const auto& [slice, done] : held) {
      lonely.transport->enqueued(slice);
    }
    return held;
  };
  const auto isEnqueued = [&](TensorKey tensor) {
    return lonely.engine->wait(tensor, Clock::now(), Stage::kEnqueued);
  };
  for (const TensorKey tensor : {kSquaresTensor, kBack, kFront}) {
    lonely.engine->tensorReady(tensor);
  }
  for (auto& [slice, done] : carry(2)) {
    CHECK(!isEnqueued(slice == kSumOfFront ? kFront : kBack));
    done(nullptr);
  }
  auto rest = carry(3);
  CHECK(isEnqueued(kFront) && isEnqueued(kBack) && isEnqueued(kSquaresTensor));
  CHECK(!lonely.engine->wait(kFront, Clock::now()));
  std::ranges::sort(rest, {}, [](const auto& it) { return it.first.index; });
  rest[0].second(nullptr); // the squares: a step begins when they have arrived
  CHECK(lonely.engine->wait(kSquaresTensor, Clock::now()));
  lonely.engine->tensorReady(kSquaresTensor);
  lonely.engine->tensorReady(kFront);
  rest[2].second(nullptr); // of the other tensor
  CHECK(!isEnqueued(kFront));
  rest[1].second(nullptr);
  auto next = lonely.transport->take(1);
  CHECK_EQUAL(next[0].first, kSumOfFront);
}

TEST(aGradientOfTheNextStepWaitsForTheSumThatADeviceStillCarries) {
  Lonely lonely;
  lonely.engine->tensorReady({0, 0});
  auto first = lonely.transport->take(1);
  CHECK(!lonely.engine->wait({0, 0}, Engine::Clock::now(), Stage::kEnqueued));
  lonely.transport->enqueued(first[0].first);
  CHECK(lonely.engine->wait({0, 0}, Engine::Clock::now(), Stage::kEnqueued)); // a reader goes on
  lonely.engine->announce({0, 0});
  lonely.engine->tensorReady({0, 0}); // the device's events may come in this order
  CHECK(!lonely.engine->wait({0, 0}, Engine::Clock::now(), Stage::kEnqueued));
  first[0].second(nullptr);
  auto second = lonely.transport->take(1); // issued only now
  CHECK(!lonely.engine->wait({0, 0}, Engine::Clock::now()));
  second[0].second(nullptr);
  CHECK(lonely.engine->wait({0, 0}, Engine::Clock::now() + kForever));
}

TEST(aTensorIsEnqueuedWithTheLastOfItsSlices) {
  Lonely lonely;
  lonely.engine->addModel(
      1, std::make_shared<SliceLayout>(Tensors{{"large", 192, 0}, {"small", 64, 0}}, 64), {});
  lonely.engine->tensorReady({1, 0});
  auto slices = lonely.transport->take(3);
  for (int i = 0; i < 3; ++i) {
    CHECK(!lonely.engine->wait({1, 0}, Engine::Clock::now(), Stage::kEnqueued));
    lonely.transport->enqueued(slices[i].first);
  }
  CHECK(lonely.engine->wait({1, 0}, Engine::Clock::now(), Stage::kEnqueued));
  for (auto& [slice, done] : slices) {
    done(nullptr);
  }
}

TEST(threadsThatBeginInOppositeOrderTrainTheirModels) {
  // Even ranks register and train the first model first, odd ranks the second one.
  for (const Setting& setting : kSettings) {
    EngineOptions options;
    options.agreement = setting.agreement;
    options.policy = setting.policy;
    options.creditBytes = 2 * kSliceBytes;
    if (setting.policy == Policy::kPlanned) {
      continue; // a plan covers one model
    }
    Job job(3, options);
    std::array<std::latch, 3> firstSteps{std::latch(1), std::latch(1), std::latch(1)}; // by rank
    test::onThreads(6, [&](int thread) {
      const Rank rank = thread / 2;
      const bool isFirst = thread % 2 == rank % 2;
      const ModelId model = thread % 2 == 0 ? 0 : 4;
      std::mt19937 random(static_cast<unsigned>(thread));
      if (!isFirst) {
        firstSteps[static_cast<std::size_t>(rank)].wait();
      }
      job.addModel(rank, model, kTwo, kSliceBytes);
      if (isFirst) {
        firstSteps[static_cast<std::size_t>(rank)].count_down();
      }
      for (int step = 0; step < 15; ++step) {
        job.step(rank, model, step, random);
      }
    });
  }
}

TEST(modelsComeAndGo) {
  Job job(3);
  std::barrier everybody(3);
  test::onThreads(3, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < 10; ++round) {
      job.addModel(rank, 1, round % 2 == 0 ? kNetwork : kTwo, kSliceBytes);
      job.step(rank, 1, round, random);
      job.engine(rank).removeModel(1);
      CHECK(job.engine(rank).wait({1, 0}, Clock::now()));
      everybody.arrive_and_wait(); // an id is free when all ranks have given it up
    }
  });
}

TEST(theAgreementChangesBetweenStepsAndNoMessageIsMistaken) {
  // Ranks change at different times: messages of the old agreement arrive after the change, and
  // those of the new one before it.
  constexpr std::pair<AgreementKind, Policy> kTurns[] = {
      {AgreementKind::kPlanned, Policy::kPlanned},     {AgreementKind::kLeader, Policy::kArrival},
      {AgreementKind::kNegotiated, Policy::kPriority}, {AgreementKind::kPlanned, Policy::kPlanned},
      {AgreementKind::kLeader, Policy::kPriority},
  };
  Job job(3);
  std::barrier everybody(3);
  const std::size_t slices = SliceLayout(kNetwork, kSliceBytes).slices().size();
  std::vector<SliceIndex> plan(slices);
  std::iota(plan.rbegin(), plan.rend(), 0);
  test::onThreads(3, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int turn = 0; turn < 30; ++turn) {
      const auto [kind, policy] = kTurns[turn % 5];
      job.engine(rank).retune(kind, policy, 4 * kSliceBytes, 0ns);
      const bool planned = kind == AgreementKind::kPlanned;
      job.addModel(rank, 0, kNetwork, kSliceBytes, planned ? plan : std::vector<SliceIndex>{});
      for (int number = 0; number < 3; ++number) {
        job.step(rank, 0, number, random);
      }
      CHECK_THROWS(
          InvalidUsage,
          job.engine(rank).retune(
              planned ? AgreementKind::kLeader : AgreementKind::kPlanned,
              planned ? Policy::kPriority : Policy::kPlanned, 4 * kSliceBytes, 0ns));
      job.engine(rank).removeModel(0);
      everybody.arrive_and_wait(); // nothing is under way on any rank
    }
  });
}

TEST(aSecondModelEndsThePlanWhereverTheRanksAre) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const bool split = seed % 2 == 1;
    const SliceLayout layout(kNetwork, kSliceBytes, true, split);
    const std::size_t tensors = layout.tensors().size();
    EngineOptions options;
    options.agreement = AgreementKind::kPlanned;
    options.policy = Policy::kPlanned;
    options.creditBytes = 4 * kSliceBytes;
    Job job(3, options);
    std::mt19937 random(seed);
    const std::vector<SliceIndex> plan = shuffledPlan(layout, random);
    std::vector<std::vector<TensorId>> order(3, std::vector<TensorId>(tensors));
    std::vector<std::size_t> before(3); // gradients that a rank has before it adds the model
    for (std::size_t rank = 0; rank < 3; ++rank) {
      std::iota(order[rank].begin(), order[rank].end(), 0);
      std::shuffle(order[rank].begin(), order[rank].end(), random);
      before[rank] = random() % (tensors + 1);
    }
    std::vector<std::uint64_t> issued(3);
    std::barrier everybody(3);
    test::onThreads(3, [&](int rank) {
      const auto own = static_cast<std::size_t>(rank);
      std::mt19937 mine(seed + own);
      job.addModel(rank, 0, kNetwork, kSliceBytes, plan, split);
      job.step(rank, 0, 0, mine);
      const auto produce = [&](std::size_t from, std::size_t to) {
        for (std::size_t i = from; i < to; ++i) {
          std::ranges::fill(job.values(rank, {0, order[own][i]}), 1.0F);
          job.ready(rank, {0, order[own][i]});
        }
      };
      produce(0, before[own]);
      issued[own] = job.engine(rank).holdPlan().value();
      everybody.arrive_and_wait();
      job.engine(rank).endPlan(
          *std::ranges::max_element(issued), AgreementKind::kLeader, Policy::kPriority);
      job.addModel(rank, 1, kTwo, kSliceBytes);
      produce(before[own], tensors);
      job.step(rank, 1, 1, mine);
      for (TensorId tensor = 0; tensor < tensors; ++tensor) {
        job.wait(rank, {0, tensor});
        CHECK_EQUAL(job.values(rank, {0, tensor})[0], 3.0F);
      }
      job.step(rank, 0, 2, mine);
      CHECK(!job.engine(rank).holdPlan());
    });
  }
}

TEST(aRankThatDiesIsNamedToAllOthers) {
  for (const Rank victim : {0, 1, 2}) {
    Job job(3);
    job.addModelEverywhere(0, kTwo, 64);
    for (Rank rank = 0; rank < 3; ++rank) {
      if (rank != victim) {
        job.ready(rank, {0, 0});
      }
    }
    job.world()->killRank(victim);
    std::vector<Rank> others{0, 1, 2};
    std::erase(others, victim);
    for (const std::string& text : allFail(job, others, {0, 0})) {
      CHECK_CONTAINS(text, concat("rank ", victim, " is gone"));
    }
    for (const Rank rank : others) {
      CHECK_THROWS(CollectiveError, job.engine(rank).check());
      CHECK_THROWS(CollectiveError, job.ready(rank, {0, 1}));
      CHECK_THROWS(CollectiveError, job.engine(rank).stages(0));
      CHECK_THROWS(CollectiveError, job.addModel(rank, 3, kTwo, 64));
    }
  }
}

TEST(aRankDiesAtAnyMomentAndNobodyHangs) {
  for (int trial = 0; trial < 20; ++trial) {
    EngineOptions options;
    options.agreement = kSettings[static_cast<std::size_t>(trial) % 4].agreement;
    options.creditBytes = 2 * kSliceBytes;
    Job job(3, options);
    job.addModelEverywhere(0, kNetwork, kSliceBytes, {}, trial % 8 >= 4);
    const Rank victim = trial % 3;
    const int last = trial % 5; // the step in which it dies
    std::latch reached(1);
    test::onThreads(4, [&](int thread) {
      if (thread == 3) {
        reached.wait();
        job.world()->killRank(victim);
        job.engine(victim).fail(std::make_exception_ptr(CollectiveError("killed")));
        return;
      }
      std::mt19937 random(static_cast<unsigned>(100 * trial + thread));
      CHECK_THROWS(CollectiveError, [&] {
        for (int step = 0;; ++step) {
          if (thread == victim && step == last) {
            reached.count_down();
          }
          job.step(thread, 0, step, random);
        }
      }());
    });
  }
}

TEST(aTensorThatOneRankNeverProducesIsNamedWithTheRank) {
  for (const AgreementKind kind : {AgreementKind::kLeader, AgreementKind::kNegotiated}) {
    EngineOptions options = withTimeout(kShortTimeout);
    options.agreement = kind;
    Job job(3, options);
    job.addModelEverywhere(0, kTwo, 64);
    for (const Rank rank : {0, 1, 2}) {
      if (rank != 2) {
        job.ready(rank, {0, 1});
      }
    }
    const auto start = Clock::now();
    for (const std::string& text : allFail(job, {0, 1}, {0, 1})) {
      CHECK_CONTAINS(text, "'back' has not been produced on rank 2");
    }
    CHECK(Clock::now() - start < 20s);
    // The culprit hears it when it next asks for anything.
    const std::string text = CHECK_THROWS(CollectiveError, [&] {
      while (true) {
        job.engine(2).check();
        std::this_thread::yield();
      }
    }());
    CHECK_CONTAINS(text, "'back' has not been produced on rank 2");
  }
}

TEST(anAnnouncedTensorIsWaitedFor) {
  // Its gradient is still being computed or copied: nothing is ready, but a reader must wait.
  Job job(2);
  job.addModelEverywhere(0, kTwo, 64);
  job.engine(0).announce({0, 0});
  CHECK_EQUAL(job.engine(0).stages(0)[0], 1);
  CHECK(!job.engine(0).wait({0, 0}, Clock::now() + 1ms));
  for (const Rank rank : {0, 1}) {
    job.ready(rank, {0, 0});
  }
  for (const Rank rank : {0, 1}) {
    job.wait(rank, {0, 0});
    CHECK_EQUAL(job.engine(rank).stages(0)[0], 0);
  }
}

TEST(anAnnouncedTensorThatNeverComesIsAStall) {
  Job job(1, withTimeout(kShortTimeout));
  job.addModelEverywhere(0, kTwo, 64);
  job.engine(0).announce({0, 0});
  CHECK_THROWS(CollectiveError, job.wait(0, {0, 0}));
}

TEST(aRankThatIsLateItselfSaysSo) {
  // Its own timeout is the first to end, and what it waits for has been produced everywhere.
  Job job(3, [](Rank rank) { return withTimeout(rank == 2 ? kShortTimeout : 60s); });
  job.addModelEverywhere(0, kTwo, 64);
  for (const Rank rank : {0, 1}) {
    job.ready(rank, {0, 0});
  }
  for (const Rank rank : {0, 1, 2}) {
    job.ready(rank, {0, 1});
  }
  for (const std::string& text : allFail(job, {0, 1, 2}, {0, 1})) {
    CHECK_CONTAINS(text, "rank 2 waits for the all-reduce of 'back'");
    CHECK_CONTAINS(text, "'front' has not been produced on rank 2");
  }
}

TEST(aTransferThatNeverEndsTimesOut) {
  EngineOptions options = withTimeout(kShortTimeout);
  Lonely lonely(options);
  lonely.engine->tensorReady({0, 0});
  const auto held = lonely.transport->take(1);
  const std::string text =
      CHECK_THROWS(TransferTimeout, lonely.engine->wait({0, 0}, Clock::now() + kForever));
  CHECK_CONTAINS(text, "'front'");
  CHECK_CONTAINS(text, "stuck");
  held[0].second(nullptr); // too late: harmless
  lonely.engine->shutdown();
  CHECK_EQUAL(lonely.transport->aborts.load(), 1);
}

TEST(aStallIsAnnouncedBeforeItIsAnError) {
  std::promise<std::string> warned;
  EngineOptions options = withTimeout(kForever);
  options.stallWarning = 20ms;
  std::atomic<int> warnings = 0;
  options.warn = [&](const std::string& text) {
    if (++warnings == 1) {
      warned.set_value(text);
    }
  };
  Job job(2, options);
  job.addModelEverywhere(0, kTwo, 64);
  job.ready(0, {0, 0});
  CHECK_CONTAINS(warned.get_future().get(), "'front' has not been produced on rank 1");
  job.ready(1, {0, 0}); // and it goes on as if nothing had been
  test::onThreads(2, [&](int rank) { job.wait(rank, {0, 0}); });
  CHECK_EQUAL(warnings.load(), 1);
}

/// Hands over what the test says; whoever sends waits until it is let go.
class SlowControl final : public ControlChannel {
 public:
  void start(OnMessage onMessage, OnLost /*onLost*/) override {
    hear = std::move(onMessage);
  }
  void send(Rank /*to*/, const ControlMessage& /*message*/) override {
    sending.count_down();
    letGo.wait();
  }
  void stop() noexcept override {}

  OnMessage hear;
  std::latch sending{1};
  std::latch letGo{1};
};

TEST(aGradientThatComesWhileAnotherThreadDrivesIsWatchedAsWell) {
  const auto world = LoopbackWorld::create(2);
  const auto control = std::make_shared<SlowControl>();
  EngineOptions options = withTimeout(kShortTimeout);
  options.size = 2;
  options.warn = [](const std::string&) {};
  const auto engine = std::make_shared<Engine>(options, world->transport(0), control);
  engine->start();
  std::thread listener([&] { control->hear(1, {MessageKind::kSlices, {0}}); });
  control->sending.wait(); // of the answer: the listener drives
  const auto layout = std::make_shared<SliceLayout>(kTwo, 64);
  std::vector<float> values(static_cast<std::size_t>(layout->bufferBytes().front()) / 4, 0.0F);
  world->setBuffers(0, 0, {values.data()});
  engine->addModel(0, layout, {});
  engine->tensorReady({0, 0});
  control->letGo.count_down();
  listener.join();
  CHECK_THROWS(TransferTimeout, engine->wait({0, 0}, Clock::now() + kForever));
  engine->shutdown();
}

TEST(aModelThatStallsIsReportedThoughAnotherGoesOn) {
  // Two threads train a model each; on rank 0 that of model 4 has ended.
  std::promise<std::string> warning;
  std::atomic<bool> warned = false;
  const auto options = [&](Rank rank) {
    EngineOptions own;
    own.stallWarning = 20ms;
    own.warn = [&, rank](const std::string& text) {
      if (rank == 1 && !warned.exchange(true)) {
        warning.set_value(text);
      }
    };
    return own;
  };
  Job job(2, options);
  job.addModelEverywhere(0, kTwo, kSliceBytes);
  job.addModelEverywhere(4, kTwo, 64);
  job.ready(1, {4, 0});
  bool goOn = true;
  const auto end = Clock::now() + kForever;
  std::barrier everybody(2, [&]() noexcept { goOn = !warned && Clock::now() < end; });
  test::onThreads(2, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; goOn; ++step) {
      job.step(rank, 0, step, random);
      everybody.arrive_and_wait();
    }
  });
  CHECK(warned);
  CHECK_CONTAINS(warning.get_future().get(), "'front' has not been produced on rank 0");
}

TEST(anIdleEngineNeverTimesOut) {
  // Between two steps there may be hours. The clock runs only while something is under way.
  Job job(2, withTimeout(1ms));
  job.addModelEverywhere(0, kTwo, 64);
  for (const Rank rank : {0, 1}) {
    CHECK(job.engine(rank).wait({0, 0}, Clock::now()));
  }
  const auto until = Clock::now() + 50ms; // 50 timeouts
  while (Clock::now() < until) {
    job.engine(0).check();
    std::this_thread::yield();
  }
}

TEST(aRankMayLeaveInPeace) {
  for (const Rank leaver : {0, 1}) {
    const auto world = LoopbackWorld::create(3);
    const auto engines = enginesOf(*world, 3, {world->transport(0), world->transport(1)});
    // Rank 2 only listens. The world delivers in order, so what it hears last comes after all that
    // the others were told.
    std::promise<void> end;
    const auto listener = world->control(2);
    listener->start(
        [&](Rank, const ControlMessage& message) {
          if (message.kind == MessageKind::kReply) {
            end.set_value();
          }
        },
        [&](Rank, const std::exception_ptr&) { end.set_value(); });
    engines[static_cast<std::size_t>(leaver)]->shutdown();
    world->killRank(leaver); // its process ends and its connections break
    if (leaver != 0) {
      world->control(0)->send(2, {MessageKind::kReply, {}});
    }
    end.get_future().wait();
    engines[static_cast<std::size_t>(1 - leaver)]->check();
    listener->stop();
    engines[static_cast<std::size_t>(1 - leaver)]->shutdown();
  }
}

TEST(waitingForARankThatLeftEndsInAnErrorAtOnce) {
  Job job(2); // with a timeout of half an hour
  job.addModelEverywhere(0, kTwo, 64);
  job.engine(1).shutdown();
  job.ready(0, {0, 0});
  CHECK_CONTAINS(
      CHECK_THROWS(PeerLost, job.wait(0, {0, 0})), "rank 1 has ended its training, while rank 0");
}

TEST(whatIsFinishedOutlivesARankThatLeft) {
  for (const Rank leaver : {0, 1, 2}) {
    Job job(3);
    job.addModelEverywhere(0, kNetwork, kSliceBytes);
    test::onThreads(3, [&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      job.step(rank, 0, 1, random);
    });
    job.engine(leaver).enterShutdownBarrier();
    CHECK(job.engine(leaver).mayLeave(Clock::now() + kForever));
    job.engine(leaver).shutdown();
    for (Rank rank = 0; rank < 3; ++rank) {
      if (rank != leaver) {
        job.wait(rank, {0, 0});
        job.engine(rank).check();
      }
    }
  }
}

TEST(aRankWaitsForTheOthersAndCanSayForWhom) {
  for (const Rank leaver : {0, 2}) {
    // The transport of rank 1 keeps its callbacks, so rank 1 does not finish.
    const auto world = LoopbackWorld::create(3);
    const auto held = std::make_shared<HeldTransport>();
    const auto others = std::make_shared<HeldTransport>();
    const auto engines = enginesOf(*world, 3, {others, held, others});
    for (const auto& engine : engines) {
      engine->addModel(0, std::make_shared<SliceLayout>(Tensors{{"all", 64, 0}}, 64), {});
    }
    for (const auto& engine : engines) {
      engine->tensorReady({0, 0});
    }
    for (auto& [slice, done] : others->take(2)) {
      done(nullptr);
    }
    Engine& leaving = *engines[static_cast<std::size_t>(leaver)];
    CHECK(leaving.drain(Clock::now() + kForever));
    leaving.enterShutdownBarrier();
    // Rank 0 may not have heard of all by now, so more than rank 1 may be named at first.
    std::vector<Rank> awaited;
    do {
      awaited = leaving.awaited(Clock::now() + kForever);
    } while (awaited.size() != 1);
    CHECK_EQUAL(awaited.front(), 1);
    CHECK(!leaving.mayLeave(Clock::now()));
    held->take(1).front().second(nullptr);
    CHECK(leaving.mayLeave(Clock::now() + kForever));
    for (const auto& engine : engines) {
      engine->shutdown();
    }
  }
}

TEST(shutdownTwiceAndFromManyThreadsIsHarmless) {
  Job job(2);
  job.addModelEverywhere(0, kTwo, 64);
  test::onThreads(4, [&](int thread) { job.engine(thread % 2).shutdown(); });
  job.engine(0).shutdown();
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, job.ready(0, {0, 0})), "shut down");
  CHECK_THROWS(InvalidUsage, job.wait(0, {0, 0}));
}

TEST(shutdownEndsWhatIsUnderWay) {
  Lonely lonely;
  lonely.engine->tensorReady({0, 0});
  const auto held = lonely.transport->take(1);
  std::latch waiting(1);
  test::onThreads(2, [&](int thread) {
    if (thread == 0) {
      waiting.count_down();
      CHECK_CONTAINS(
          CHECK_THROWS(InvalidUsage, lonely.engine->wait({0, 0}, Clock::now() + kForever)),
          "shut down");
    } else {
      waiting.wait();
      lonely.engine->shutdown();
    }
  });
  held[0].second(nullptr);
}

TEST(callbacksAfterTheEngineIsGoneAreHarmless) {
  Lonely lonely;
  lonely.engine->tensorReady({0, 0});
  lonely.engine->tensorReady({0, 1});
  const auto held = lonely.transport->take(2);
  lonely.engine->shutdown();
  lonely.engine.reset();
  held[0].second(nullptr);
  held[1].second(std::make_exception_ptr(PeerLost("connection closed by peer")));
}

TEST(anEngineMayGoAwayInTheMiddleOfACallback) {
  for (int trial = 0; trial < 100; ++trial) {
    Lonely lonely;
    lonely.engine->tensorReady({0, 0});
    lonely.engine->tensorReady({0, 1});
    const auto held = lonely.transport->take(2);
    test::onThreads(3, [&](int thread) {
      if (thread < 2) {
        held[static_cast<std::size_t>(thread)].second(nullptr);
      } else {
        lonely.engine->shutdown();
        lonely.engine.reset();
      }
    });
  }
}

TEST(theWorldMayGoAwayWithItsLastEngine) {
  // The job is given up with transfers under way, so a callback may hold the last reference.
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<float> buffer(32, 1.0F);
    auto world = LoopbackWorld::create(1);
    auto engine = std::make_shared<Engine>(EngineOptions{}, world->transport(0), nullptr);
    engine->start();
    world->setBuffers(0, 0, {buffer.data()});
    engine->addModel(0, std::make_shared<SliceLayout>(kTwo, 64), {});
    world.reset();
    engine->tensorReady({0, 0});
    engine->tensorReady({0, 1});
    CHECK(engine->wait({0, 0}, Clock::now() + kForever));
    CHECK(engine->wait({0, 1}, Clock::now() + kForever));
    engine->shutdown();
    engine.reset();
  }
}

TEST(aFailedTransferIsAnErrorOnEveryRank) {
  // Rank 1's backend fails; nobody died, so the backend's own words are what everybody gets.
  const auto world = LoopbackWorld::create(3);
  const auto broken = std::make_shared<HeldTransport>();
  broken->refuses = true;
  std::vector<std::vector<float>> buffers(3, std::vector<float>(32));
  const auto engines = enginesOf(*world, 3, {world->transport(0), broken, world->transport(2)});
  for (Rank rank = 0; rank < 3; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    world->setBuffers(rank, 0, {buffers[index].data()});
    engines[index]->addModel(0, std::make_shared<SliceLayout>(kTwo, 64), {});
  }
  test::onThreads(3, [&](int rank) {
    Engine& engine = *engines[static_cast<std::size_t>(rank)];
    CHECK_CONTAINS(
        CHECK_THROWS(
            CollectiveError,
            [&] {
              engine.tensorReady({0, 0});
              engine.wait({0, 0}, Clock::now() + kForever);
            }()),
        "refuses");
  });
  for (const auto& engine : engines) {
    engine->shutdown();
  }
}

TEST(aMalformedMessageIsAFailureThatNamesItsSender) {
  const std::vector<ControlMessage> wrong{
      {MessageKind::kSlices, {}},         {MessageKind::kSlices, {0, SliceKey{0, 4000}.word()}},
      {MessageKind::kQuery, {1}},         {MessageKind::kReply, {5, 0, 0}},
      {MessageKind::kBarrier, {1}},       {MessageKind::kLeave, {1}},
      {static_cast<MessageKind>(99), {}},
  };
  for (const ControlMessage& message : wrong) {
    EngineOptions options;
    options.agreement = AgreementKind::kNegotiated; // rank 0 hears every report
    Job job(2, options);
    job.addModelEverywhere(0, kTwo, kSliceBytes);
    job.ready(0, {0, 0});
    job.engine(1).announce({0, 0}); // so both ranks wait
    job.world()->control(1)->send(0, message);
    for (const std::string& text : allFail(job, {0, 1}, {0, 0})) {
      CHECK_CONTAINS(text, "rank 1 sent a malformed control message");
    }
  }
}

template <typename T>
void checkClassEverywhere(const T& error) {
  for (const Rank failing : {0, 1}) {
    Job job(3);
    job.addModelEverywhere(0, kTwo, 64);
    for (const Rank rank : {0, 1, 2}) {
      if (rank != failing) {
        job.ready(rank, {0, 0});
      }
    }
    job.engine(failing).fail(std::make_exception_ptr(error));
    test::onThreads(3, [&](Rank rank) {
      if (rank != failing) {
        CHECK_CONTAINS(CHECK_THROWS(T, job.wait(rank, {0, 0})), "as I said");
      }
    });
  }
}

TEST(everyRankRaisesTheSameClass) {
  checkClassEverywhere(PeerLost("as I said"));
  checkClassEverywhere(TransferTimeout("as I said"));
  checkClassEverywhere(CollectiveError("as I said"));
}

TEST(aFailureIsToldEvenWhenShutdownFollowsAtOnce) {
  for (int trial = 0; trial < 20; ++trial) {
    Job job(2);
    job.addModelEverywhere(0, kTwo, 64);
    job.ready(0, {0, 0});
    job.engine(1).fail(std::make_exception_ptr(CollectiveError("a bad batch")));
    job.engine(1).shutdown();
    CHECK_CONTAINS(CHECK_THROWS(CollectiveError, job.wait(0, {0, 0})), "a bad batch");
  }
}

TEST(twoEnginesDyingAtOnceEndTheJob) {
  for (int trial = 0; trial < 20; ++trial) {
    Job job(4);
    job.addModelEverywhere(0, kTwo, 64);
    std::barrier together(2);
    test::onThreads(4, [&](int rank) {
      if (rank < 2) { // rank 0, who would relay, is one of them
        together.arrive_and_wait();
        job.world()->killRank(rank);
        job.engine(rank).fail(std::make_exception_ptr(CollectiveError("killed")));
        job.engine(rank).shutdown();
      } else {
        CHECK_THROWS(CollectiveError, [&] {
          job.ready(rank, {0, 0});
          job.wait(rank, {0, 0});
        }());
      }
    });
  }
}

TEST(mistakesOfTheUserDoNotBreakTheJob) {
  Job job(2);
  job.addModelEverywhere(0, kTwo, 64);
  CHECK_THROWS(InvalidUsage, job.addModel(0, 0, kTwo, 64));
  CHECK_THROWS(InvalidUsage, job.ready(0, {0, 9}));
  CHECK_THROWS(InvalidUsage, job.ready(0, {9, 0}));
  job.ready(0, {0, 0});
  CHECK_CONTAINS(CHECK_THROWS(InvalidUsage, job.ready(0, {0, 0})), "'front'");
  CHECK_THROWS(InvalidUsage, job.engine(0).removeModel(0));
  job.ready(1, {0, 0});
  test::onThreads(2, [&](int rank) { job.wait(rank, {0, 0}); });
  EngineOptions two;
  two.size = 2;
  CHECK_THROWS(InvalidUsage, Engine(two, std::make_shared<HeldTransport>(), nullptr));
}

// Tensors for a hold: "trigger" is ready just before "first", and "large" more than two leads
// before.
const Tensors kHeld{{"first", 64, 0}, {"large", 1 << 20, 0}, {"trigger", 64, 0}};
constexpr auto kLead = 300ms;

/// One step, from which the engine learns when to begin a hold with kLead.
void learnHold(Engine& engine, const std::function<void(TensorId)>& exchange) {
  engine.retune(AgreementKind::kLeader, Policy::kPriority, 2 << 20, kLead);
  exchange(1);
  std::this_thread::sleep_for(2 * kLead + 1ms); // a hold is about time
  exchange(2);
  exchange(0);
}

TEST(aWaiterEndsTheHold) {
  EngineOptions options;
  options.timeout = kForever;
  Job job(1, options);
  job.addModel(0, 0, kHeld, 1 << 20);
  learnHold(job.engine(0), [&](TensorId tensor) {
    job.ready(0, {0, tensor});
    job.wait(0, {0, tensor});
  });
  // The hold begins with "trigger", and "first" does not come.
  job.ready(0, {0, 2});
  job.ready(0, {0, 1});
  job.wait(0, {0, 2});
  job.wait(0, {0, 1});
}

/// The first slice travels with nothing large beside it, for a lead at most.
TEST(theFirstSliceTravelsAlone) {
  const auto transport = std::make_shared<HeldTransport>();
  const auto engine = std::make_shared<Engine>(EngineOptions{}, transport, nullptr);
  engine->start();
  const auto layout = std::make_shared<SliceLayout>(kHeld, 1 << 20);
  CHECK_EQUAL(layout->slices().size(), 3U);
  engine->addModel(0, layout, {});
  const auto ready = [&](TensorId tensor) { engine->tensorReady({0, tensor}); };
  const auto learnThenSetLead = [&](std::chrono::nanoseconds lead) {
    learnHold(*engine, [&](TensorId tensor) {
      ready(tensor);
      transport->take(1).front().second(nullptr);
    });
    engine->retune(AgreementKind::kLeader, Policy::kPriority, 2 << 20, lead);
  };

  learnThenSetLead(1h);
  ready(2);
  transport->take(1).front().second(nullptr);
  ready(1); // held
  ready(0);
  auto flights = transport->take(1);
  CHECK_EQUAL(flights.size(), 1U);
  CHECK_EQUAL(flights.front().first.index, 0U);
  flights.front().second(nullptr);
  flights = transport->take(1);
  CHECK_EQUAL(flights.front().first.index, 1U);
  flights.front().second(nullptr);

  learnThenSetLead(20ms);
  ready(2);
  transport->take(1).front().second(nullptr);
  ready(1);
  const auto begin = std::chrono::steady_clock::now();
  ready(0);
  auto first = transport->take(1); // and it does not arrive
  CHECK_EQUAL(first.front().first.index, 0U);
  flights = transport->take(1);
  CHECK(std::chrono::steady_clock::now() - begin >= 20ms);
  CHECK_EQUAL(flights.front().first.index, 1U);
  first.front().second(nullptr);
  flights.front().second(nullptr);
  engine->shutdown();
}

} // namespace hvd_order
