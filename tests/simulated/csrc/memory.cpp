// Memory: a caching allocator per device, whose fresh memory is all ones (NaN in every float type), and pinned memory.
#include "world.h"

namespace sim {
namespace {
constexpr size_t kAll = 0;  // of the kinds of statistics
constexpr size_t kAlignment = 512;

void* aligned_memory(size_t bytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, 64, bytes) == 0, "sim: the host has no ", bytes, " bytes left");
  return pointer;
}

// Gives the memory that nobody uses back to the host. The caller has made sure that no task uses it.
void release_cached(DeviceState& device) {
  for (auto& [key, blocks] : device.cached) {
    for (Block* block : blocks) {
      device.stats.reserved_bytes[kAll].decrease(block->bytes);
      free(block->ptr);
      delete block;
    }
    blocks.clear();
  }
}

// Takes back freed blocks whose other streams are done with them.
void reclaim(DeviceState& device) {
  auto& waiting = device.in_use_elsewhere;
  for (size_t i = 0; i < waiting.size();) {
    Block* block = waiting[i];
    bool over = true;
    for (auto& [stream, seq] : block->used) over &= device.queues[stream].done >= seq;
    if (!over) {
      ++i;
      continue;
    }
    block->used.clear();
    device.cached[{block->place.stream, block->bytes}].push_back(block);
    waiting.erase(waiting.begin() + i);
  }
}

void free_block(void* pointer) {
  if (world().bad_fork) return;  // another thread may have held the lock at the fork
  Lock lock(world().lock);
  auto found = world().blocks.find(pointer);
  if (found == world().blocks.end()) return;
  Block* block = found->second;
  world().blocks.erase(found);
  DeviceState& device = world().device[block->place.device];
  device.stats.allocated_bytes[kAll].decrease(block->bytes);
  device.stats.allocation[kAll].decrease(1);
  for (auto& [stream, seq] : block->used) seq = device.queues[stream].issued;
  if (block->used.empty()) {
    device.cached[{block->place.stream, block->bytes}].push_back(block);
  } else {
    device.in_use_elsewhere.push_back(block);
  }
}

[[noreturn]] void refuse(Lock& lock, DeviceIndex index, size_t bytes) {
  DeviceState& device = world().device[index];
  device.stats.num_ooms++;
  const auto allocated = device.stats.allocated_bytes[kAll].current;
  const size_t limit = device.limit ? device.limit : kTotalMemory;
  lock.unlock();
  C10_THROW_ERROR(OutOfMemoryError, c10::str("sim out of memory. Tried to allocate ", bytes, " bytes. Device ",
                                             int(index), " has a total capacity of ", limit, " bytes, of which ",
                                             allocated, " are allocated."));
}

Block* new_block(Lock& lock, Place place, size_t bytes) {
  DeviceState& device = world().device[place.device];
  auto over = [&] { return device.limit && size_t(device.stats.reserved_bytes[kAll].current) + bytes > device.limit; };
  if (over()) {
    device.stats.num_alloc_retries++;
    run_device(lock, place.device);
    reclaim(device);
    release_cached(device);
  }
  if (over()) refuse(lock, place.device, bytes);
  auto* block = new Block{aligned_memory(bytes), bytes, place, 0, {}};
  memset(block->ptr, 0xFF, bytes);
  device.stats.reserved_bytes[kAll].increase(bytes);
  device.stats.num_device_alloc++;
  return block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const DeviceIndex index = current_device;
    if (wanted == 0) return {nullptr, nullptr, &free_block, Device(kSim, index)};
    const size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment;
    const Place place = current_place(index);
    Lock lock = enter(index);
    DeviceState& device = world().device[index];
    reclaim(device);
    if (std::exchange(device.out_of_memory, false)) refuse(lock, index, bytes);
    auto& cached = device.cached[{place.stream, bytes}];
    Block* block = nullptr;
    if (cached.empty()) {
      block = new_block(lock, place, bytes);
    } else {
      block = cached.back();
      cached.pop_back();
    }
    device.stats.allocated_bytes[kAll].increase(bytes);
    device.stats.allocation[kAll].increase(1);
    block->number = ++device.allocations;
    void* pointer = block->ptr;
    world().blocks[pointer] = block;
    // In the order of the stream: what it runs before may still use the memory.
    enqueue(lock, place, {[pointer, bytes] { memset(pointer, 0xFF, bytes); }});
    return {pointer, pointer, &free_block, Device(kSim, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    launch(current_place(current_device), [=] { memcpy(target, source, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    if (!world().used) return;
    for (int index = 0; index < world().devices; index++) {
      DeviceState& device = world().device[index];
      Lock lock = enter(index);
      bool cached = !device.in_use_elsewhere.empty();
      for (auto& [key, blocks] : device.cached) cached |= !blocks.empty();
      if (!cached) continue;
      run_device(lock, index);
      reclaim(device);
      release_cached(device);
    }
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override { record_use(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Lock lock(world().lock);
    return world().device[index].stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    Lock lock(world().lock);
    for (auto* kind : kinds(index)) (*kind)[kAll].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex index) override {
    Lock lock(world().lock);
    for (auto* kind : kinds(index)) (*kind)[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    configure();
    Lock lock(world().lock);
    DeviceState& device = world().device[index];
    const size_t total = device.limit ? device.limit : kTotalMemory;
    return {total - device.stats.reserved_bytes[kAll].current, total};
  }
  static std::array<c10::CachingAllocator::StatArray*, 3> kinds(DeviceIndex index) {
    auto& stats = world().device[index].stats;
    return {&stats.allocated_bytes, &stats.reserved_bytes, &stats.allocation};
  }
};
Allocator the_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_allocator);

void free_pinned(void* pointer) {
  if (!world().bad_fork) {
    Lock lock(world().lock);
    world().pinned.erase(static_cast<const char*>(pointer));
  }
  free(pointer);
}

// Copies that have yet to run hold the storage that they use, so that nothing is recorded here.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const size_t bytes = std::max<size_t>(64, wanted);
    void* pointer = aligned_memory(bytes);
    Lock lock = enter(current_device);
    world().pinned[static_cast<const char*>(pointer)] = bytes;
    return {pointer, pointer, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator the_pinned_allocator;
}  // namespace

c10::DeviceAllocator& allocator() { return the_allocator; }
at::HostAllocator& pinned_allocator() { return the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  if (world().bad_fork) return false;
  Lock lock(world().lock);
  const auto* at = static_cast<const char*>(pointer);
  auto after = world().pinned.upper_bound(at);
  return after != world().pinned.begin() && at < (--after)->first + after->second;
}

// What a device has held since an allocation of this number, or longer.
size_t bytes_older_than(DeviceIndex device, uint64_t allocation) {
  Lock lock(world().lock);
  size_t found = 0;
  for (auto& [pointer, block] : world().blocks) {
    if (block->place.device == device && block->number <= allocation) found += block->bytes;
  }
  return found;
}

void record_use(const c10::DataPtr& data, Stream stream) {
  Lock lock(world().lock);
  auto found = world().blocks.find(data.get_context());
  if (found != world().blocks.end() && found->second->place.stream != stream.id()) found->second->used[stream.id()] = 0;
}
}  // namespace sim
