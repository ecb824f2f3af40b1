// The kernels of hvd_order on this device: tasks of a stream that run the element functions of CUDA
// on the host. A stream's id plus one is its handle.

#include "kernels.h"

#include <vector>

#include "streams.h"
#include "torch/cuda/host_codes.h"
#include "torch/cuda/host_kernels.h"

namespace test_device {

namespace {

using namespace hvd_order;

template <typename Array, typename Function>
const char* enqueue(const Array* arrays, std::size_t count, void* stream, Function&& each) {
  ++counts().kernelLaunches;
  const auto id = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(stream)) - 1;
  Device::get().stream(id).enqueue([arrays = std::vector(arrays, arrays + count),
                                    each = std::forward<Function>(each)]() mutable {
    for (const Array& array : arrays) {
      each(array);
    }
  });
  return nullptr;
}

const char* pack(
    const KernelArray* arrays,
    std::size_t count,
    ElementType from,
    ElementType to,
    float scale,
    void* stream) {
  return enqueue(arrays, count, stream, [=](const KernelArray& array) {
    packOnHost(array, 0, array.count, from, to, scale);
  });
}

const char* unpack(
    const KernelArray* arrays,
    std::size_t count,
    ElementType from,
    float scale,
    double* squares,
    void* stream) {
  return enqueue(arrays, count, stream, [=](const KernelArray& array) mutable {
    for (std::int64_t chunk = 0; chunk < chunksOf(array.count); ++chunk) {
      unpackOnHost(array, chunk, from, scale, squares);
      squares += squares == nullptr ? 0 : 1;
    }
  });
}

const char* encode(
    const CodedRun* runs,
    std::size_t count,
    ElementType element,
    bool writesBack,
    void* stream) {
  return enqueue(
      runs, count, stream, [=](const CodedRun& run) { encodeOnHost(run, element, writesBack); });
}

const char* decode(
    const CodedRun* runs,
    std::size_t count,
    ElementType element,
    Senders senders,
    void* stream) {
  return enqueue(
      runs, count, stream, [=](const CodedRun& run) { decodeOnHost(run, element, senders); });
}

} // namespace

const KernelTable& kernels() {
  static constexpr KernelTable kTable{KernelTable::kVersion, &pack, &unpack, &encode, &decode};
  return kTable;
}

} // namespace test_device
