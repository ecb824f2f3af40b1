#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvd_order::checker {

/// A set of fingerprints: open addressing, eight bytes a slot.
class Visited final {
 public:
  /// @return whether it is new.
  bool insert(std::uint64_t fingerprint) {
    if (2 * (count_ + 1) > slots_.size()) {
      grow();
    }
    return place(fingerprint == 0 ? 1 : fingerprint); // 0 marks a free slot
  }
  [[nodiscard]] std::size_t size() const {
    return count_;
  }

 private:
  bool place(std::uint64_t fingerprint) {
    std::size_t at = fingerprint & (slots_.size() - 1);
    while (slots_[at] != 0) {
      if (slots_[at] == fingerprint) {
        return false;
      }
      at = (at + 1) & (slots_.size() - 1);
    }
    slots_[at] = fingerprint;
    ++count_;
    return true;
  }

  void grow() {
    std::vector<std::uint64_t> old(slots_.size() * 2);
    old.swap(slots_);
    count_ = 0;
    for (const std::uint64_t fingerprint : old) {
      if (fingerprint != 0) {
        place(fingerprint);
      }
    }
  }

  std::vector<std::uint64_t> slots_ = std::vector<std::uint64_t>(1024); // a power of two
  std::size_t count_ = 0;
};

} // namespace hvd_order::checker
