#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace hvd_order {

/// Bytes that travel with a frame. All holders share the memory. The code that allocates a payload
/// fills it before it passes the payload on; nothing writes to it afterwards.
struct Payload {
  static constexpr std::size_t kAlignment = 64;

  std::shared_ptr<std::byte> memory;
  std::size_t sizeBytes = 0;

  [[nodiscard]] std::byte* data() const {
    return memory.get();
  }
  explicit operator bool() const {
    return memory != nullptr;
  }

  /// A new payload with unspecified content.
  static Payload allocate(std::size_t sizeBytes) {
    auto* memory = static_cast<std::byte*>(
        ::operator new(sizeBytes == 0 ? 1 : sizeBytes, std::align_val_t{kAlignment}));
    return {std::shared_ptr<std::byte>(memory, free), sizeBytes};
  }
  /// A new payload with this content.
  static Payload copyOf(std::span<const std::byte> bytes) {
    Payload payload = allocate(bytes.size());
    std::copy(bytes.begin(), bytes.end(), payload.data());
    return payload;
  }
  static Payload copyOf(const std::string& text) {
    return copyOf(std::as_bytes(std::span(text.data(), text.size())));
  }
  static void free(std::byte* memory) {
    ::operator delete(memory, std::align_val_t{kAlignment});
  }
};

/// Gives out memory of one size and takes it back when its last holder releases it.
///
/// Thread safety: all methods may be called from any thread; memory from the pool may outlive it.
class BufferPool final : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(std::size_t sizeBytes) : sizeBytes_(sizeBytes) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool() {
    for (std::byte* memory : free_) {
      Payload::free(memory);
    }
  }

  [[nodiscard]] Payload take() {
    std::byte* memory = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      if (!free_.empty()) {
        memory = free_.back();
        free_.pop_back();
      }
    }
    if (memory == nullptr) {
      memory = static_cast<std::byte*>(
          ::operator new(sizeBytes_, std::align_val_t{Payload::kAlignment}));
    }
    const auto giveBack = [pool = weak_from_this()](std::byte* used) {
      const auto alive = pool.lock();
      if (!alive || !alive->takeBack(used)) {
        Payload::free(used);
      }
    };
    return {std::shared_ptr<std::byte>(memory, giveBack), sizeBytes_};
  }

 private:
  // If this many blocks are unused, further ones return to the system.
  static constexpr std::size_t kMostUnused = 64;

  bool takeBack(std::byte* memory) {
    const std::scoped_lock lock(mutex_);
    if (free_.size() >= kMostUnused) {
      return false;
    }
    free_.push_back(memory);
    return true;
  }

  const std::size_t sizeBytes_;
  std::mutex mutex_; // guards `free_`
  std::vector<std::byte*> free_;
};

} // namespace hvd_order
