#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hvd_order::tensorflow {

/// A tensor in host memory. `dtype` is TensorFlow's number of the data type.
struct TensorView {
  int dtype = 0;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
  std::size_t sizeBytes = 0;
};

/// TensorFlow's error codes for errors of the caller and failures: numbers of TF_Code.
enum class Code {
  kInvalidArgument = 3,
  kFailedPrecondition = 9,
  kAborted = 10,
  kInternal = 13,
};

/// One execution of an operator. Ends with `succeed` or `fail`, from any thread, exactly once; the
/// object is destroyed then. Inputs stay valid until then.
///
/// Implemented against TensorFlow's C interface, without its headers (c_api.cc).
class OpContext {
 public:
  OpContext() = default;
  OpContext(const OpContext&) = delete;
  OpContext& operator=(const OpContext&) = delete;
  virtual ~OpContext() = default;

  [[nodiscard]] virtual int inputs() const = 0;
  /// An input tensor; must not be called for a variable's handle. @throws std::runtime_error
  virtual TensorView input(int index) = 0;
  [[nodiscard]] virtual int outputs() const = 0;
  /// Allocates an output of `sizeBytes` bytes.
  /// @throws std::runtime_error if the data type is not the operator's, or memory is exhausted.
  virtual void* allocate(
      int output,
      int dtype,
      const std::vector<std::int64_t>& shape,
      std::size_t sizeBytes) = 0;

  virtual void succeed() noexcept = 0;
  virtual void fail(Code code, const std::string& text) noexcept = 0;
};

} // namespace hvd_order::tensorflow
