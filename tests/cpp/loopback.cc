#include "loopback.h"

#include <algorithm>
#include <condition_variable>
#include <limits>

#include "base/error.h"
#include "scheduler/tree.h"

// Ranks as threads of one process: for tests of the engine, and the shortest example of a
// transport.
//
// Each rank issues slices in its own order. The n-th issue of every rank belongs to the n-th round,
// as with a real library of collectives. A round is carried out when the last rank has issued it,
// by the world's one thread; it is an error for all ranks if they issued different slices. Control
// messages pass the same thread, so the messages of two ranks arrive in order.
//
// Every callback runs on that thread, one at a time and without `mutex_`. A callback may destroy
// the last engine, and with it this world: the thread then finds `exists_` false and touches
// nothing more.
//
// A rank that is killed issues and sends nothing any more. What is open fails on the others. Rank 0
// is told of the loss of every rank, and all are told of rank 0's.

namespace hvd_order {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackWorld> world, Rank rank)
      : world_(std::move(world)), rank_(rank) {}

  void issue(SliceKey key, const Slice& slice, Done done) override {
    world_->issue({rank_, key, slice, std::move(done)});
  }
  void abort() noexcept override {}

 private:
  std::shared_ptr<LoopbackWorld> world_;
  Rank rank_;
};

class LoopbackControl final : public ControlChannel {
 public:
  LoopbackControl(std::shared_ptr<LoopbackWorld> world, Rank rank, int size)
      : world_(std::move(world)), rank_(rank), size_(size) {}

  void start(OnMessage onMessage, OnLost onLost) override {
    world_->listen(rank_, {std::move(onMessage), std::move(onLost)});
  }
  void send(Rank to, const ControlMessage& message) override {
    const bool neighbours =
        placeInTree(rank_, size_).isChild(to) || placeInTree(to, size_).isChild(rank_);
    HVDO_CHECK(
        (rank_ == 0) != (to == 0) || neighbours, "rank ", rank_, " has no connection to rank ", to);
    world_->send(rank_, to, message);
  }
  void stop() noexcept override {
    world_->silence(rank_);
  }

 private:
  std::shared_ptr<LoopbackWorld> world_;
  Rank rank_;
  int size_;
};

std::shared_ptr<LoopbackWorld> LoopbackWorld::create(int size) {
  return std::shared_ptr<LoopbackWorld>(new LoopbackWorld(size));
}

LoopbackWorld::LoopbackWorld(int size)
    : size_(size),
      dead_(static_cast<std::size_t>(size), false),
      issued_(static_cast<std::size_t>(size), 0),
      buffers_(static_cast<std::size_t>(size)) {
  thread_ = std::thread([this] { run(); });
}

LoopbackWorld::~LoopbackWorld() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wakeUp_.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) {
    *exists_ = false; // one of our callbacks destroyed the last engine
    thread_.detach();
  } else {
    thread_.join();
  }
}

std::shared_ptr<Transport> LoopbackWorld::transport(Rank rank) {
  return std::make_shared<LoopbackTransport>(shared_from_this(), rank);
}

std::shared_ptr<ControlChannel> LoopbackWorld::control(Rank rank) {
  return std::make_shared<LoopbackControl>(shared_from_this(), rank, size_);
}

void LoopbackWorld::setBuffers(Rank rank, ModelId model, std::vector<float*> buffers) {
  const std::scoped_lock lock(mutex_);
  auto& models = buffers_.at(static_cast<std::size_t>(rank));
  if (models.size() <= model) {
    models.resize(model + 1);
  }
  models[model] = std::move(buffers);
}

void LoopbackWorld::killRank(Rank rank) {
  std::vector<Issue> broken;
  {
    const std::scoped_lock lock(mutex_);
    dead_.at(static_cast<std::size_t>(rank)) = true;
    for (auto& [number, issues] : rounds_) {
      std::move(issues.begin(), issues.end(), std::back_inserter(broken));
    }
    rounds_.clear();
  }
  for (Issue& issue : broken) {
    if (issue.rank != rank) {
      post([done = std::move(issue.done)] {
        done(std::make_exception_ptr(PeerLost("connection closed by peer")));
      });
    }
  }
  const auto error = std::make_exception_ptr(PeerLost("connection closed by peer"));
  for (Rank other = 0; other < size_; ++other) {
    if (other != rank && (other == 0 || rank == 0)) {
      post([this, other, rank, error] {
        const std::scoped_lock lock(listenersMutex_);
        if (const auto it = listeners_.find(other); it != listeners_.end()) {
          it->second.onLost(rank, error);
        }
      });
    }
  }
}

std::vector<SliceKey> LoopbackWorld::history() const {
  const std::scoped_lock lock(mutex_);
  return history_;
}

void LoopbackWorld::issue(Issue issue) {
  const std::scoped_lock lock(mutex_);
  if (dead_[static_cast<std::size_t>(issue.rank)]) {
    return;
  }
  if (std::find(dead_.begin(), dead_.end(), true) != dead_.end()) {
    postLocked([done = std::move(issue.done)] {
      done(std::make_exception_ptr(PeerLost("connection closed by peer")));
    });
    return;
  }
  const std::size_t number = issued_[static_cast<std::size_t>(issue.rank)]++;
  auto& round = rounds_[number];
  round.push_back(std::move(issue));
  if (round.size() == static_cast<std::size_t>(size_)) {
    postLocked([this, complete = std::make_shared<std::vector<Issue>>(std::move(round))] {
      finish(std::move(*complete));
    });
    rounds_.erase(number);
  }
}

void LoopbackWorld::finish(std::vector<Issue> issues) {
  std::exception_ptr error;
  {
    const std::scoped_lock lock(mutex_);
    const Issue& first = issues.front();
    for (const Issue& other : issues) {
      if (!(other.key == first.key)) {
        error = std::make_exception_ptr(CollectiveError(concat(
            "rank ", first.rank, " issued slice ", first.key.index, ", rank ", other.rank,
            " slice ", other.key.index)));
      }
    }
    if (!error) {
      history_.push_back(first.key);
      carry(issues);
    }
  }
  for (Issue& issue : issues) {
    issue.done(error);
  }
}

// Called under the lock. Element i is in the shard of rank i / part.
void LoopbackWorld::carry(const std::vector<Issue>& issues) {
  const Slice& slice = issues.front().slice;
  const auto at = static_cast<std::size_t>(slice.offsetBytes) / sizeof(float);
  const auto elements = static_cast<std::size_t>(slice.sizeBytes) / sizeof(float);
  std::vector<float*> data(issues.size()); // by rank
  for (const Issue& issue : issues) {
    auto& models = buffers_[static_cast<std::size_t>(issue.rank)];
    data[static_cast<std::size_t>(issue.rank)] =
        models.at(issue.key.model).at(issue.slice.buffer) + at;
  }
  const std::size_t part = (elements + data.size() - 1) / data.size();
  for (std::size_t i = 0; i < elements; ++i) {
    float* const owner = data[i / part] + i;
    float result = *owner;
    if (slice.operation != Operation::kAllGather) {
      result = 0;
      for (const float* values : data) {
        result += values[i];
      }
    }
    const bool scatters = slice.operation == Operation::kReduceScatter;
    for (float* values : data) {
      values[i] = scatters ? std::numeric_limits<float>::quiet_NaN() : result;
    }
    *owner = result;
  }
}

void LoopbackWorld::send(Rank from, Rank to, ControlMessage message) {
  {
    const std::scoped_lock lock(mutex_);
    if (dead_[static_cast<std::size_t>(from)]) {
      return;
    }
    if (dead_[static_cast<std::size_t>(to)]) {
      throw PeerLost(concat("rank ", to, " is gone"));
    }
  }
  auto deliver = [from, message = std::move(message)](const ControlListener& listener) {
    listener.onMessage(from, message);
  };
  post([this, to, deliver = std::move(deliver)] {
    const std::scoped_lock lock(listenersMutex_);
    if (const auto it = listeners_.find(to); it != listeners_.end()) {
      deliver(it->second);
    } else {
      undelivered_.emplace_back(to, deliver); // the peer starts listening later
    }
  });
}

void LoopbackWorld::listen(Rank rank, ControlListener listener) {
  int turn = 0;
  {
    const std::scoped_lock lock(listenersMutex_);
    turn = ++turns_[rank];
  }
  post([this, rank, turn, listener = std::move(listener)] {
    const std::scoped_lock lock(listenersMutex_);
    if (turns_[rank] != turn) {
      return; // silenced before this work ran
    }
    for (auto& [to, deliver] : undelivered_) {
      if (to == rank) {
        deliver(listener);
      }
    }
    std::erase_if(undelivered_, [rank](const auto& entry) { return entry.first == rank; });
    listeners_[rank] = listener;
  });
}

void LoopbackWorld::silence(Rank rank) {
  const std::scoped_lock lock(listenersMutex_);
  ++turns_[rank];
  listeners_.erase(rank);
}

void LoopbackWorld::post(std::function<void()> work) {
  const std::scoped_lock lock(mutex_);
  postLocked(std::move(work));
}

void LoopbackWorld::postLocked(std::function<void()> work) {
  work_.push_back(std::move(work));
  wakeUp_.notify_one();
}

void LoopbackWorld::run() {
  const std::shared_ptr<bool> exists = exists_;
  std::vector<std::function<void()>> todo;
  std::unique_lock lock(mutex_);
  while (true) {
    wakeUp_.wait(lock, [&] { return stop_ || !work_.empty(); });
    if (stop_) {
      return;
    }
    todo.swap(work_);
    lock.unlock();
    for (auto& work : todo) {
      work();
      work = nullptr; // may hold the last owner
      if (!*exists) {
        return;
      }
    }
    todo.clear();
    lock.lock();
  }
}

} // namespace hvd_order
