// A device guard and CUDA hooks that do nothing: with them a CPU build of torch runs the CUDA code
// path on fake tensors, which have shapes, types and devices but no values.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device) const override { return {CUDA, 0}; }
  Device getDevice() const override { return {CUDA, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int) const override { return only(); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0; }

 private:
  static Stream only() { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
};

c10::impl::DeviceGuardImplRegistrar registrar(CUDA, new IdleGuard());

struct IdleHooks final : at::CUDAHooksInterface {
  explicit IdleHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

}  // namespace

namespace at {
using IdleCUDAHooks = IdleHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, IdleCUDAHooks);
}  // namespace at
