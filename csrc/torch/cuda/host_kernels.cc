#include "torch/cuda/host_kernels.h"

#include <algorithm>
#include <array>

#include "torch/cuda/elements.h"

namespace hvd_order {

namespace {

template <typename From, typename To>
void scaleAll(const KernelArray& array, std::int64_t begin, std::int64_t end, float scale) {
  const auto* from = static_cast<const typename From::Stored*>(array.from);
  auto* to = static_cast<typename To::Stored*>(array.to);
  runOnWidestVectors([=]() HVDO_INLINE {
    for (std::int64_t i = begin; i < end; ++i) {
      to[i] = scaled<From, To>(from[i], scale);
    }
  });
}

double sumOfSquares(const float* values, std::int64_t count) {
  std::array<double, kLanes> lanes{};
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    lanes[static_cast<std::size_t>(i / kGroup % kLanes)] += value * value;
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

} // namespace

bool packOnHost(
    const KernelArray& array,
    std::int64_t begin,
    std::int64_t end,
    ElementType from,
    ElementType to,
    float scale) {
  if (from == ElementType::kFloat32 && to == ElementType::kFloat32) {
    scaleAll<Float32, Float32>(array, begin, end, scale);
  } else if (from == ElementType::kFloat32) {
    (to == ElementType::kBfloat16 ? scaleAll<Float32, Bfloat16>
                                  : scaleAll<Float32, Float16>)(array, begin, end, scale);
  } else if (from == to) {
    (to == ElementType::kBfloat16 ? scaleAll<Bfloat16, Bfloat16>
                                  : scaleAll<Float16, Float16>)(array, begin, end, scale);
  } else {
    return false;
  }
  return true;
}

void unpackOnHost(
    const KernelArray& array,
    std::int64_t chunk,
    ElementType from,
    float scale,
    double* square) {
  const std::int64_t begin = chunk * kChunkElements;
  const std::int64_t end = std::min(begin + kChunkElements, array.count);
  (from == ElementType::kBfloat16 ? scaleAll<Bfloat16, Float32>
                                  : scaleAll<Float16, Float32>)(array, begin, end, scale);
  if (square != nullptr) {
    *square = sumOfSquares(static_cast<const float*>(array.to) + begin, end - begin);
  }
}

} // namespace hvd_order
