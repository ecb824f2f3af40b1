// The kernels for CUDA. Each does in one pass, and for many arrays in one launch, what takes
// several operators of PyTorch.

#include <cuda_runtime.h>

#include <algorithm>

#include "torch/cuda/coding_kernels.cuh"
#include "torch/cuda/elements.h"
#include "torch/cuda/kernels.h"

namespace hvd_order {

namespace {

constexpr int kGroupsPerChunk = kChunkElements / kGroup;
constexpr int kWarp = 32;
// The table of arrays is an argument of the kernel, so no copy precedes the launch. Small launches
// are common, and a launch copies the whole argument.
constexpr int kFew = 32;
constexpr int kMany = 1000; // 24 bytes each; an argument has at most 32,764

struct Entry {
  const void* from;
  void* to;
  std::int32_t firstChunk; // number of the chunks of the arrays before
  std::int32_t last;       // elements of the last chunk
};

template <int kCapacity>
struct Table {
  Entry entries[kCapacity];
  std::int32_t count;
  std::int32_t chunks;
};

/// The part of one array that a block of threads works on.
template <typename From, typename To>
struct Chunk {
  const From* from;
  To* to;
  int elements;
};

template <typename From, typename To, int kCapacity>
__device__ Chunk<From, To> chunkOf(const Table<kCapacity>& table, int chunk) {
  int low = 0; // the last entry whose first chunk is not behind `chunk`
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].firstChunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Entry& entry = table.entries[low];
  const int end = low + 1 < table.count ? table.entries[low + 1].firstChunk : table.chunks;
  const std::int64_t offset = std::int64_t{chunk - entry.firstChunk} * kChunkElements;
  return {
      static_cast<const From*>(entry.from) + offset, static_cast<To*>(entry.to) + offset,
      chunk + 1 == end ? entry.last : static_cast<int>(kChunkElements)};
}

/// Eight elements, read and written in words of 16 bytes.
template <typename T>
struct alignas(16) Group {
  T value[kGroup];
};

template <typename T>
__device__ bool aligned(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

template <typename T>
__device__ Group<T> load(const T* from, int count, bool whole) {
  if (whole) {
    return *reinterpret_cast<const Group<T>*>(from);
  }
  Group<T> group{};
  for (int i = 0; i < count; ++i) {
    group.value[i] = from[i];
  }
  return group;
}

template <typename T>
__device__ void store(T* to, const Group<T>& group, int count, bool whole) {
  if (whole) {
    *reinterpret_cast<Group<T>*>(to) = group;
    return;
  }
  for (int i = 0; i < count; ++i) {
    to[i] = group.value[i];
  }
}

template <typename From, typename To, int kCapacity>
__global__ void __launch_bounds__(kLanes)
    packKernel(const __grid_constant__ Table<kCapacity> table, float scale) {
  using Source = typename From::Stored;
  using Target = typename To::Stored;
  const auto chunk = chunkOf<Source, Target>(table, static_cast<int>(blockIdx.x));
  const bool words = aligned(chunk.from) && aligned(chunk.to);
  if (!words) { // neighbouring threads take neighbouring elements, so that the reads are joined
    for (int i = static_cast<int>(threadIdx.x); i < chunk.elements; i += kLanes) {
      chunk.to[i] = scaled<From, To>(chunk.from[i], scale);
    }
    return;
  }
  for (int group = static_cast<int>(threadIdx.x); group < kGroupsPerChunk; group += kLanes) {
    const int begin = group * kGroup;
    const int count = min(kGroup, chunk.elements - begin);
    if (count <= 0) {
      break;
    }
    const bool whole = count == kGroup;
    const Group<Source> from = load(chunk.from + begin, count, whole);
    Group<Target> to;
    for (int i = 0; i < kGroup; ++i) {
      to.value[i] = scaled<From, To>(from.value[i], scale);
    }
    store(chunk.to + begin, to, count, whole);
  }
}

template <typename From, int kCapacity>
__global__ void __launch_bounds__(kLanes)
    unpackKernel(const __grid_constant__ Table<kCapacity> table, float scale, double* squares) {
  using Source = typename From::Stored;
  const auto chunk = chunkOf<Source, float>(table, static_cast<int>(blockIdx.x));
  const bool words = aligned(chunk.from) && aligned(chunk.to);
  double sum = 0.0;
  for (int group = static_cast<int>(threadIdx.x); group < kGroupsPerChunk; group += kLanes) {
    const int begin = group * kGroup;
    const int count = min(kGroup, chunk.elements - begin);
    if (count <= 0) {
      break;
    }
    const bool whole = words && count == kGroup;
    const Group<Source> from = load(chunk.from + begin, count, whole);
    Group<float> to;
    for (int i = 0; i < kGroup; ++i) {
      to.value[i] = scaled<From, Float32>(from.value[i], scale);
    }
    store(chunk.to + begin, to, count, whole);
    for (int i = 0; i < count; ++i) {
      const double value = to.value[i];
      sum += value * value;
    }
  }
  if (squares == nullptr) {
    return;
  }
  // The order of elements.h: the first warp adds what is a warp or more apart, and its threads
  // add the rest among themselves, without a barrier.
  __shared__ double lanes[kLanes];
  lanes[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kWarp) {
    return;
  }
  double parts[kLanes / kWarp];
#pragma unroll
  for (int i = 0; i < kLanes / kWarp; ++i) {
    parts[i] = lanes[threadIdx.x + i * kWarp];
  }
#pragma unroll
  for (int half = kLanes / kWarp / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      parts[i] += parts[i + half];
    }
  }
  sum = parts[0];
  for (int half = kWarp / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffff, sum, half);
  }
  if (threadIdx.x == 0) {
    squares[blockIdx.x] = sum;
  }
}

/// Calls launch(table, stream) for tables of up to kCapacity arrays.
template <int kCapacity, typename Launch>
const char* inTables(const KernelArray* arrays, std::size_t count, const Launch& launch) {
  std::size_t next = 0;
  while (next < count) {
    Table<kCapacity> table{};
    std::int64_t chunks = 0;
    for (; next < count && table.count < kCapacity; ++next) {
      const KernelArray& array = arrays[next];
      if (array.count == 0) {
        continue;
      }
      table.entries[table.count++] = {
          array.from, array.to, static_cast<std::int32_t>(chunks),
          static_cast<std::int32_t>((array.count - 1) % kChunkElements + 1)};
      chunks += chunksOf(array.count);
    }
    if (chunks > INT32_MAX) {
      return "more than 8 * 10^12 elements in one launch";
    }
    table.chunks = static_cast<std::int32_t>(chunks);
    if (chunks > 0) {
      launch(table);
    }
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Launch>
const char* inTables(const KernelArray* arrays, std::size_t count, const Launch& launch) {
  return count <= kFew ? inTables<kFew>(arrays, count, launch)
                       : inTables<kMany>(arrays, count, launch);
}

template <typename From, typename To>
const char*
launchPack(const KernelArray* arrays, std::size_t count, float scale, cudaStream_t stream) {
  return inTables(arrays, count, [&](const auto& table) {
    packKernel<From, To><<<table.chunks, kLanes, 0, stream>>>(table, scale);
  });
}

template <typename From>
const char* launchUnpack(
    const KernelArray* arrays,
    std::size_t count,
    float scale,
    double* squares,
    cudaStream_t stream) {
  return inTables(arrays, count, [&](const auto& table) {
    unpackKernel<From><<<table.chunks, kLanes, 0, stream>>>(table, scale, squares);
    squares += squares == nullptr ? 0 : table.chunks;
  });
}

const char* pack(
    const KernelArray* arrays,
    std::size_t count,
    ElementType from,
    ElementType to,
    float scale,
    void* stream) {
  const auto run = [&](auto* launch) {
    return launch(arrays, count, scale, static_cast<cudaStream_t>(stream));
  };
  if (from == ElementType::kFloat32) {
    switch (to) {
      case ElementType::kFloat32:
        return run(&launchPack<Float32, Float32>);
      case ElementType::kBfloat16:
        return run(&launchPack<Float32, Bfloat16>);
      case ElementType::kFloat16:
        return run(&launchPack<Float32, Float16>);
      case ElementType::kFloat64:
        break;
    }
  }
  if (from != to) {
    return "no kernel for these formats";
  }
  return run(
      to == ElementType::kBfloat16 ? &launchPack<Bfloat16, Bfloat16>
                                   : &launchPack<Float16, Float16>);
}

const char* unpack(
    const KernelArray* arrays,
    std::size_t count,
    ElementType from,
    float scale,
    double* squares,
    void* stream) {
  const auto launch =
      from == ElementType::kBfloat16 ? &launchUnpack<Bfloat16> : &launchUnpack<Float16>;
  return launch(arrays, count, scale, squares, static_cast<cudaStream_t>(stream));
}

} // namespace

const KernelTable& cudaKernels() {
  static constexpr KernelTable kTable{
      KernelTable::kVersion, &pack, &unpack, &coding::encode, &coding::decode};
  return kTable;
}

CudaState cudaState() {
  CudaState state;
  cudaRuntimeGetVersion(&state.runtime);
  cudaDriverGetVersion(&state.driver);
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  cudaFuncAttributes attributes;
  // Loads the kernels: fails where none of the compiled architectures fits the device.
  const cudaError_t loaded = error == cudaSuccess
      ? cudaFuncGetAttributes(&attributes, unpackKernel<Bfloat16, kFew>)
      : error;
  state.error = loaded == cudaSuccess ? nullptr : cudaGetErrorString(loaded);
  cudaGetLastError(); // so that PyTorch does not find it
  return state;
}

} // namespace hvd_order
