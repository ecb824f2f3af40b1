#include "allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace test_device {

namespace {

constexpr std::size_t kAlignment = 512;
constexpr int kNoNumber = 0xFF; // as a float, a double or a half: NaN

} // namespace

CachingAllocator& CachingAllocator::get() {
  static auto* allocator = new CachingAllocator; // tensors may live longer than static objects
  return *allocator;
}

c10::DataPtr CachingAllocator::allocate(std::size_t bytes) {
  const c10::Device device(c10::DeviceType::PrivateUse1, 0);
  if (bytes == 0) {
    return {nullptr, nullptr, &release, device};
  }
  const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::int64_t stream = currentStream();
  const std::scoped_lock lock(mutex_);
  takeBackIdle();
  void* block = nullptr;
  std::vector<void*>& fitting = free_[{stream, size}];
  if (!fitting.empty()) {
    block = fitting.back(); // the newest: its last user may still be at it
    fitting.pop_back();
  } else {
    block = std::aligned_alloc(kAlignment, size);
    if (block == nullptr) {
      throw std::bad_alloc();
    }
    std::memset(block, kNoNumber, size);
  }
  blocks_[block] = {size, stream, {}, {}};
  return {block, block, &release, device};
}

c10::DeleterFnPtr CachingAllocator::raw_deleter() const {
  return &release;
}

void CachingAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  Device::get().stream(currentStream()).enqueue([=] { std::memcpy(to, from, bytes); });
}

void CachingAllocator::recordStream(void* block, std::int64_t stream) {
  const std::scoped_lock lock(mutex_);
  const auto known = blocks_.find(block);
  if (known != blocks_.end() && known->second.stream != stream) {
    known->second.alsoUsedOn.insert(stream);
  }
}

void CachingAllocator::release(void* block) {
  if (block != nullptr) {
    get().free(block);
  }
}

void CachingAllocator::free(void* address) {
  const std::scoped_lock lock(mutex_);
  Block& block = blocks_.at(address);
  for (const std::int64_t stream : block.alsoUsedOn) {
    block.busy.emplace_back();
    record(block.busy.back(), stream);
  }
  block.alsoUsedOn.clear();
  waiting_.push_back(address);
  takeBackIdle();
}

// Called under the lock.
void CachingAllocator::takeBackIdle() {
  std::erase_if(waiting_, [&](void* address) {
    const Block& block = blocks_.at(address);
    if (!std::all_of(block.busy.begin(), block.busy.end(), query)) {
      return false;
    }
    Device::get().stream(block.stream).enqueue([address, bytes = block.bytes] {
      std::memset(address, kNoNumber, bytes);
    });
    free_[{block.stream, block.bytes}].push_back(address);
    return true;
  });
}

} // namespace test_device
