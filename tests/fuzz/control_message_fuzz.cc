// Whatever frames come from other ranks on the control connections, they are put together or
// refused with MalformedMessage; whatever messages come of it, the engine's parts (order agreement,
// inquiry, shutdown barrier, failures) take them or refuse them by an error of this library.
// Nothing crashes, and no answer goes to a rank that does not exist.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "engine/failure_message.h"
#include "engine/health.h"
#include "engine/shutdown_barrier.h"
#include "scheduler/agreement_sequence.h"
#include "transport/control_words.h"
#include "transport/message_frames.h"

using namespace hvd_order;

namespace {

/// The input, read from its beginning; zeros behind its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const {
    return at_ >= size_;
  }
  unsigned byte() {
    return at_ < size_ ? data_[at_++] : 0;
  }
  std::uint32_t word() {
    const unsigned form = byte();
    if (form < 224) {
      return form; // ranks, models, tensors and counts are small
    }
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      word = word << 8 | byte();
    }
    return word;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

void require(bool condition) {
  if (!condition) {
    std::abort(); // the fuzzer keeps the input
  }
}

std::shared_ptr<const SliceLayout> layoutOf(bool split) {
  return std::make_shared<SliceLayout>(
      std::vector<TensorSpec>{{"weight", 48, 0}, {"bias", 16, 0}, {"embedding", 128, 0}}, 64, true,
      split);
}

/// What Engine::handle passes messages to, with a model.
struct RankParts {
  RankParts(Rank rank, int size, AgreementKind kind, bool split)
      : size(size),
        agreements(
            kind,
            rank,
            size,
            kind == AgreementKind::kPlanned ? Policy::kPlanned : Policy::kPriority,
            1 << 20),
        health(rank, size),
        barrier(rank, size) {
    const auto layout = layoutOf(split);
    std::vector<SliceIndex> plan;
    for (SliceIndex i = 0; kind == AgreementKind::kPlanned && i < layout->slices().size(); ++i) {
      plan.push_back(i);
    }
    agreements.current().addModel(0, layout, plan);
  }

  const Scheduler& scheduler() const {
    return agreements.current().scheduler();
  }

  void answered(const std::vector<Health::Addressed>& answers) const {
    for (const Health::Addressed& answer : answers) {
      require(answer.to >= 0 && answer.to < size);
    }
  }

  void handle(Rank from, const ControlMessage& message) {
    switch (message.kind) {
      case MessageKind::kSlices: {
        ControlWords words(from, message);
        const std::uint32_t number = words.next("the number of its agreement");
        std::vector<SliceKey> slices;
        for (const std::uint32_t word : words.rest()) {
          // Tables of models that are not known yet grow with the index.
          SliceKey key = SliceKey::fromWord(word);
          slices.push_back(key.model == 0 ? key : SliceKey{key.model % 4, key.index % 64});
        }
        agreements.received(from, number, slices);
        break;
      }
      case MessageKind::kQuery:
      case MessageKind::kReply:
        answered(health.received(scheduler(), from, message));
        break;
      case MessageKind::kFailed:
        require(unpackFailure(message.words) != nullptr);
        break;
      case MessageKind::kLeave:
        ControlWords(from, message).end();
        answered(barrier.gone(from));
        break;
      case MessageKind::kBarrier:
      case MessageKind::kFinished:
      case MessageKind::kMissing:
        answered(barrier.received(from, message));
        for (const Rank rank : barrier.missing()) {
          require(rank >= 0 && rank < size);
        }
        break;
    }
    Decisions decisions;
    agreements.decide(decisions);
    for (const SliceMessage& out : decisions.messages) {
      require(out.to >= 0 && out.to < size);
    }
    for (const SliceKey slice : decisions.issue) {
      require(slice.index < scheduler().layout(slice.model).slices().size());
      const auto operation = scheduler().layout(slice.model).slices()[slice.index].operation;
      static_cast<void>(operation);
      agreements.current().sliceDone(slice);
      answered(barrier.sliceDone());
    }
    static_cast<void>(health.report(scheduler()));
  }

  int size;
  AgreementSequence agreements;
  Health health;
  ShutdownBarrier barrier;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const int ranks = 2 + static_cast<int>(input.byte() % 6);
  const Rank rank = static_cast<Rank>(input.byte()) % ranks;
  const unsigned choices = input.byte();
  const auto kind = static_cast<AgreementKind>(choices % 3);
  RankParts own(rank, ranks, kind, (choices & 4) != 0 && kind != AgreementKind::kPlanned);
  const bool asFrames = (choices & 8) != 0;
  std::vector<Assembly> assemblies(static_cast<std::size_t>(ranks));

  while (!input.empty()) {
    try {
      const unsigned what = input.byte();
      const Rank from = static_cast<Rank>(input.byte()) % ranks;
      if (from == rank) {
        continue;
      }
      if (what % 8 == 7) { // a gradient of this rank
        const TensorKey tensor{0, input.byte() % 3};
        if (!own.scheduler().isPending(tensor)) {
          own.agreements.current().tensorReady(tensor);
        }
        continue;
      }
      if (what % 8 == 6) { // this rank has waited for long, or wants to leave
        own.answered(own.health.ask(own.scheduler(), {{0, 0}}, std::nullopt));
        own.answered(own.barrier.begin());
        own.answered(own.barrier.ask());
        continue;
      }
      ControlMessage message{static_cast<MessageKind>(input.byte() % 9), {}};
      const std::size_t words = input.byte();
      for (std::size_t i = 0; i < words && !input.empty(); ++i) {
        message.words.push_back(input.word());
      }
      if (!asFrames) {
        own.handle(from, message);
        continue;
      }
      std::vector<std::uint32_t> frames = frameWords(message);
      for (unsigned flips = input.byte() % 3; flips-- > 0;) {
        const std::size_t at = input.word() % frames.size();
        frames[at] ^= input.word();
      }
      for (std::size_t at = 0; at < frames.size(); at += kFrameWords) {
        const std::span<const std::uint32_t> frame = std::span(frames).subspan(at, kFrameWords);
        const auto whole = assemblies[static_cast<std::size_t>(from)].add(from, frame);
        if (!whole) {
          continue;
        }
        try {
          const std::string text = unwrapText(from, *whole);
          require(unwrapText(from, wrapText(text)) == text);
        } catch (const MalformedMessage&) { // a message of another kind
        }
        own.handle(from, *whole);
      }
    } catch (const Error&) {
      return 0; // any other exception ends the run
    }
  }
  return 0;
}
