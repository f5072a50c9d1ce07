// Streams: queues of tasks that run as late as they may, at random, or at once.
#include "world.h"

namespace sim {
namespace {
struct WithoutPython {  // lets go of Python's lock, where this thread holds it
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutPython() {
    if (state) PyEval_RestoreThread(state);
  }
};

Queue& queue_of(Place place) { return world().device[place.device].queues[place.stream]; }

void refuse_if_lost(Lock& lock, DeviceIndex device) {
  if (world().device[device].lost.empty()) return;
  std::string why = world().device[device].lost;
  if (lock.owns_lock()) lock.unlock();
  throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, world().device[device].lost_code, why);
}

void raise_pending_error(Lock& lock, DeviceIndex device) {
  refuse_if_lost(lock, device);
  if (std::exception_ptr error = std::exchange(world().device[device].error, nullptr)) {
    lock.unlock();
    std::rethrow_exception(error);
  }
}

void wait_for_change(Lock& lock) {
  const uint64_t seen = world().version;
  lock.unlock();
  {
    WithoutPython without;
    lock.lock();
    world().changed.wait(lock, [&] { return world().version != seen; });
    lock.unlock();  // before Python's lock is taken again
  }
  lock.lock();
}

void run_head(Lock& lock, Place place) {
  Queue& queue = queue_of(place);
  DeviceState& device = world().device[place.device];
  Task task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  queue.running = true;
  const bool lives = device.lost.empty();
  lock.unlock();
  std::exception_ptr error;
  if (task.run && lives) {
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
  }
  const uint64_t seq = task.seq;
  task = {};
  lock.lock();
  queue.running = false;
  queue.done = seq;
  if (error && !device.error) device.error = error;
  announce();
}

// Runs one task of a stream, or of one that it waits for. Returns false if nothing can be done but wait.
bool step(Lock& lock, Place place, bool wanted) {
  for (;;) {
    Queue& queue = queue_of(place);
    if (queue.running || queue.tasks.empty()) return false;
    Task& head = queue.tasks.front();
    if (head.event && !is_over(*head.event)) {
      place = head.event->place;
      continue;
    }
    if (head.gate && !head.gate->open) {
      if (wanted && !head.gate->wanted) {
        head.gate->wanted = true;
        announce();
      }
      return false;
    }
    run_head(lock, place);
    return true;
  }
}

// Runs a random number of tasks of random streams. Half of the streams sleep, now these, now those: when the host
// waits for one that is awake, those that it should have waited for are far behind.
void run_some(Lock& lock, DeviceIndex device) {
  if (world().dice() % 16 == 0) world().asleep = world().dice();
  for (uint64_t left = world().dice() % 6; left > 0; --left) {
    std::vector<StreamId> busy;
    for (auto& [stream, queue] : world().device[device].queues) {
      if (!queue.tasks.empty() && !(world().asleep >> (stream % 64) & 1)) busy.push_back(stream);
    }
    if (busy.empty()) return;
    step(lock, {device, busy[world().dice() % busy.size()]}, false);
  }
}

// Counts a wait of the host that leaves the device without a kernel to run.
void note_idle(DeviceIndex device) {
  for (auto& [stream, queue] : world().device[device].queues) {
    if (queue.done < queue.last_launch) return;
  }
  world().counts.idle_waits++;
}

void note_wait(const std::string& kind) {
  std::function<void(const std::string&)> call;
  {
    Lock lock(world().lock);
    world().counts.host_waits++;
    world().counts.waits_by_kind[kind]++;
    call = world().on_wait;
  }
  if (call) call(kind);
}
}  // namespace

// Whoever waits looks again. The caller holds the lock.
void announce() {
  world().version++;
  world().changed.notify_all();
}

// Takes the settings of the environment, once; again in a fork, which then knows its rank.
void configure() {
  static std::mutex one;
  std::lock_guard<std::mutex> alone(one);
  if (std::exchange(world().configured, true)) return;
  auto text = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  auto number = [&](const char* name) { return std::strtoull(text(name).c_str(), nullptr, 10); };
  const uint64_t rank = number("RANK");
  world().dice.seed(number("PACELINE_SIMULATED_SEED") * 1009 + rank);
  world().asleep = world().dice();
  if (!text("PACELINE_SIMULATED_ORDER").empty()) world().order = order_named(text("PACELINE_SIMULATED_ORDER"));
  const std::string faults = number("PACELINE_ATTEMPT") ? "" : text("PACELINE_SIMULATED_FAULT");
  for (DeviceState& device : world().device) {
    device.limit = number("PACELINE_SIMULATED_MEMORY");
    device.faults = planted_faults(faults, rank, number("PACELINE_STARTS") == 0);
  }
}

Order order_named(const std::string& name) {
  TORCH_CHECK(name == "late" || name == "random" || name == "eager", "the order is late, random or eager, not ", name);
  return name == "late" ? Order::late : name == "random" ? Order::random : Order::eager;
}

// The lock, for a call that uses a device; refused in a fork of a process that has used one, and on a lost device.
Lock enter(DeviceIndex device) {
  TORCH_CHECK(!world().bad_fork,
              "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the "
              "'spawn' start method");
  configure();
  Lock lock(world().lock);
  world().used = true;
  refuse_if_lost(lock, device);
  return lock;
}

bool is_over(const Event& event) { return queue_of(event.place).done >= event.seq; }

// An event's state. Who asks again and again gets it done at last, as on a device that works meanwhile.
bool query(Lock& lock, Event& event) {
  if (!is_over(event) && ++event.queries > 2) step(lock, event.place, true);
  return is_over(event);
}

uint64_t enqueue(Lock& lock, Place place, Task task) {
  Queue& queue = queue_of(place);
  const uint64_t seq = task.seq = ++queue.issued;
  queue.tasks.push_back(std::move(task));
  if (world().order == Order::eager) {
    while (step(lock, place, false)) {
    }
    raise_pending_error(lock, place.device);
  } else if (world().order == Order::random) {
    run_some(lock, place.device);
  }
  if (queue.tasks.size() > kMostPending) run_until(lock, place, seq - kMostPending / 2);
  return seq;
}

// Enqueues a kernel, and counts it; planted faults strike at their launch.
void launch(Place place, std::function<void()> kernel) {
  Lock lock = enter(place.device);
  world().counts.launches++;
  world().device[place.device].launches++;
  strike(lock, place);
  Queue& queue = queue_of(place);
  queue.last_launch = queue.issued + 1;
  enqueue(lock, place, {std::move(kernel)});
}

void run_until(Lock& lock, Place place, uint64_t seq, const Gate* unless_open) {
  while (queue_of(place).done < seq && !(unless_open && unless_open->open)) {
    refuse_if_lost(lock, place.device);
    if (!step(lock, place, true)) wait_for_change(lock);
  }
}

void run_device(Lock& lock, DeviceIndex device) {
  std::vector<std::pair<StreamId, uint64_t>> ends;
  for (auto& [stream, queue] : world().device[device].queues) ends.emplace_back(stream, queue.issued);
  if (world().order == Order::random) std::shuffle(ends.begin(), ends.end(), world().dice);
  for (auto& [stream, seq] : ends) run_until(lock, {device, stream}, seq);
}

// In eager order, what a gate held back runs when the gate opens.
void run_all_ready(Lock& lock) {
  if (world().order != Order::eager) return;
  for (bool more = true; more;) {
    more = false;
    for (int device = 0; device < world().devices; device++) {
      std::vector<StreamId> streams;
      for (auto& [stream, queue] : world().device[device].queues) streams.push_back(stream);
      for (StreamId stream : streams) more |= step(lock, {DeviceIndex(device), stream}, false);
    }
  }
}

// The host waits for a stream: for so many of its tasks, or all that it has now.
void wait_on_host(const std::string& kind, Place place, uint64_t seq) {
  note_wait(kind);
  Lock lock = enter(place.device);
  if (world().order == Order::random) run_some(lock, place.device);
  run_until(lock, place, std::min(seq, queue_of(place).issued));
  note_idle(place.device);
  raise_pending_error(lock, place.device);
}

void wait_for_device(DeviceIndex device) {
  note_wait("synchronize of a device");
  Lock lock = enter(device);
  run_device(lock, device);
  note_idle(device);
  raise_pending_error(lock, device);
}
}  // namespace sim
