#include "torch/packing/packing.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "torch/cuda/host_kernels.h"
#include "torch/packing/device_kernels.h"
#include "torch/packing/element_type.h"

// Gradients into buffers and sums out of them: one pass over memory each, wherever a kernel exists.
//
// A packing is a copy that scales and may cast to 16 bits. Kernels do this for float32 and the two
// 16-bit formats if both tensors have their elements in one order: those of the host
// (torch/cuda/host_kernels.cc) in parallel ranges, those of a device (device_kernels.h) in one
// launch for all arrays of a kind, because a launch costs more than a small gradient's copy.
// Everything else takes PyTorch's operators, several passes over memory.
//
// Unpacking is the way back, and with `squares` also sums the squares of the results, for norms. An
// array is cut into chunks of a fixed number of elements, and each chunk gives one number. Whoever
// adds the numbers does so in their order.
//
// Invariant: host and device use the same element functions (torch/cuda/elements.h) and the same
// chunks, so results do not depend on the number of threads or on which of them ran.

namespace hvd_order {

namespace {

// 256 KiB of float32, which a GPU of 4 TB/s copies in a tenth of the time of a launch.
constexpr std::int64_t kMostElementsTogether = 65536;

/// The type of elements that kernels pack and unpack.
std::optional<ElementType> formatOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
      return elementTypeOf(tensor);
    default:
      return std::nullopt;
  }
}

/// What the arrays of one launch have in common.
struct PackLaunch {
  c10::Device device = at::kCPU;
  ElementType from = ElementType::kFloat32;
  ElementType to = ElementType::kFloat32;
  double scale = 1.0;

  bool operator==(const PackLaunch&) const = default;
};

bool sameOrder(const at::Tensor& a, const at::Tensor& b) {
  return a.strides() == b.strides() && b.is_non_overlapping_and_dense();
}

/// The kind of launch that packs this; nothing if no kernel does.
std::optional<PackLaunch> kernelFor(const Packing& packing) {
  const auto from = formatOf(packing.from);
  const auto to = formatOf(packing.to);
  const c10::Device device = packing.to.device();
  const bool exists = from && to && (from == to || from == ElementType::kFloat32) &&
      (device.is_cpu() || kernelsOf(device.type()) != nullptr);
  if (!exists || !sameOrder(packing.from, packing.to)) {
    return std::nullopt;
  }
  return PackLaunch{device, *from, *to, packing.scale};
}

KernelArray arrayOf(const at::Tensor& from, at::Tensor to) {
  return {from.const_data_ptr(), to.mutable_data_ptr(), to.numel()};
}

void runKernel(const PackLaunch& kind, const std::vector<KernelArray>& arrays) {
  const auto scale = static_cast<float>(kind.scale);
  if (!kind.device.is_cpu()) {
    launchOn(kind.device, [&](const KernelTable& kernels, void* stream) {
      return kernels.pack(arrays.data(), arrays.size(), kind.from, kind.to, scale, stream);
    });
    return;
  }
  for (const KernelArray& array : arrays) {
    at::parallel_for(
        0, array.count, at::internal::GRAIN_SIZE, [&](std::int64_t begin, std::int64_t end) {
          packOnHost(array, begin, end, kind.from, kind.to, scale);
        });
  }
}

void runOperators(const Packing& packing) {
  at::Tensor to = packing.to;
  at::mul_out(to, packing.from, at::native::wrapped_scalar_tensor(packing.scale));
}

bool hasUnpackKernel(const Unpacking& unpacking) {
  const auto from = formatOf(unpacking.from);
  const c10::Device device = unpacking.to.device();
  return from && from != ElementType::kFloat32 && unpacking.to.scalar_type() == at::kFloat &&
      sameOrder(unpacking.from, unpacking.to) &&
      (device.is_cpu() || kernelsOf(device.type()) != nullptr);
}

struct UnpackLaunch {
  c10::Device device;
  ElementType from;
  std::vector<std::size_t> places; // in the list of the caller
  std::vector<KernelArray> arrays;
  std::vector<std::int64_t> chunks; // of each array
};

void runKernel(const UnpackLaunch& launch, float scale, double* squares) {
  if (!launch.device.is_cpu()) {
    launchOn(launch.device, [&](const KernelTable& kernels, void* stream) {
      return kernels.unpack(
          launch.arrays.data(), launch.arrays.size(), launch.from, scale, squares, stream);
    });
    return;
  }
  for (std::size_t i = 0; i < launch.arrays.size(); ++i) {
    const std::int64_t grain = at::internal::GRAIN_SIZE / kChunkElements;
    at::parallel_for(0, launch.chunks[i], grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        double* square = squares == nullptr ? nullptr : squares + chunk;
        unpackOnHost(launch.arrays[i], chunk, launch.from, scale, square);
      }
    });
    squares += squares == nullptr ? 0 : launch.chunks[i];
  }
}

} // namespace

bool canPack(const at::Tensor& from, const at::Tensor& to) {
  const bool narrows = c10::isFloatingType(from.scalar_type()) &&
      c10::isReducedFloatingType(to.scalar_type()) && from.element_size() > to.element_size();
  return from.layout() == at::kStrided && from.device() == to.device() &&
      (from.dtype() == to.dtype() || narrows) && from.sizes() == to.sizes();
}

bool isBestPackedWithOthers(const Packing& packing) {
  return !packing.to.is_cpu() && packing.to.numel() <= kMostElementsTogether &&
      kernelFor(packing).has_value();
}

void pack(std::span<const Packing> packings) {
  const at::NoGradGuard noGrad;
  std::vector<std::pair<PackLaunch, std::vector<KernelArray>>> launches;
  for (const Packing& packing : packings) {
    const std::optional<PackLaunch> kind = kernelFor(packing);
    if (!kind) {
      runOperators(packing);
      continue;
    }
    auto known = std::find_if(launches.begin(), launches.end(), [&](const auto& launch) {
      return launch.first == *kind;
    });
    if (known == launches.end()) {
      known = launches.insert(launches.end(), {*kind, {}});
    }
    known->second.push_back(arrayOf(packing.from, packing.to));
  }
  for (const auto& [kind, arrays] : launches) {
    runKernel(kind, arrays);
  }
}

std::vector<at::Tensor> unpack(std::span<const Unpacking> unpackings, double scale, bool squares) {
  const at::NoGradGuard noGrad;
  std::vector<at::Tensor> sums(unpackings.size());
  std::vector<UnpackLaunch> launches;
  for (std::size_t i = 0; i < unpackings.size(); ++i) {
    const Unpacking& each = unpackings[i];
    if (!hasUnpackKernel(each)) {
      at::Tensor to = each.to;
      to.copy_(each.from);
      if (scale != 1.0) {
        to.mul_(scale);
      }
      continue;
    }
    auto known = std::find_if(launches.begin(), launches.end(), [&](const auto& launch) {
      return launch.device == each.to.device() && launch.from == formatOf(each.from);
    });
    if (known == launches.end()) {
      known = launches.insert(launches.end(), {each.to.device(), *formatOf(each.from), {}, {}, {}});
    }
    known->places.push_back(i);
    known->arrays.push_back(arrayOf(each.from, each.to));
    known->chunks.push_back(chunksOf(each.to.numel()));
  }
  for (const UnpackLaunch& launch : launches) {
    if (!squares) {
      runKernel(launch, static_cast<float>(scale), nullptr);
      continue;
    }
    const at::Tensor all = at::empty(
        {std::accumulate(launch.chunks.begin(), launch.chunks.end(), std::int64_t{0})},
        at::TensorOptions().dtype(at::kDouble).device(launch.device));
    runKernel(launch, static_cast<float>(scale), all.mutable_data_ptr<double>());
    const std::vector<at::Tensor> parts = all.split_with_sizes(launch.chunks);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      sums[launch.places[i]] = parts[i];
    }
  }
  return sums;
}

} // namespace hvd_order
