#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

// Replaces the global operator new of a program by one that counts. Include in one file of it only.
// Not inlined: GCC would take malloc and free for a mismatched pair.

namespace hvd_order::test {

inline std::atomic<long> allocations = 0;

} // namespace hvd_order::test

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++hvd_order::test::allocations;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}

[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  ++hvd_order::test::allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);
}
