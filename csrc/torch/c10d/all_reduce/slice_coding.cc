#include "torch/c10d/all_reduce/slice_coding.h"

#include <algorithm>

#include "base/error.h"
#include "torch/cuda/codes.h"
#include "torch/cuda/host_codes.h"
#include "torch/packing/device_kernels.h"
#include "torch/packing/element_type.h"

namespace hvd_order {

namespace {

constexpr std::int64_t kAlignment = 16;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::int64_t codeBytes(WireFormat format, std::int64_t elementBytes) {
  switch (format) {
    case WireFormat::kExact:
      return elementBytes;
    case WireFormat::kBfloat16:
    case WireFormat::kFloat16:
      return 2;
    case WireFormat::kInt8:
      return 1;
  }
  throw InvalidUsage("no such format");
}

} // namespace

MessageLayout::MessageLayout(
    const std::vector<CodedRange>& ranges,
    Shard shard,
    std::int64_t elementBytes)
    : elementBytes_(elementBytes) {
  const std::int64_t end = shard.begin + shard.length;
  for (const CodedRange& range : ranges) {
    if (elementBytes > 4 && range.format != WireFormat::kExact) {
      throw InvalidUsage("elements of more than 32 bits travel as they are");
    }
    const std::int64_t from = std::max(range.begin, shard.begin);
    const std::int64_t count = std::min(range.begin + range.count, end) - from;
    if (count > 0) {
      runs_.push_back({{from, count, range.format}, 0, 0});
    }
  }
  const auto place = [&](auto isOne) {
    for (PlacedRange& run : runs_) {
      if (isOne(run.range.format)) {
        run.codes = bytes_;
        bytes_ += run.range.count * codeBytes(run.range.format, elementBytes);
      }
    }
    bytes_ = aligned(bytes_);
  };
  place([](WireFormat format) { return format == WireFormat::kExact; });
  for (PlacedRange& run : runs_) {
    if (run.range.format == WireFormat::kInt8) {
      run.scales = bytes_;
      bytes_ += (run.range.count + kBlock - 1) / kBlock * static_cast<std::int64_t>(sizeof(float));
    }
  }
  place([](WireFormat format) {
    return format == WireFormat::kBfloat16 || format == WireFormat::kFloat16;
  });
  place([](WireFormat format) { return format == WireFormat::kInt8; });
}

void MessageLayout::addRuns(
    std::vector<CodedRun>& runs,
    std::byte* values,
    float* residual,
    std::byte* message) const {
  for (const PlacedRange& run : runs_) {
    const CodedRange& range = run.range;
    const bool exact = range.format == WireFormat::kExact;
    runs.push_back(
        {values + range.begin * elementBytes_,
         residual == nullptr || exact ? nullptr : residual + range.begin,
         // A float32 at a multiple of 4 bytes.
         reinterpret_cast<float*>(message + run.scales), message + run.codes, range.count,
         range.format});
  }
}

SliceCoding codingOf(
    const std::vector<CodedRange>& ranges,
    const at::Tensor& slice,
    at::Tensor residual,
    int size) {
  SliceCoding coding{{}, std::move(residual)};
  for (int rank = 0; rank < size; ++rank) {
    coding.shards.emplace_back(
        ranges, shardOf(slice.numel(), rank, size),
        static_cast<std::int64_t>(slice.element_size()));
  }
  return coding;
}

SliceCoder::SliceCoder(const at::Tensor& slice, const SliceCoding& coding)
    : slice_(slice), coding_(coding) {}

void SliceCoder::add(std::size_t shard, std::byte* message) {
  coding_.shards.at(shard).addRuns(
      runs_, static_cast<std::byte*>(slice_.mutable_data_ptr()),
      coding_.residual.defined() ? coding_.residual.mutable_data_ptr<float>() : nullptr, message);
}

template <typename OnHost, typename Launch>
void SliceCoder::run(const OnHost& onHost, const Launch& launch) const {
  const ElementType element = elementTypeOf(slice_);
  if (!slice_.is_cpu()) {
    launchOn(slice_.device(), [&](const KernelTable& kernels, void* stream) {
      return launch(kernels, element, stream);
    });
    return;
  }
  for (const CodedRun& run : runs_) {
    onHost(run, element);
  }
}

void SliceCoder::encode(bool writesBack) const {
  run([&](const CodedRun& each, ElementType element) { encodeOnHost(each, element, writesBack); },
      [&](const KernelTable& kernels, ElementType element, void* stream) {
        return kernels.encode(runs_.data(), runs_.size(), element, writesBack, stream);
      });
}

void SliceCoder::decode(Senders senders) const {
  run([&](const CodedRun& each, ElementType element) { decodeOnHost(each, element, senders); },
      [&](const KernelTable& kernels, ElementType element, void* stream) {
        return kernels.decode(runs_.data(), runs_.size(), element, senders, stream);
      });
}

} // namespace hvd_order
