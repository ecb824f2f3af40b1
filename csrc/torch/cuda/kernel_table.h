#pragma once

#include <cstddef>
#include <cstdint>

// What a device's kernels are to their callers: plain functions of addresses. The kernels of CUDA
// are a library of their own (hvd_order/_native/_cuda), which needs no PyTorch; _torch needs no
// CUDA.
namespace hvd_order {

enum class Format : std::int32_t { kFloat32, kBfloat16, kFloat16 };

/// One array of elements and where it goes.
struct KernelArray {
  const void* from;
  void* to;
  float* residual; ///< of `pack` with error feedback; else null
  std::int64_t count;
};

/// Arrays are worked on in chunks of so many elements, one block of threads each.
inline constexpr std::int64_t kChunkElements = 4096;

inline std::int64_t chunksOf(std::int64_t elements) {
  return (elements + kChunkElements - 1) / kChunkElements;
}

struct KernelTable {
  static constexpr std::int32_t kVersion = 1;
  static constexpr const char* kCapsule = "hvd_order.KernelTable"; ///< name of its PyCapsule

  std::int32_t version;
  /// Enqueues to = cast(scale * from), or with residuals what `elements.h` says, for all arrays.
  /// `from` is float32, or of the format of `to`. The device of `stream` must be current.
  /// @return null, or the error in words.
  const char* (*pack)(
      const KernelArray* arrays,
      std::size_t count,
      Format from,
      Format to,
      float scale,
      void* stream);
  /// Enqueues to = scale * float32(from) for all arrays; `from` has 16 bits, `to` is float32.
  /// @param squares null, or the sum of squares of what was put into `to`, one for each chunk,
  /// array
  ///   after array.
  const char* (*unpack)(
      const KernelArray* arrays,
      std::size_t count,
      Format from,
      float scale,
      double* squares,
      void* stream);
};

} // namespace hvd_order
