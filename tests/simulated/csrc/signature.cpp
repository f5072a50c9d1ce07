// What is known of operators' results: the shapes that meta kernels gave for arguments of these shapes.
#include "world.h"

namespace sim {
namespace {
// What a meta kernel sees of its arguments, as bytes.
struct Signature {
  std::string bytes;
  bool known = true;  // false where an argument is neither a tensor nor a plain value

  template <class T>
  void put(char kind, T value) {
    bytes.push_back(kind);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(c10::IntArrayRef numbers) {
    put('n', numbers.size());
    for (int64_t number : numbers) put('i', number);
  }
  void put(const Tensor& tensor) {
    if (!tensor.defined()) return bytes.push_back('u');
    known &= tensor.layout() == c10::kStrided;
    if (!known) return;
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't', tensor.scalar_type());
    put(tensor.sizes());
    put(tensor.strides());
    put('o', tensor.storage_offset());
    put('s', tensor.storage().nbytes());
    put('d', tensor.device().type());
  }
  void put(const IValue& value) {
    if (value.isTensor()) put(value.toTensor());
    else if (value.isInt()) put('i', value.toInt());
    else if (value.isDouble()) put('f', value.toDouble());
    else if (value.isBool()) put('b', value.toBool());
    else if (value.isNone() || value.isGenerator() || value.isDevice()) bytes.push_back('x');
    else if (value.isString()) put('s', value.toStringRef().size()), bytes += value.toStringRef();
    else if (value.isList()) {
      const auto items = value.toListRef();
      put('l', items.size());
      for (const IValue& item : items) put(item);
    } else known = false;
  }
};

// The results of meta kernels that were asked before.
struct Shapes {
  bool there = false;  // false: only the values can tell
  std::vector<IValue> before, after;
};
struct Known {
  static constexpr size_t kMost = 2000;
  std::mutex lock;
  std::unordered_map<std::string, std::shared_ptr<const Shapes>> shapes;
};
Known& known() {
  static Known* one = new Known;
  return *one;
}
}  // namespace
}  // namespace sim
