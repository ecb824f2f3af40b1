// Functions of the operator library that Python calls through ctypes.

#include <cstring>
#include <exception>

#include "tensorflow/collective_calls.h"
#include "tensorflow/gradient_ops.h"

#define HVDO_EXPORT extern "C" __attribute__((visibility("default")))

using hvd_order::tensorflow::Code;
using hvd_order::tensorflow::CollectiveCall;
using hvd_order::tensorflow::CollectiveCalls;

namespace {

/// Same layout as the declaration in hvd_order/tensorflow/backend/op_library.py.
struct Tensor {
  std::int32_t dtype;
  std::int32_t rank;
  const std::int64_t* shape;
  const void* data;
  std::uint64_t sizeBytes;
};

} // namespace

HVDO_EXPORT int hvdo_set_engine_api(const hvdo_engine_api* api) {
  return hvd_order::tensorflow::setEngineApi(api) ? 1 : 0;
}

HVDO_EXPORT void hvdo_open_collectives() {
  CollectiveCalls::instance().open();
}

HVDO_EXPORT void hvdo_close_collectives() {
  CollectiveCalls::instance().close();
}

/// Returns the next call, which hvdo_end_call or hvdo_fail_call must end; null after closing.
HVDO_EXPORT CollectiveCall* hvdo_next_call() {
  return CollectiveCalls::instance().next().release();
}

HVDO_EXPORT std::int64_t hvdo_call_description(const CollectiveCall* call) {
  return call->description;
}

HVDO_EXPORT int hvdo_call_inputs(const CollectiveCall* call) {
  return static_cast<int>(call->inputs.size());
}

HVDO_EXPORT void hvdo_call_input(const CollectiveCall* call, int index, Tensor* tensor) {
  const auto& input = call->inputs.at(static_cast<std::size_t>(index));
  *tensor = {
      input.dtype, static_cast<std::int32_t>(input.shape.size()), input.shape.data(), input.data,
      input.sizeBytes};
}

HVDO_EXPORT void hvdo_end_call(CollectiveCall* call, int count, const Tensor* results) {
  const std::unique_ptr<CollectiveCall> owned(call);
  try {
    for (int i = 0; i < count; ++i) {
      const Tensor& result = results[i];
      void* output = call->context->allocate(
          i, result.dtype, {result.shape, result.shape + result.rank}, result.sizeBytes);
      if (result.sizeBytes > 0) {
        std::memcpy(output, result.data, result.sizeBytes);
      }
    }
  } catch (const std::exception& e) {
    call->context->fail(Code::kInternal, e.what());
    return;
  }
  call->context->succeed();
}

HVDO_EXPORT void hvdo_fail_call(CollectiveCall* call, int code, const char* text) {
  const std::unique_ptr<CollectiveCall> owned(call);
  call->context->fail(static_cast<Code>(code), text);
}
