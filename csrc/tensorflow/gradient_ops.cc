#include "tensorflow/gradient_ops.h"

#include <atomic>
#include <cstring>
#include <exception>

namespace hvd_order::tensorflow {

namespace {

std::atomic<const hvdo_engine_api*> engineApi = nullptr;

constexpr const char* kNoEngine = "NotInitialized: call hvd.init() first";

Code codeOf(int kind) {
  switch (kind) {
    case HVDO_MISTAKE:
      return Code::kInvalidArgument;
    case HVDO_COLLECTIVE:
      return Code::kAborted;
    case HVDO_NOT_THERE:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

void failed(void* context, int kind, const char* text) {
  static_cast<OpContext*>(context)->fail(codeOf(kind), text);
}

/// An execution that waits for a sum; the engine holds its address until then.
struct Waiting {
  std::unique_ptr<OpContext> context;
  int dtype;
  std::vector<std::int64_t> shape;
  std::string error; // set if the output could not be allocated

  static void receive(void* self, const void* sum, std::size_t sizeBytes) {
    auto* waiting = static_cast<Waiting*>(self);
    try {
      void* output = waiting->context->allocate(0, waiting->dtype, waiting->shape, sizeBytes);
      std::memcpy(output, sum, sizeBytes);
    } catch (const std::exception& e) {
      waiting->error = e.what();
    }
  }
  static void done(void* self) {
    const std::unique_ptr<Waiting> waiting(static_cast<Waiting*>(self));
    if (waiting->error.empty()) {
      waiting->context->succeed();
    } else {
      waiting->context->fail(Code::kInternal, waiting->error);
    }
  }
  static void fail(void* self, int kind, const char* text) {
    const std::unique_ptr<Waiting> waiting(static_cast<Waiting*>(self));
    waiting->context->fail(codeOf(kind), text);
  }
};

void take(
    const hvdo_engine_api& api,
    std::unique_ptr<OpContext> context,
    hvdo_position position,
    int dtype,
    std::vector<std::int64_t> shape) {
  auto waiting =
      std::make_unique<Waiting>(Waiting{std::move(context), dtype, std::move(shape), {}});
  const hvdo_taker taker{waiting.release(), Waiting::receive, Waiting::done, Waiting::fail};
  api.take(position, &taker);
}

} // namespace

bool setEngineApi(const hvdo_engine_api* api) {
  if (api != nullptr &&
      (api->version != HVDO_ENGINE_API_VERSION || api->size_bytes < sizeof(hvdo_engine_api))) {
    return false;
  }
  engineApi = api;
  return true;
}

void postGradient(std::unique_ptr<OpContext> context, hvdo_position position) {
  const hvdo_engine_api* api = engineApi;
  if (api == nullptr) {
    context->fail(Code::kFailedPrecondition, kNoEngine);
    return;
  }
  const TensorView gradient = context->input(1);
  if (api->post(position, gradient.data, gradient.sizeBytes, context.get(), failed) != 0) {
    context->succeed();
  }
}

void takeGradient(
    std::unique_ptr<OpContext> context,
    hvdo_position position,
    int dtype,
    std::vector<std::int64_t> shape) {
  const hvdo_engine_api* api = engineApi;
  if (api == nullptr) {
    context->fail(Code::kFailedPrecondition, kNoEngine);
    return;
  }
  take(*api, std::move(context), position, dtype, std::move(shape));
}

void reduceGradient(std::unique_ptr<OpContext> context, hvdo_position position) {
  const hvdo_engine_api* api = engineApi;
  if (api == nullptr) {
    context->fail(Code::kFailedPrecondition, kNoEngine);
    return;
  }
  TensorView gradient = context->input(1);
  if (api->post(position, gradient.data, gradient.sizeBytes, context.get(), failed) != 0) {
    take(*api, std::move(context), position, gradient.dtype, std::move(gradient.shape));
  }
}

} // namespace hvd_order::tensorflow
