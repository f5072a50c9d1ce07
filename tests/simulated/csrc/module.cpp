// The Python module: controls, counters, and what a collective library needs of streams.
#include <torch/csrc/Exceptions.h>

#include "world.h"

namespace sim {
namespace {
struct PyGate {  // a place in a stream that is passed when Python says so
  Place place;
  std::shared_ptr<Gate> gate;
  uint64_t inputs;  // tasks of the stream before it
};

// Waits until somebody needs what is behind a gate, at most for so long, then runs what is before; ends at an abort.
void wait_until_due(const PyGate& gate, double seconds) {
  Lock lock = enter(gate.place.device);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  world().changed.wait_until(lock, until, [&] { return gate.gate->wanted || gate.gate->open; });
  run_until(lock, gate.place, gate.inputs, gate.gate.get());
  lock.unlock();
  enter(gate.place.device);  // raises if the device was lost meanwhile
}

// Opens a gate; with an error, what is behind it does nothing, and the next wait of the host raises.
void open_gate(const PyGate& gate, const std::string& error) {
  Lock lock(world().lock);
  if (std::exchange(gate.gate->open, true)) return;  // it was aborted
  gate.gate->failed = !error.empty();
  DeviceState& device = world().device[gate.place.device];
  if (gate.gate->failed && !device.error) {
    device.error = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, uint32_t(__LINE__)}, error));
  }
  announce();
  run_all_ready(lock);
}

// Opens a gate, unless it is open: what is behind it leaves garbage, and no error. Tensors are kept until then.
void abort_gate(const PyGate& gate, const std::vector<Tensor>& tensors) {
  std::vector<Storage> kept;
  for (const Tensor& tensor : tensors) kept.push_back(tensor.storage());
  Lock lock(world().lock);
  if (std::exchange(gate.gate->open, true)) return;
  gate.gate->aborted = true;
  Queue& queue = queue_of(gate.place);
  queue.tasks.push_back({[kept = std::move(kept)] {}, nullptr, nullptr, ++queue.issued});
  announce();
  run_all_ready(lock);
}

PyGate new_gate(DeviceIndex device, StreamId stream) {
  const Place place{device, stream};
  auto gate = std::make_shared<Gate>();
  Lock lock = enter(device);
  const uint64_t seq = enqueue(lock, place, {nullptr, nullptr, gate});
  return {place, gate, seq - 1};
}

// Enqueues a copy into memory of the host that nobody else sees.
void read(DeviceIndex device, StreamId stream, const Tensor& source, const Tensor& host) {
  Lock lock = enter(device);
  enqueue(lock, {device, stream}, {[from = host_view(source), to = host]() mutable {
            KernelsOnly kernels;
            to.copy_(from);
          }});
}

// What an aborted collective leaves: every other tensor stays poisoned, the rest look like numbers.
void leave_garbage(Tensor& to) {
  static std::atomic<uint64_t> left = 0;
  if (++left % 2 == 0 && to.is_floating_point()) to.fill_(100);
}

// Enqueues the copy back, unless the gate before it has failed.
void write(const PyGate& gate, const Tensor& host, const Tensor& target) {
  Lock lock = enter(gate.place.device);
  enqueue(lock, gate.place, {[gate = gate.gate, from = host, to = host_view(target)]() mutable {
            KernelsOnly kernels;
            if (gate->aborted) leave_garbage(to);
            else if (!gate->failed) to.copy_(from);
          }});
}

// Enqueues, in the current stream, what nobody may read: NaN, or the greatest integer.
void poison(const Tensor& tensor) {
  Lock lock = enter(tensor.device().index());
  enqueue(lock, current_place(tensor.device().index()), {[to = host_view(tensor)]() mutable {
            KernelsOnly kernels;
            if (to.is_floating_point() || to.is_complex()) to.fill_(std::numeric_limits<double>::quiet_NaN());
            else if (to.scalar_type() == at::kBool) to.fill_(true);
            else to.fill_(0x7F);
          }});
}

std::map<std::string, uint64_t> counts() {
  Lock lock(world().lock);
  const Counts& counts = world().counts;
  return {{"launches", counts.launches},
          {"host_waits", counts.host_waits},
          {"idle_waits", counts.idle_waits},
          {"synchronizing_operators", counts.synchronizing_operators},
          {"copies_to_device", counts.copies_to_device},
          {"copies_to_host", counts.copies_to_host}};
}

DeviceState& device_at(int index) {
  TORCH_CHECK(0 <= index && index < world().devices, "sim error: invalid device ordinal ", index);
  configure();  // what is set here holds, not the environment
  return world().device[index];
}
}  // namespace
void register_device();
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using Released = pybind11::call_guard<pybind11::gil_scoped_release>;
  register_device();
  m.def("device_count", [] { return world().devices; });
  m.def("set_device_count", [](int count) {
    TORCH_CHECK(0 < count && count <= kMostDevices, "between 1 and ", kMostDevices, " devices, not ", count);
    world().devices = count;
  });
  m.def("set_order", [](const std::string& name, uint64_t seed) {
    configure();
    Lock lock(world().lock);
    world().order = order_named(name);
    world().dice.seed(seed);
    world().asleep = world().dice();
    run_all_ready(lock);
  }, Released());
  m.def("order", [] {
    configure();
    return std::array<const char*, 3>{"late", "random", "eager"}[int(world().order)];
  });
  m.def("forget_waits", [](bool forget) { world().forgets_waits = forget; });
  m.def("set_memory_limit", [](int device, size_t bytes) { device_at(device).limit = bytes; });
  m.def("launches", [](int device) { return device_at(device).launches; });
  m.def("allocations", [](int device) { return device_at(device).allocations; });
  m.def("bytes_older_than", &bytes_older_than);
  m.def("is_in_bad_fork", [] { return world().bad_fork; });
  m.def("is_used", [] { return world().used; });
  m.def("default_generator", [](int device) {
    device_at(device);
    return default_generator(device);
  });
  m.def("counts", &counts);
  m.def("waits_by_kind", [] {
    Lock lock(world().lock);
    return world().counts.waits_by_kind;
  });
  m.def("reset_counts", [] {
    Lock lock(world().lock);
    world().counts = {};
  });
  m.def("on_wait", [](std::optional<pybind11::function> call) {
    auto held = std::make_shared<std::optional<pybind11::function>>(std::move(call));
    world().on_wait = nullptr;
    if (held->has_value()) {
      world().on_wait = [held](const std::string& kind) {
        pybind11::gil_scoped_acquire python;
        (**held)(kind);
      };
    }
  });
  m.def("read", torch::wrap_pybind_function_no_gil(&sim::read));
  m.def("write", torch::wrap_pybind_function_no_gil(&sim::write));
  m.def("poison", torch::wrap_pybind_function_no_gil(&poison));
  m.def("gate", torch::wrap_pybind_function_no_gil(&new_gate));
  m.def("wait_until_due", torch::wrap_pybind_function_no_gil(&wait_until_due));
  m.def("open_gate", torch::wrap_pybind_function_no_gil(&open_gate));
  m.def("abort_gate", torch::wrap_pybind_function_no_gil(&abort_gate));
  pybind11::class_<PyGate>(m, "Gate");
}
