#include "c10d/frames.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>
#include <utility>

// A message begins in a frame of its own with its kind and its number of words; the words follow
// and continue in as many frames as they need. The last word of every frame is not zero. A recv
// fills its frame in order, so that word says that the frame is complete.

namespace hvd_order {

namespace {

constexpr std::size_t kFrameWords = 128;
constexpr std::size_t kContentWords = kFrameWords - 1; // without the last
constexpr std::size_t kHeaderWords = 2;
constexpr std::uint32_t kArrived = 1;

std::uint32_t* wordsOf(const at::Tensor& frame) {
  return reinterpret_cast<std::uint32_t*>(frame.data_ptr<int>());
}

} // namespace

at::Tensor emptyFrame() {
  return at::zeros({static_cast<std::int64_t>(kFrameWords)}, at::kInt);
}

std::vector<at::Tensor> framesOf(const ControlMessage& message) {
  std::vector<std::uint32_t> words{
      static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.words.size())};
  words.insert(words.end(), message.words.begin(), message.words.end());
  std::vector<at::Tensor> frames;
  for (std::size_t at = 0; at < words.size(); at += kContentWords) {
    frames.push_back(emptyFrame());
    std::uint32_t* const frame = wordsOf(frames.back());
    std::copy_n(words.data() + at, std::min(kContentWords, words.size() - at), frame);
    frame[kContentWords] = kArrived;
  }
  return frames;
}

bool hasArrived(const at::Tensor& frame) {
  // A thread of Gloo writes the frame meanwhile.
  return std::atomic_ref(wordsOf(frame)[kContentWords]).load(std::memory_order_acquire) != 0;
}

std::optional<ControlMessage> Assembly::add(const at::Tensor& frame) {
  const std::uint32_t* words = wordsOf(frame);
  std::size_t room = kContentWords;
  if (missing_ == 0) {
    message_ = {static_cast<ControlMessage::Kind>(words[0]), {}};
    missing_ = words[1];
    words += kHeaderWords;
    room -= kHeaderWords;
  }
  const std::size_t count = std::min(missing_, room);
  message_.words.insert(message_.words.end(), words, words + count);
  missing_ -= count;
  return missing_ == 0 ? std::optional(std::exchange(message_, {})) : std::nullopt;
}

void interrupt(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    // The work has already ended.
  }
}

} // namespace hvd_order
