#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_order {

/// A process's place among all processes of the job, 0-based.
using Rank = int;

/// Sizes and offsets in bytes.
using ByteCount = std::int64_t;

/// A set of tensors registered together (one optimizer); the same id on every rank.
using ModelId = std::uint32_t;

/// A tensor's place in its model's consumption order; 0 is needed first.
using TensorId = std::uint32_t;

/// A gradient buffer of a model: one per device and dtype.
using BufferId = std::uint32_t;

/// A slice's place in its model's consumption order, so the smaller id is the more urgent one.
using SliceIndex = std::uint32_t;

/// A tensor of any model.
struct TensorKey {
  ModelId model;
  TensorId tensor;
  friend bool operator==(const TensorKey&, const TensorKey&) = default;
};

/// A slice of any model. The whole fits one 32-bit word, which is how control messages carry it.
struct SliceKey {
  static constexpr std::uint32_t kIndexBits = 24;
  static constexpr ModelId kMaxModels = 1U << (32 - kIndexBits);
  static constexpr SliceIndex kMaxSlices = 1U << kIndexBits;

  ModelId model;
  SliceIndex index;

  [[nodiscard]] std::uint32_t word() const {
    return model << kIndexBits | index;
  }
  static SliceKey fromWord(std::uint32_t word) {
    return {word >> kIndexBits, word & (kMaxSlices - 1)};
  }
  friend bool operator==(const SliceKey&, const SliceKey&) = default;
};

} // namespace hvd_order
