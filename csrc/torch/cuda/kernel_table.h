#pragma once

#include <cstddef>
#include <cstdint>

#include "base/element_type.h"

// What a device's kernels are to their callers: plain functions of addresses. The kernels of CUDA
// are a library of their own (hvd_order/_native/_cuda), which needs no PyTorch; _torch needs no
// CUDA.
namespace hvd_order {

/// How the elements of a run travel.
enum class WireFormat : std::uint8_t {
  kExact,    ///< as they are
  kBfloat16, ///< rounded
  kFloat16,  ///< rounded
  kInt8,     ///< in blocks with a scale (codes.h)
};

/// Neighbouring elements of a buffer and where they lie in a message.
struct CodedRun {
  void* values;
  float* residual; ///< null: what rounding loses is lost
  float* scales;   ///< of kInt8: one for each block
  void* codes;
  std::int64_t count;
  WireFormat format;
};

/// The messages of several senders that are added up, one behind the other in memory, equally long.
struct Senders {
  std::int32_t count;  ///< with this one, if it is one of them
  std::int32_t own;    ///< the place among them of the values themselves, which have no message;
                       ///< -1: all have one
  std::int64_t stride; ///< bytes from message to message
};

/// One array of elements and where it goes.
struct KernelArray {
  const void* from;
  void* to;
  std::int64_t count;
};

/// Arrays are worked on in chunks of so many elements, one block of threads each.
inline constexpr std::int64_t kChunkElements = 4096;

inline std::int64_t chunksOf(std::int64_t elements) {
  return (elements + kChunkElements - 1) / kChunkElements;
}

struct KernelTable {
  static constexpr std::int32_t kVersion = 2;
  static constexpr const char* kCapsule = "hvd_order.KernelTable"; ///< name of its PyCapsule

  std::int32_t version;
  /// Enqueues to = cast(scale * from) for all arrays.
  /// `from` is float32, or of the format of `to`. The device of `stream` must be current.
  /// @return null, or the error in words.
  const char* (*pack)(
      const KernelArray* arrays,
      std::size_t count,
      ElementType from,
      ElementType to,
      float scale,
      void* stream);
  /// Enqueues to = scale * float32(from) for all arrays; `from` has 16 bits, `to` is float32.
  /// @param squares null, or the sum of squares of what was put into `to`, one for each chunk,
  /// array
  ///   after array.
  const char* (*unpack)(
      const KernelArray* arrays,
      std::size_t count,
      ElementType from,
      float scale,
      double* squares,
      void* stream);
  /// Enqueues, for all runs: values + residual into the message, and what it lacks of them into the
  /// residual.
  /// @param element of the values. Formats other than kExact are for elements of at most 32 bits.
  /// @param writesBack whether the values become those that receivers decode.
  const char* (*encode)(
      const CodedRun* runs,
      std::size_t count,
      ElementType element,
      bool writesBack,
      void* stream);
  /// Enqueues, for all runs: values = the sum of the senders' messages, decoded, in their order, in
  /// float32 (float64 for float64), rounded once. `scales` and `codes` are those of the first
  /// message.
  const char* (*decode)(
      const CodedRun* runs,
      std::size_t count,
      ElementType element,
      Senders senders,
      void* stream);
};

} // namespace hvd_order