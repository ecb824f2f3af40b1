#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_order {

/// Number of a process of the job, from 0 to size - 1.
using Rank = int;

/// Sizes and offsets in bytes.
using ByteCount = std::int64_t;

/// A set of tensors registered together (one optimizer); the same id on every rank.
using ModelId = std::uint32_t;

/// A tensor's place in its model's consumption order; 0 is needed first.
using TensorId = std::uint32_t;

/// A gradient buffer of a model: one per device and dtype.
using BufferId = std::uint32_t;

/// A slice's place in its model's consumption order; the smaller index is the more urgent.
using SliceIndex = std::uint32_t;

/// Identifies a tensor among all models.
struct TensorKey {
  ModelId model;
  TensorId tensor;
  friend bool operator==(const TensorKey&, const TensorKey&) = default;
};

/// Identifies a slice among all models. Control messages carry it as one 32-bit word.
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
