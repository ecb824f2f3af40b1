#include "torch/c10d/all_reduce/horovod_transport.h"

#include <dlfcn.h>

#include <algorithm>

#include "base/error.h"

namespace hvd_order {

namespace {

// Horovod's constants.
constexpr int kSum = 1;
constexpr int kGlobalProcessSet = 0;

// Time between two polls of a handle. Horovod itself looks for work once a millisecond.
constexpr std::chrono::microseconds kPause{250};

// Mangled names of horovod::torch::DoAllreduce(at::Tensor, at::Tensor, int, const std::string&,
// int, double, double, int) and the other functions.
#define HVDO_ALLREDUCE_SIGNATURE \
  "EN2at6TensorES2_iRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEiddi"
constexpr const char* kAllReduce = "_ZN7horovod5torch11DoAllreduce" HVDO_ALLREDUCE_SIGNATURE;
constexpr const char* kAllReduceThroughHost =
    "_ZN7horovod5torch20DoAllreduceCudaOnCPU" HVDO_ALLREDUCE_SIGNATURE;
constexpr const char* kPoll = "_ZN7horovod5torch10PollHandleEi";
constexpr const char* kWaitAndClear = "_ZN7horovod5torch12WaitAndClearEi";

template <typename Function>
Function* look(void* library, const std::string& path, const char* symbol) {
  void* const found = dlsym(library, symbol);
  if (found == nullptr) {
    throw InvalidUsage(concat(
        path, " has no ", symbol,
        "; the transport knows Horovod 0.28, built for this PyTorch with ",
        "its C++ ABI. Use HVD_ORDER_TRANSPORT=c10d"));
  }
  return reinterpret_cast<Function*>(found);
}

} // namespace

/// An event that happens when Horovod has ended the operation, with or without an error.
class HorovodTransport::Handle final : public DeviceEvent {
 public:
  Handle(Poll* poll, int handle) : poll_(poll), handle_(handle) {}
  bool happened() override {
    return poll_(handle_) != 0;
  }

 private:
  Poll* const poll_;
  const int handle_;
};

HorovodTransport::HorovodTransport(const std::string& library, bool gpuOnHost) : handles_(kPause) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    throw InvalidUsage(concat("Horovod's library cannot be loaded: ", dlerror()));
  }
  allReduceOnHost_ = look<AllReduce>(opened, library, kAllReduce);
  allReduceOnDevice_ =
      gpuOnHost ? look<AllReduce>(opened, library, kAllReduceThroughHost) : allReduceOnHost_;
  poll_ = look<Poll>(opened, library, kPoll);
  waitAndClear_ = look<WaitAndClear>(opened, library, kWaitAndClear);
}

void HorovodTransport::begin(Sum sum) {
  const at::Tensor& tensor = sum.tensor;
  AllReduce* const start = tensor.device().is_cpu() ? allReduceOnHost_ : allReduceOnDevice_;
  const int handle = start(tensor, tensor, 1, sum.name, kSum, 1.0, 1.0, kGlobalProcessSet);
  const std::size_t queue = takeQueue();
  handles_.add(
      queue, std::make_unique<Handle>(poll_, handle),
      [self = shared_from_this(), handle, queue, tensor,
       done = std::move(sum.done)](std::exception_ptr error) {
        self->giveBack(queue);
        try {
          if (error) {
            std::rethrow_exception(error);
          }
          self->waitAndClear_(handle); // the operation is done: this only fetches its result
        } catch (const std::exception& e) {
          error = collectiveError(e.what());
        }
        done(error);
      });
}

/// Operations may end in a different order than they began, so each has its own queue.
std::size_t HorovodTransport::takeQueue() {
  const std::scoped_lock lock(mutex_);
  const auto free = std::find(busy_.begin(), busy_.end(), false);
  const auto queue = static_cast<std::size_t>(free - busy_.begin());
  if (free == busy_.end()) {
    busy_.push_back(true);
  } else {
    *free = true;
  }
  return queue;
}

void HorovodTransport::giveBack(std::size_t queue) {
  const std::scoped_lock lock(mutex_);
  busy_[queue] = false;
}

} // namespace hvd_order
