#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/c10d/c10d_control.h"

namespace hvd_order {

/// What has come from a rank. After any but kText nothing follows from it.
enum class NewsKind {
  kText,
  kLost,      ///< the connection broke
  kMalformed, ///< the rank sent what is no message
};

/// Texts between rank 0 and every other rank, for a caller that fetches what has come instead of
/// being called: threads of this class never enter the caller's language.
class TextStar final {
 public:
  struct News {
    Rank from;
    NewsKind kind;
    std::string text; ///< the message, or the reason
  };

  /// @param group used by no other component.
  TextStar(c10::intrusive_ptr<c10d::ProcessGroup> group, Rank rank, int size);
  ~TextStar();
  TextStar(const TextStar&) = delete;
  TextStar& operator=(const TextStar&) = delete;

  void start();
  /// Posts the text and returns. @throws PeerLost as ControlChannel::send does.
  void send(Rank to, const std::string& text);
  /// Waits for news. @return what came first; nothing once the star is closed.
  std::optional<News> next();
  /// Waits a short time for posted texts to be sent, then ends. A second call has no effect.
  void close() noexcept;

 private:
  void put(News news);

  C10dControl control_;
  std::mutex mutex_; // guards all below
  std::condition_variable changed_;
  std::deque<News> news_;
  bool closed_ = false;
};

} // namespace hvd_order
