// Failures on demand of a device; those of the collective library are in `faults.py`.
#include <atomic>
#include <sstream>
#include <thread>

#include "world.h"

namespace sim {
namespace {
struct Sticky {  // an error after which every call fails, as CUDA's code and text are
  int32_t code;
  const char* text;
};
const std::map<std::string, Sticky> kSticky = {
    {"lost", {79, "device lost: it has fallen off the bus (Xid 79)"}},
    {"ecc", {214, "uncorrectable ECC error encountered"}},
    {"failure", {719, "unspecified launch failure"}},
};
const std::set<std::string> kOthers = {"memory", "hang", "slow", "wrong"};
const std::set<std::string> kProducts = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
}  // namespace

// The faults of a rank in `kind:rank:number,…`; those with `:once` behind them only in its first process.
std::vector<Fault> planted_faults(const std::string& text, uint64_t rank, bool first) {
  std::vector<Fault> found;
  std::istringstream faults(text);
  for (std::string fault; std::getline(faults, fault, ',');) {
    char kind[16], times[8] = "";
    unsigned long long who, number;
    const bool whole = sscanf(fault.c_str(), "%15[a-z]:%llu:%llu:%7[a-z]", kind, &who, &number, times) > 2 && number;
    const bool once = std::string(times) == "once";
    TORCH_CHECK(whole && (once || !times[0]) && (kSticky.count(kind) || kOthers.count(kind)),
                "no fault of a simulated device: ", fault);
    if (who == rank && (first || !once)) found.push_back({kind, number});
  }
  return found;
}

// Called at every launch. A lost device raises at once; a hung kernel stays in front of its stream for good.
void strike(Lock& lock, Place place) {
  DeviceState& device = world().device[place.device];
  for (const Fault& fault : device.faults) {
    if (fault.number != device.launches) continue;
    if (fault.kind == "memory") device.out_of_memory = true;
    if (fault.kind == "hang") enqueue(lock, place, {nullptr, nullptr, std::make_shared<Gate>()});
    if (const auto sticky = kSticky.find(fault.kind); sticky != kSticky.end()) {
      device.lost_code = sticky->second.code;
      device.lost = c10::str("sim error: ", sticky->second.text, " (device ", int(place.device), ", launch ",
                             device.launches, "). Every later call on the device fails.");
      announce();
      refuse_if_lost(lock, place.device);
    }
  }
}

// True for matrix products of a device that is slow at them, or computes them wrong.
bool spoils(DeviceIndex device, const std::string& op) {
  const auto& faults = world().device[device].faults;
  if (faults.empty() || !kProducts.count(op)) return false;
  return std::any_of(faults.begin(), faults.end(), [](const Fault& f) { return f.kind == "slow" || f.kind == "wrong"; });
}

// Makes a matrix product that has just been computed last so many times as long, or gets one bit of every n-th wrong.
void spoil(DeviceIndex device, const Tensor& product, std::chrono::steady_clock::time_point begun) {
  static std::atomic<uint64_t> products = 0;
  const uint64_t number = ++products;
  for (const Fault& fault : world().device[device].faults) {
    if (fault.kind == "slow") {
      std::this_thread::sleep_for((std::chrono::steady_clock::now() - begun) * (fault.number - 1));
    } else if (fault.kind == "wrong" && number % fault.number == 0 && product.numel() && product.itemsize() > 1) {
      auto* bytes = static_cast<uint8_t*>(product.data_ptr());
      bytes[(product.numel() / 2 + 1) * product.itemsize() - 2] ^= 8;
    }
  }
}
}  // namespace sim
