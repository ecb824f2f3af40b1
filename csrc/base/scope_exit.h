#pragma once

#include <utility>

namespace hvd_order {

/// Calls a function at the end of its scope, which an exception may bring about. The function must
/// not throw.
template <typename Function>
class ScopeExit final {
 public:
  explicit ScopeExit(Function function) : function_(std::move(function)) {}
  ~ScopeExit() {
    function_();
  }
  ScopeExit(const ScopeExit&) = delete;
  ScopeExit& operator=(const ScopeExit&) = delete;

 private:
  Function function_;
};

} // namespace hvd_order
