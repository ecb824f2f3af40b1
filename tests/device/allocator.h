#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "streams.h"

namespace test_device {

/// A caching allocator with CUDA's rule: a freed block goes at once to the next allocation on the
/// stream that it was allocated on, whatever other streams do with it, unless they were named by
/// `recordStream`. Freed memory is overwritten in the order of its stream, so that a reader that
/// did not wait finds NaN.
class CachingAllocator final : public c10::Allocator {
 public:
  static CachingAllocator& get();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  void recordStream(void* block, std::int64_t stream);

 private:
  struct Block {
    std::size_t bytes = 0;
    std::int64_t stream = 0;
    std::set<std::int64_t> alsoUsedOn;
    std::vector<Event> busy; // of a freed block
  };

  static void release(void* block);
  void free(void* block);
  void takeBackIdle();

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::pair<std::int64_t, std::size_t>, std::vector<void*>> free_; // by stream and size
  std::vector<void*> waiting_; // freed, but other streams may still use them
};

} // namespace test_device
