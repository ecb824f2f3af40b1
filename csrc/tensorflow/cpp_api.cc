// The operators against TensorFlow's C++ headers, for a TensorFlow whose C interface does not
// suffice (c_api.cc). This binary works only with the version that it was built with.

#include <stdexcept>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/op_list.h"

namespace hvd_order::tensorflow {

namespace {

namespace tf = ::tensorflow;

class CppContext final : public OpContext {
 public:
  CppContext(tf::OpKernelContext* context, tf::AsyncOpKernel::DoneCallback done)
      : context_(context), done_(std::move(done)) {}

  [[nodiscard]] int inputs() const override {
    return context_->num_inputs();
  }

  TensorView input(int index) override {
    const tf::Tensor& tensor = context_->input(index);
    const auto shape = tensor.shape().dim_sizes();
    return {
        static_cast<int>(tensor.dtype()),
        {shape.begin(), shape.end()},
        tensor.data(),
        tensor.TotalBytes()};
  }

  [[nodiscard]] int outputs() const override {
    return context_->num_outputs();
  }

  void* allocate(
      int output,
      int dtype,
      const std::vector<std::int64_t>& shape,
      std::size_t sizeBytes) override {
    if (output >= outputs() || context_->expected_output_dtype(output) != dtype) {
      throw std::runtime_error("BrokenInvariant: a result is not of the operator's data type");
    }
    tf::Tensor* tensor = nullptr;
    const auto status = context_->allocate_output(output, tf::TensorShape(shape), &tensor);
    if (!status.ok() || tensor->TotalBytes() != sizeBytes) {
      throw std::runtime_error(
          status.ok() ? "BrokenInvariant: a result has not its shape's size" : status.ToString());
    }
    return tensor->data();
  }

  void succeed() noexcept override {
    done_();
  }

  void fail(Code code, const std::string& text) noexcept override {
    context_->SetStatus(absl::Status(static_cast<absl::StatusCode>(code), text));
    done_();
  }

 private:
  tf::OpKernelContext* context_;
  tf::AsyncOpKernel::DoneCallback done_;
};

template <std::size_t kOp>
class Kernel final : public tf::AsyncOpKernel {
 public:
  explicit Kernel(tf::OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    const auto read = [&](const char* name, auto* value) {
      OP_REQUIRES_OK(construction, construction->GetAttr(name, value));
    };
    if (construction->HasAttr("position")) {
      std::int64_t exchange = 0;
      std::int64_t position = 0;
      read("exchange", &exchange);
      read("position", &position);
      attributes_.position = {
          static_cast<std::uint32_t>(exchange), static_cast<std::uint32_t>(position)};
    }
    if (construction->HasAttr("description")) {
      read("description", &attributes_.description);
      read("turns", &attributes_.turns);
    }
    if (construction->HasAttr("T")) {
      tf::DataType dtype = tf::DT_INVALID;
      read("T", &dtype);
      attributes_.dtype = dtype;
    }
    if (construction->HasAttr("shape")) {
      read("shape", &attributes_.shape);
    }
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    opList()[kOp].run(std::make_unique<CppContext>(context, std::move(done)), attributes_);
  }

 private:
  Attributes attributes_;
};

// Same as in c_api.cc: TensorFlow requests the definition of each operator when it loads the
// library.
void registerOp(const OpEntry& op) {
  tf::OpRegistry::Global()->Register([&op](tf::OpRegistrationData* data) {
    tf::OpDefBuilder builder(op.name);
    for (const char* attribute : op.attributes) {
      builder.Attr(attribute);
    }
    for (const char* input : op.inputs) {
      builder.Input(input);
    }
    for (const char* output : op.outputs) {
      builder.Output(output);
    }
    builder.SetIsStateful().SetShapeFn(tf::shape_inference::UnknownShape);
    return builder.Finalize(data);
  });
}

template <std::size_t kOp>
void registerKernels() {
  const OpEntry& op = opList()[kOp];
  for (const char* device : {tf::DEVICE_CPU, tf::DEVICE_GPU}) {
    tf::KernelDefBuilder builder(op.name);
    builder.Device(device);
    for (const auto* arguments : {&op.inputs, &op.outputs}) {
      for (const char* argument : *arguments) {
        builder.HostMemory(nameOf(argument).c_str());
      }
    }
    const tf::kernel_factory::OpKernelRegistrar registrar(
        builder.Build(), op.name, [](tf::OpKernelConstruction* construction) -> tf::OpKernel* {
          return new Kernel<kOp>(construction);
        });
  }
}

__attribute__((constructor)) void registerAll() {
  for (const OpEntry& op : opList()) {
    registerOp(op);
  }
  [&]<std::size_t... kOps>(std::index_sequence<kOps...>) {
    (registerKernels<kOps>(), ...);
  }(std::make_index_sequence<4>());
}

} // namespace

} // namespace hvd_order::tensorflow

// hvd_order/tensorflow/backend/op_library.py looks for this text in the file before it loads it.
extern "C" __attribute__((visibility("default"), used)) const char hvdo_built_with[] =
    "hvd_order was built with TensorFlow " HVDO_TENSORFLOW_VERSION; // by CMakeLists.txt
