// The operators against TensorFlow's C interface, without its headers and without linking to it.
// The functions are looked up in the TensorFlow that has loaded this library, so one binary serves
// every version that has them. The prototypes below are those of
// tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h.
//
// The interface does not guarantee one thing. The "done" callback of an asynchronous kernel is the
// address of a std::function that lives only while the compute function runs, although its purpose
// is to be called later. This file moves the function out before that. A self-test checks that
// this works before a version is trusted (hvd_order/tensorflow/backend/self_test.py).

#include <dlfcn.h>

#include <cstdio>
#include <functional>
#include <stdexcept>

#include "tensorflow/op_list.h"

namespace hvd_order::tensorflow {

namespace {

struct TF_Status;
struct TF_Tensor;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeInferenceContext;
struct TF_AsyncOpKernelDoneCallback;

using DoneCallback = std::function<void()>; // tensorflow::AsyncOpKernel::DoneCallback

constexpr int kOk = 0;

// NOLINTBEGIN(readability-identifier-naming): TensorFlow's names
struct Api {
  TF_Status* (*TF_NewStatus)();
  void (*TF_DeleteStatus)(TF_Status*);
  void (*TF_SetStatus)(TF_Status*, int code, const char* message);
  int (*TF_GetCode)(const TF_Status*);
  const char* (*TF_Message)(const TF_Status*);

  int (*TF_TensorType)(const TF_Tensor*);
  int (*TF_NumDims)(const TF_Tensor*);
  std::int64_t (*TF_Dim)(const TF_Tensor*, int dimension);
  std::size_t (*TF_TensorByteSize)(const TF_Tensor*);
  void* (*TF_TensorData)(const TF_Tensor*);
  void (*TF_DeleteTensor)(TF_Tensor*);

  TF_OpDefinitionBuilder* (*TF_NewOpDefinitionBuilder)(const char* name);
  void (*TF_OpDefinitionBuilderAddAttr)(TF_OpDefinitionBuilder*, const char*);
  void (*TF_OpDefinitionBuilderAddInput)(TF_OpDefinitionBuilder*, const char*);
  void (*TF_OpDefinitionBuilderAddOutput)(TF_OpDefinitionBuilder*, const char*);
  void (*TF_OpDefinitionBuilderSetIsStateful)(TF_OpDefinitionBuilder*, bool);
  void (*TF_OpDefinitionBuilderSetShapeInferenceFunction)(
      TF_OpDefinitionBuilder*,
      void (*)(TF_ShapeInferenceContext*, TF_Status*));
  void (*TF_ShapeInferenceContextSetUnknownShape)(TF_ShapeInferenceContext*, TF_Status*);
  void (*TF_RegisterOpDefinition)(TF_OpDefinitionBuilder*, TF_Status*);

  TF_KernelBuilder* (*TF_NewAsyncKernelBuilder)(
      const char* op,
      const char* device,
      void* (*create)(TF_OpKernelConstruction*),
      void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
      void (*destroy)(void*));
  void (*TF_KernelBuilder_HostMemory)(TF_KernelBuilder*, const char* argument);
  void (*TF_RegisterKernelBuilder)(const char* name, TF_KernelBuilder*, TF_Status*);
  bool (*TF_OpKernelConstruction_HasAttr)(TF_OpKernelConstruction*, const char*, TF_Status*);
  void (*TF_OpKernelConstruction_GetAttrInt64)(
      TF_OpKernelConstruction*,
      const char*,
      std::int64_t*,
      TF_Status*);
  void (*TF_OpKernelConstruction_GetAttrType)(
      TF_OpKernelConstruction*,
      const char*,
      int*,
      TF_Status*);
  void (*TF_OpKernelConstruction_GetAttrSize)(
      TF_OpKernelConstruction*,
      const char*,
      std::int32_t* listSize,
      std::int32_t* totalSize,
      TF_Status*);
  void (*TF_OpKernelConstruction_GetAttrInt64List)(
      TF_OpKernelConstruction*,
      const char*,
      std::int64_t*,
      int maxValues,
      TF_Status*);
  void (*TF_OpKernelConstruction_Failure)(TF_OpKernelConstruction*, TF_Status*);

  int (*TF_NumInputs)(TF_OpKernelContext*);
  int (*TF_NumOutputs)(TF_OpKernelContext*);
  void (*TF_GetInput)(TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*);
  int (*TF_ExpectedOutputDataType)(TF_OpKernelContext*, int index);
  TF_Tensor* (*TF_AllocateOutput)(
      TF_OpKernelContext*,
      int index,
      int dtype,
      const std::int64_t* dimensions,
      int rank,
      std::size_t sizeBytes,
      TF_Status*);
  void (*TF_OpKernelContext_Failure)(TF_OpKernelContext*, TF_Status*);
};
// NOLINTEND(readability-identifier-naming)

Api tf;

class Status {
 public:
  Status() : status_(tf.TF_NewStatus()) {}
  Status(int code, const std::string& text) : Status() {
    tf.TF_SetStatus(status_, code, text.c_str());
  }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() {
    tf.TF_DeleteStatus(status_);
  }
  operator TF_Status*() { // NOLINT(google-explicit-constructor): as an argument, always
    return status_;
  }
  [[nodiscard]] bool ok() const {
    return tf.TF_GetCode(status_) == kOk;
  }
  void check() const {
    if (!ok()) {
      throw std::runtime_error(tf.TF_Message(status_));
    }
  }

 private:
  TF_Status* status_;
};

class CContext final : public OpContext {
 public:
  CContext(TF_OpKernelContext* context, DoneCallback done)
      : context_(context), done_(std::move(done)) {}
  ~CContext() override {
    letGo();
  }

  [[nodiscard]] int inputs() const override {
    return tf.TF_NumInputs(context_);
  }

  TensorView input(int index) override {
    TF_Tensor* tensor = nullptr;
    Status status;
    tf.TF_GetInput(context_, index, &tensor, status);
    status.check();
    tensors_.push_back(tensor);
    TensorView view;
    view.dtype = tf.TF_TensorType(tensor);
    for (int i = 0; i < tf.TF_NumDims(tensor); ++i) {
      view.shape.push_back(tf.TF_Dim(tensor, i));
    }
    view.data = tf.TF_TensorData(tensor);
    view.sizeBytes = tf.TF_TensorByteSize(tensor);
    return view;
  }

  [[nodiscard]] int outputs() const override {
    return tf.TF_NumOutputs(context_);
  }

  void* allocate(
      int output,
      int dtype,
      const std::vector<std::int64_t>& shape,
      std::size_t sizeBytes) override {
    if (output >= outputs() || tf.TF_ExpectedOutputDataType(context_, output) != dtype) {
      throw std::runtime_error("BrokenInvariant: a result is not of the operator's data type");
    }
    Status status;
    TF_Tensor* tensor = tf.TF_AllocateOutput(
        context_, output, dtype, shape.data(), static_cast<int>(shape.size()), sizeBytes, status);
    status.check();
    tensors_.push_back(tensor);
    return tf.TF_TensorData(tensor);
  }

  void succeed() noexcept override {
    end();
  }

  void fail(Code code, const std::string& text) noexcept override {
    Status status(static_cast<int>(code), text);
    tf.TF_OpKernelContext_Failure(context_, status);
    end();
  }

 private:
  void end() {
    letGo(); // first: after done_() TensorFlow may reuse or check the inputs
    done_();
  }
  void letGo() {
    for (TF_Tensor* tensor : tensors_) {
      tf.TF_DeleteTensor(tensor);
    }
    tensors_.clear();
  }

  TF_OpKernelContext* context_;
  DoneCallback done_;
  std::vector<TF_Tensor*> tensors_; // inputs that have been read, and outputs
};

Attributes readAttributes(TF_OpKernelConstruction* construction) {
  Attributes attributes;
  Status status;
  const auto has = [&](const char* name) {
    const bool there = tf.TF_OpKernelConstruction_HasAttr(construction, name, status);
    status.check();
    return there;
  };
  const auto integer = [&](const char* name) {
    std::int64_t value = 0;
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
    status.check();
    return value;
  };
  if (has("position")) {
    attributes.position = {
        static_cast<std::uint32_t>(integer("exchange")),
        static_cast<std::uint32_t>(integer("position"))};
  }
  if (has("description")) {
    attributes.description = integer("description");
    attributes.turns = integer("turns");
  }
  if (has("T")) {
    tf.TF_OpKernelConstruction_GetAttrType(construction, "T", &attributes.dtype, status);
    status.check();
  }
  if (has("shape")) {
    std::int32_t size = 0;
    std::int32_t unused = 0;
    tf.TF_OpKernelConstruction_GetAttrSize(construction, "shape", &size, &unused, status);
    status.check();
    attributes.shape.resize(static_cast<std::size_t>(size));
    tf.TF_OpKernelConstruction_GetAttrInt64List(
        construction, "shape", attributes.shape.data(), size, status);
    status.check();
  }
  return attributes;
}

// TensorFlow takes plain functions, so each operator has its own functions.
template <std::size_t kOp>
struct Kernel {
  static void* create(TF_OpKernelConstruction* construction) {
    try {
      return new Attributes(readAttributes(construction));
    } catch (const std::exception& e) {
      Status status(static_cast<int>(Code::kInternal), e.what());
      tf.TF_OpKernelConstruction_Failure(construction, status);
      return nullptr;
    }
  }

  static void
  compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
    DoneCallback callback = std::move(*reinterpret_cast<DoneCallback*>(done));
    opList()[kOp].run(
        std::make_unique<CContext>(context, std::move(callback)),
        *static_cast<const Attributes*>(kernel));
  }

  static void destroy(void* kernel) {
    delete static_cast<Attributes*>(kernel);
  }
};

void registerOp(const OpEntry& op) {
  TF_OpDefinitionBuilder* builder = tf.TF_NewOpDefinitionBuilder(op.name);
  for (const char* attribute : op.attributes) {
    tf.TF_OpDefinitionBuilderAddAttr(builder, attribute);
  }
  for (const char* input : op.inputs) {
    tf.TF_OpDefinitionBuilderAddInput(builder, input);
  }
  for (const char* output : op.outputs) {
    tf.TF_OpDefinitionBuilderAddOutput(builder, output);
  }
  tf.TF_OpDefinitionBuilderSetIsStateful(builder, true);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(
      builder, tf.TF_ShapeInferenceContextSetUnknownShape);
  Status status;
  tf.TF_RegisterOpDefinition(builder, status);
  status.check();
}

template <std::size_t kOp>
void registerKernels() {
  const OpEntry& op = opList()[kOp];
  // All memory is host memory; TensorFlow copies from and to a GPU.
  for (const char* device : {"CPU", "GPU"}) {
    TF_KernelBuilder* builder = tf.TF_NewAsyncKernelBuilder(
        op.name, device, Kernel<kOp>::create, Kernel<kOp>::compute, Kernel<kOp>::destroy);
    for (const auto* arguments : {&op.inputs, &op.outputs}) {
      for (const char* argument : *arguments) {
        tf.TF_KernelBuilder_HostMemory(builder, nameOf(argument).c_str());
      }
    }
    Status status;
    tf.TF_RegisterKernelBuilder(op.name, builder, status);
    status.check();
  }
}

template <typename Function>
void lookUp(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("this TensorFlow has no ") + name);
  }
}

void lookUpAll() {
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    throw std::runtime_error("libtensorflow_framework.so.2 is not loaded; import tensorflow first");
  }
#define HVDO_LOOK_UP(name) lookUp(library, #name, tf.name)
  HVDO_LOOK_UP(TF_NewStatus);
  HVDO_LOOK_UP(TF_DeleteStatus);
  HVDO_LOOK_UP(TF_SetStatus);
  HVDO_LOOK_UP(TF_GetCode);
  HVDO_LOOK_UP(TF_Message);
  HVDO_LOOK_UP(TF_TensorType);
  HVDO_LOOK_UP(TF_NumDims);
  HVDO_LOOK_UP(TF_Dim);
  HVDO_LOOK_UP(TF_TensorByteSize);
  HVDO_LOOK_UP(TF_TensorData);
  HVDO_LOOK_UP(TF_DeleteTensor);
  HVDO_LOOK_UP(TF_NewOpDefinitionBuilder);
  HVDO_LOOK_UP(TF_OpDefinitionBuilderAddAttr);
  HVDO_LOOK_UP(TF_OpDefinitionBuilderAddInput);
  HVDO_LOOK_UP(TF_OpDefinitionBuilderAddOutput);
  HVDO_LOOK_UP(TF_OpDefinitionBuilderSetIsStateful);
  HVDO_LOOK_UP(TF_OpDefinitionBuilderSetShapeInferenceFunction);
  HVDO_LOOK_UP(TF_ShapeInferenceContextSetUnknownShape);
  HVDO_LOOK_UP(TF_RegisterOpDefinition);
  HVDO_LOOK_UP(TF_NewAsyncKernelBuilder);
  HVDO_LOOK_UP(TF_KernelBuilder_HostMemory);
  HVDO_LOOK_UP(TF_RegisterKernelBuilder);
  HVDO_LOOK_UP(TF_OpKernelConstruction_HasAttr);
  HVDO_LOOK_UP(TF_OpKernelConstruction_GetAttrInt64);
  HVDO_LOOK_UP(TF_OpKernelConstruction_GetAttrType);
  HVDO_LOOK_UP(TF_OpKernelConstruction_GetAttrSize);
  HVDO_LOOK_UP(TF_OpKernelConstruction_GetAttrInt64List);
  HVDO_LOOK_UP(TF_OpKernelConstruction_Failure);
  HVDO_LOOK_UP(TF_NumInputs);
  HVDO_LOOK_UP(TF_NumOutputs);
  HVDO_LOOK_UP(TF_GetInput);
  HVDO_LOOK_UP(TF_ExpectedOutputDataType);
  HVDO_LOOK_UP(TF_AllocateOutput);
  HVDO_LOOK_UP(TF_OpKernelContext_Failure);
#undef HVDO_LOOK_UP
}

// Runs when the library is loaded. Nothing may be thrown here; Python notices missing operators.
__attribute__((constructor)) void registerAll() {
  try {
    lookUpAll();
    for (const OpEntry& op : opList()) {
      registerOp(op);
    }
    [&]<std::size_t... kOps>(std::index_sequence<kOps...>) {
      (registerKernels<kOps>(), ...);
    }(std::make_index_sequence<4>());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "hvd_order: no operators for TensorFlow: %s\n", e.what());
  }
}

} // namespace

} // namespace hvd_order::tensorflow
