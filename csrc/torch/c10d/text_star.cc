#include "torch/c10d/text_star.h"

#include <utility>
#include <vector>

#include "base/error.h"
#include "scheduler/tree.h"

// A queue behind the control connections, which carry texts as control messages. The first ranks,
// as many as rank 0 has children in the tree, are its neighbours, so small jobs have only fast
// connections.

namespace hvd_order {

namespace {

std::vector<Rank> nearInStar(Rank rank, int size) {
  if (rank == 0) {
    return neighboursInTree(0, size);
  }
  return rank <= kFanOut ? std::vector<Rank>{0} : std::vector<Rank>{};
}

} // namespace

TextStar::TextStar(c10::intrusive_ptr<c10d::ProcessGroup> group, Rank rank, int size)
    : control_(std::move(group), rank, size, nearInStar(rank, size)) {}

TextStar::~TextStar() {
  close();
}

void TextStar::start() {
  control_.start(
      [this](Rank from, const ControlMessage& message) {
        put({from, NewsKind::kText, unwrapText(from, message)});
      },
      [this](Rank from, const std::exception_ptr& error) {
        put({from, isMalformed(error) ? NewsKind::kMalformed : NewsKind::kLost, textOf(error)});
      });
}

void TextStar::send(Rank to, const std::string& text) {
  control_.send(to, wrapText(text));
}

void TextStar::put(News news) {
  const std::scoped_lock lock(mutex_);
  news_.push_back(std::move(news));
  changed_.notify_one();
}

std::optional<TextStar::News> TextStar::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !news_.empty(); });
  if (closed_) {
    return std::nullopt;
  }
  News news = std::move(news_.front());
  news_.pop_front();
  return news;
}

void TextStar::close() noexcept {
  control_.stop();
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

} // namespace hvd_order
