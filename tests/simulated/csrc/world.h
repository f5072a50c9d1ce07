// What all parts of the simulated accelerator share: devices, streams, the order in which these run, and counters.
//
// A stream is a queue of tasks. One lock guards all queues, and nothing runs while it is held: neither a kernel, which
// may take long, nor a destructor, which may need Python's lock.
#pragma once
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>

namespace sim {
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Storage, c10::Stream, c10::StreamId;
using Lock = std::unique_lock<std::mutex>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;
constexpr size_t kMostPending = 4096;  // tasks of a stream; then the host helps, as CUDA makes it wait
constexpr size_t kTotalMemory = size_t(1) << 34;  // where no limit is set

enum class Order {
  late,    // as late as they may: a task runs when somebody waits for it
  random,  // at every launch and wait, some tasks of some streams that may run
  eager,   // as soon as they may
};

struct Place {
  DeviceIndex device;
  StreamId stream;
};
struct Event {
  Place place;
  uint64_t seq;  // over when this many tasks of the stream are
  bool timing;
  double ms = -1;
  int queries = 0;
};
struct Gate {  // closed until something that happens outside of the device is there, or is given up
  bool open = false, wanted = false, failed = false, aborted = false;
};
struct Fault {  // planted in a device; the number is a launch, a factor or a period, as the kind needs
  std::string kind;
  uint64_t number;
};
struct Task {
  std::function<void()> run;      // a kernel, or
  std::shared_ptr<Event> event;   // a wait for an event, or
  std::shared_ptr<Gate> gate;     // a wait for a gate
  uint64_t seq = 0;
};
struct Queue {
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0, last_launch = 0;
  bool running = false;
};
struct Block {
  void* ptr;
  size_t bytes;
  Place place;
  uint64_t number;  // of its allocation
  std::map<StreamId, uint64_t> used;  // by other streams, until so many of their tasks are done
};
struct DeviceState {
  std::map<StreamId, Queue> queues;
  StreamId next_stream = 1;
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> in_use_elsewhere;
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t limit = 0;  // in bytes; 0: none
  at::Generator generator;
  std::exception_ptr error;  // of a task; raised by the next wait of the host
  std::string lost;          // why every call fails from now on; empty while the device lives
  int32_t lost_code = 0;
  uint64_t launches = 0, allocations = 0;
  std::vector<Fault> faults;
  bool out_of_memory = false;  // the next allocation fails
};
struct Counts {
  uint64_t launches = 0, host_waits = 0, idle_waits = 0, synchronizing_operators = 0;
  uint64_t copies_to_device = 0, copies_to_host = 0;
  std::map<std::string, uint64_t> waits_by_kind;
};
struct World {
  std::mutex lock;
  std::condition_variable changed;
  uint64_t version = 0;  // of all queues and gates
  int devices = 2;
  Order order = Order::late;
  bool forgets_waits = false;
  bool configured = false, used = false, bad_fork = false;
  std::mt19937_64 dice;
  uint64_t asleep = 0;  // streams that random order leaves alone for now, by the bits of their numbers
  DeviceState device[kMostDevices];
  std::map<void*, Block*> blocks;
  std::map<const char*, size_t> pinned;
  Counts counts;
  std::function<void(const std::string&)> on_wait;  // called with the kind of each wait of the host
};

inline World& world() {
  static World* one = new World;  // never destroyed: tensors may outlive it
  return *one;
}
inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_streams[kMostDevices] = {};

inline Place current_place(DeviceIndex device) { return {device, current_streams[device]}; }
inline DeviceIndex or_current(DeviceIndex device) { return device < 0 ? current_device : device; }

// Within, operators are the CPU's or meta kernels alone, whatever mode the thread is in that happens to run the task.
struct KernelsOnly {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
  c10::DeviceGuard device;
  explicit KernelsOnly(c10::DeviceType type = c10::kCPU) : device(Device(type)) {}
};

// streams.cpp
void configure();
Order order_named(const std::string& name);
Lock enter(DeviceIndex device);
uint64_t enqueue(Lock& lock, Place place, Task task);
void launch(Place place, std::function<void()> kernel);
void run_until(Lock& lock, Place place, uint64_t seq, const Gate* unless_open = nullptr);
void run_device(Lock& lock, DeviceIndex device);
void run_all_ready(Lock& lock);
void wait_on_host(const std::string& kind, Place place, uint64_t seq = UINT64_MAX);
void wait_for_device(DeviceIndex device);
void announce();
bool is_over(const Event& event);
bool query(Lock& lock, Event& event);

// faults.cpp
std::vector<Fault> planted_faults(const std::string& text, uint64_t rank, bool first);
void strike(Lock& lock, Place place);
bool spoils(DeviceIndex device, const std::string& op);
void spoil(DeviceIndex device, const Tensor& product, std::chrono::steady_clock::time_point begun);

// memory.cpp
c10::DeviceAllocator& allocator();
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* pointer);
void record_use(const c10::DataPtr& data, Stream stream);
size_t bytes_older_than(DeviceIndex device, uint64_t allocation);

// device.cpp
uint64_t next_seed(const std::optional<at::Generator>& given, DeviceIndex device);
at::Generator& default_generator(DeviceIndex device);

// operators.cpp
bool on_sim(const Tensor& tensor);
Tensor host_view(const Tensor& tensor);
Tensor onto_device(const Tensor& host, DeviceIndex device);
void call_as(const char* name, const char* overload, torch::jit::Stack* stack);
void register_lists();
void call_now(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// sparse.cpp
Tensor sparse_on_host(const Tensor& tensor);
Tensor sparse_onto_device(const Tensor& host, DeviceIndex device);
void register_sparse();
void store_sparse(const Tensor& host, const Tensor& target, DeviceIndex device);
}  // namespace sim
