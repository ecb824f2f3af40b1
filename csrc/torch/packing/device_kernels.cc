#include "torch/packing/device_kernels.h"

#include <array>
#include <atomic>

#include "base/error.h"

namespace hvd_order {

namespace {

constexpr auto kTypes = static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

std::atomic<const KernelTable*>& placeOf(c10::DeviceType type) {
  static std::array<std::atomic<const KernelTable*>, kTypes> tables{};
  return tables.at(static_cast<std::size_t>(type));
}

// A template, so that a PyTorch without native_handle() compiles.
template <typename Stream>
struct Handles {
  static constexpr bool kKnown = requires(const Stream& stream) { stream.native_handle(); };
  static void* of(const Stream& stream) {
    if constexpr (kKnown) {
      return stream.native_handle();
    } else {
      throw InvalidUsage("this PyTorch does not tell the handles of streams");
    }
  }
};

} // namespace

void registerKernels(c10::DeviceType type, const KernelTable* kernels) {
  if (kernels->version != KernelTable::kVersion) {
    throw InvalidUsage("the kernels are of another version of hvd_order; build both again");
  }
  if (!Handles<c10::Stream>::kKnown) {
    throw InvalidUsage("this PyTorch does not tell the handles of streams; kernels need 2.11");
  }
  placeOf(type) = kernels;
}

const KernelTable* kernelsOf(c10::DeviceType type) {
  return placeOf(type);
}

void* handleOf(const c10::Stream& stream) {
  return Handles<c10::Stream>::of(stream);
}

} // namespace hvd_order
