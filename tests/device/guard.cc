// The device as PyTorch sees it: guard, hooks, allocator.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"

namespace test_device {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

c10::Stream streamOf(std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device /*device*/) const override {
    return getDevice();
  }
  c10::Device getDevice() const override {
    return {kType, 0};
  }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device /*device*/) const override {
    return streamOf(currentStream());
  }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override {
    return streamOf(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return streamOf(Device::get().poolStream());
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return streamOf(Device::get().newStream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return streamOf(std::exchange(currentStream(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(stream.id() + 1));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& it = Device::get().stream(stream.id());
    return it.reached(it.enqueued());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Stream& it = Device::get().stream(stream.id());
    it.await(it.enqueued());
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {
    Device::get().synchronize();
  }

  void record(
      void** event,
      const c10::Stream& stream,
      c10::DeviceIndex /*device*/,
      c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new Event;
      ++counts().eventsCreated;
    }
    test_device::record(*static_cast<Event*>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait(*static_cast<Event*>(event), stream.id());
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    CachingAllocator::get().recordStream(data.get_context(), stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override {
    return 0;
  }
  at::Device getDeviceFromPtr(void* /*data*/) const override {
    return {kType, 0};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::DataPtr larger = CachingAllocator::get().allocate(bytes);
    CachingAllocator::get().copy_data(
        larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void registerDevice() {
  c10::SetAllocator(kType, &CachingAllocator::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

} // namespace test_device
