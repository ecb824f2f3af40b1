#include "torch/c10d/frames.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>

namespace hvd_order {

namespace {

std::uint32_t* dataOf(const at::Tensor& frame) {
  return reinterpret_cast<std::uint32_t*>(frame.data_ptr<int>());
}

} // namespace

at::Tensor emptyFrame() {
  return at::zeros({static_cast<std::int64_t>(kFrameWords)}, at::kInt);
}

std::vector<at::Tensor> framesOf(const ControlMessage& message) {
  const std::vector<std::uint32_t> words = frameWords(message);
  std::vector<at::Tensor> frames;
  for (std::size_t at = 0; at < words.size(); at += kFrameWords) {
    frames.push_back(emptyFrame());
    std::copy_n(words.data() + at, kFrameWords, dataOf(frames.back()));
  }
  return frames;
}

bool hasArrived(const at::Tensor& frame) {
  // A thread of Gloo writes the frame meanwhile.
  return std::atomic_ref(dataOf(frame)[kFrameWords - 1]).load(std::memory_order_acquire) != 0;
}

std::span<const std::uint32_t> wordsOf(const at::Tensor& frame) {
  return {dataOf(frame), kFrameWords};
}

void interrupt(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // The work has already ended.
  }
}

} // namespace hvd_order
