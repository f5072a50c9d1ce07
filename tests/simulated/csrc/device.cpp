// The device as torch asks for it: current device and streams, events, generators, hooks.
#include <ATen/core/GeneratorForPrivateuseone.h>

#include "world.h"

namespace sim {
namespace {
// A seed and an offset, taken when a kernel is launched, as on a GPU.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state is wrong size: that of a sim device is a tensor of 16 bytes");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::kByte);
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return (seed_ * 0x9E3779B97F4A7C15ull) ^ (++offset_ * 0xBF58476D1CE4E5B9ull);
  }
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::shared_ptr<Event>& event_of(void* event) { return *static_cast<std::shared_ptr<Event>*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    const DeviceIndex before = current_device;
    setDevice(device);
    return Device(kSim, before);
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < world().devices, "sim error: invalid device ordinal ", int(device.index()), " of ",
                world().devices);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return world().devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const noexcept override {
    const DeviceIndex index = or_current(device.index());
    return Stream(Stream::UNSAFE, Device(kSim, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kSim, or_current(device.index())));
  }
  Stream getNewStream(Device device, int = 0) const override {
    const DeviceIndex index = or_current(device.index());
    Lock lock = enter(index);
    return Stream(Stream::UNSAFE, Device(kSim, index), world().device[index].next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    Lock lock = enter(stream.device_index());
    Queue& queue = world().device[stream.device_index()].queues[stream.id()];
    Event end{{stream.device_index(), stream.id()}, queue.issued, false};
    return is_over(end);
  }
  void synchronizeStream(const Stream& stream) const override {
    wait_on_host("synchronize of a stream", {stream.device_index(), stream.id()});
  }
  void synchronizeDevice(const DeviceIndex index) const override { wait_for_device(or_current(index)); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    const Place place{stream.device_index(), stream.id()};
    Lock lock = enter(place.device);
    const uint64_t seq = world().device[place.device].queues[place.stream].issued + 1;
    auto recorded = std::make_shared<Event>(Event{place, seq, flag == c10::EventFlag::BACKEND_DEFAULT});
    delete static_cast<std::shared_ptr<Event>*>(*event);
    *event = new std::shared_ptr<Event>(recorded);
    enqueue(lock, place, {[recorded] { recorded->ms = now_ms(); }});
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Lock lock = enter(stream.device_index());
    if (!world().forgets_waits) enqueue(lock, {stream.device_index(), stream.id()}, {nullptr, event_of(event)});
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock = enter(event_of(event)->place.device);
    return query(lock, *event_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host("synchronize of an event", event_of(event)->place, event_of(event)->seq);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(event_of(start)->timing && event_of(end)->timing,
                "Both events must be created with argument 'enable_timing=True'.");
    Lock lock(world().lock);
    const bool over = is_over(*event_of(start)) && is_over(*event_of(end));
    lock.unlock();
    TORCH_CHECK(over, "Both events must be completed before calculating elapsed time.");
    return event_of(end)->ms - event_of(start)->ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_use(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return world().devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return world().used && !world().bad_fork; }
  DeviceIndex deviceCount() const override { return world().devices; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kSim, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kSim, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(or_current(device));
  }
  Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(world().lock);
    auto after = world().blocks.upper_bound(pointer);
    TORCH_CHECK(after != world().blocks.begin(), "not a pointer of a sim device");
    return Device(kSim, (--after)->second->place.device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    c10::DataPtr fresh = allocator().allocate(bytes);
    void *target = fresh.get(), *source = storage.mutable_data();
    const size_t kept = std::min(bytes, storage.nbytes());
    const Place place = current_place(storage.device().index());
    if (kept) launch(place, [=] { memcpy(target, source, kept); });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
}  // namespace

at::Generator& default_generator(DeviceIndex device) {
  at::Generator& generator = world().device[or_current(device)].generator;
  if (!generator.defined()) generator = at::make_generator<Generator>(or_current(device));
  return generator;
}

// The seed of one launch: from the generator that a caller gave, or the device's own.
uint64_t next_seed(const std::optional<at::Generator>& given, DeviceIndex device) {
  at::Generator generator = given && given->device().type() == kSim ? *given : default_generator(device);
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

void register_device() {
  at::setHostAllocator(kSim, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_lists();
  register_sparse();
  pthread_atfork(nullptr, nullptr, [] {
    world().bad_fork = world().used;
    world().configured = false;
  });
}
}  // namespace sim
