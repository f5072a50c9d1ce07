// Operators: each is a kernel in the current stream that calls the CPU's operator on the same memory.
//
// What comes out is asked of the operator's meta kernel, so that nothing has to run. An operator whose output depends
// on values (`nonzero`), or that has no meta kernel, makes the host wait.
#include "world.h"

namespace sim {
bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The memory of a tensor as a tensor of the CPU, which does not keep it.
Tensor host_view(const Tensor& tensor) {
  if (!on_sim(tensor)) return tensor;
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return at::for_blob(data, tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(c10::kCPU))
      .make_tensor();
}

static Tensor empty_as(const Tensor& wanted, DeviceIndex device) {
  c10::DeviceGuard guard(Device(kSim, device));
  return at::empty_strided(wanted.sizes(), wanted.strides(), wanted.options().device(Device(kSim, device)));
}

// A tensor of the CPU on its way to the device, in the order of the current stream.
Tensor onto_device(const Tensor& host, DeviceIndex device) {
  Tensor out = empty_as(host, device);
  launch(current_place(device), [to = host_view(out), host]() mutable {
    KernelsOnly kernels;
    to.copy_(host);
  });
  return out;
}

namespace {
Tensor on_meta(const Tensor& tensor) {
  if (!on_sim(tensor)) return tensor.defined() && tensor.dim() ? tensor.to(c10::kMeta) : tensor;
  const auto options = tensor.options().device(c10::kMeta);
  if (tensor.storage_offset() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const int64_t held = tensor.storage().nbytes() / tensor.itemsize();
  return at::empty({held}, options).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// A view of a tensor's memory with the shape, strides, offset and dtype that a meta kernel gave.
Tensor view_as(const Tensor& owner, const Tensor& wanted) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(owner.storage()),
                                                         owner.key_set(), wanted.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(wanted.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes(), wanted.strides());
  return view;
}

template <class F>
IValue mapped(const IValue& value, F change, Device device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& tensor : value.toTensorVector()) out.push_back(change(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      out.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return out;
  }
  if (value.isDevice()) return device;
  return value;
}

template <class F>
void each_tensor(const IValue& value, F look) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) look(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value() && tensor->defined()) look(*tensor);
    }
  }
}

bool is_tensors(const c10::Argument& returned) {
  const auto type = returned.type();
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::ListType && type->containedTypeSize() &&
         type->containedType(0)->kind() == c10::TypeKind::TensorType;
}

// One call of an operator: arguments in, results out.
class Call {
 public:
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> args;
  std::vector<IValue> results;
  DeviceIndex device = -1;
  bool random;
  uint64_t seed = 0;

  Call(const c10::OperatorHandle& operator_, std::vector<IValue> arguments)
      : op(operator_),
        schema(operator_.schema()),
        args(std::move(arguments)),
        results(schema.returns().size()),
        random(operator_.hasTag(at::Tag::nondeterministic_seeded)) {
    find_device();
    if (random) draw_seed();
  }

  void run() {
    const std::shared_ptr<const Shapes> shapes = known_shapes();
    if (shapes->there) {
      resize_written(shapes->before);
      allocate(shapes->after);
      enqueue_kernel();
    } else {
      run_now();
    }
  }

  // The host waits, and calls the operator itself.
  void run_now() {
    {
      Lock lock(world().lock);
      world().counts.synchronizing_operators++;
    }
    std::string name = schema.name();
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
    wait_on_host("operator " + name, current_place(device));
    std::vector<IValue> stack = host_args();
    const std::vector<IValue> written = stack;
    kernel()(stack);
    for (size_t i = 0; i < args.size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      const bool sparse = args[i].isTensor() && on_sim(args[i].toTensor()) && args[i].toTensor().is_sparse();
      if (info && info->isWrite() && sparse) store_sparse(written[i].toTensor(), args[i].toTensor(), device);
    }
    for (size_t r = 0; r < results.size(); r++) {
      if (const int from = owner(r); from >= 0) {
        results[r] = args[from];
        continue;
      }
      auto made = [&](const Tensor& host) {
        if (!host.defined()) return host;
        return host.is_sparse() ? sparse_onto_device(host, device) : onto_device(host, device);
      };
      results[r] = mapped(stack[r], made, Device(kSim, device));
    }
  }

 private:
  // All tensors are on one device; the CPU's only where they are numbers or, as with CUDA, indices.
  void find_device() {
    static const std::set<std::string> host_indices = {"aten::index", "aten::_unsafe_index", "aten::index_put_",
                                                       "aten::index_put", "aten::_index_put_impl_"};
    const bool indexes = host_indices.count(schema.name()) > 0, copies = schema.name() == "aten::copy_";
    std::optional<Device> found, other;
    for (size_t i = 0; i < args.size(); i++) {
      const bool takes_host = copies || (indexes && i == 1);
      each_tensor(args[i], [&](const Tensor& tensor) {
        if (on_sim(tensor) || (tensor.dim() && !takes_host)) {
          if (!found) found = tensor.device();
          if (*found != tensor.device()) other = tensor.device();
        }
      });
    }
    TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *found,
                " and ", *other, "! (", schema.name(), ")");
    if (found) device = found->index();
    for (const IValue& arg : args) {
      if (device < 0 && arg.isDevice()) device = arg.toDevice().index();
    }
    device = or_current(device);
  }

  void draw_seed() {
    std::optional<at::Generator> given;
    for (const IValue& arg : args) {
      if (arg.isGenerator()) given = arg.toGenerator();
    }
    seed = next_seed(given, device);
  }

  std::shared_ptr<const Shapes> known_shapes() const {
    Signature signature;
    signature.put('p', static_cast<const void*>(&schema));
    signature.put('d', c10::typeMetaToScalarType(c10::get_default_dtype()));
    for (const IValue& arg : args) signature.put(arg);
    if (!signature.known) return std::make_shared<Shapes>(shapes());
    {
      std::lock_guard<std::mutex> lock(known().lock);
      auto found = known().shapes.find(signature.bytes);
      if (found != known().shapes.end()) return found->second;
    }
    auto made = std::make_shared<const Shapes>(shapes());
    std::lock_guard<std::mutex> lock(known().lock);
    if (known().shapes.size() > Known::kMost) known().shapes.clear();
    return known().shapes[signature.bytes] = made;
  }

  // What comes out, by the meta kernel. It may be Python's, so that no lock is held.
  Shapes shapes() const {
    Shapes found;
    for (const auto& returned : schema.returns()) {
      if (!is_tensors(returned)) return found;
    }
    try {
      KernelsOnly kernels(c10::kMeta);
      for (const IValue& arg : args) {
        found.before.push_back(arg.isGenerator() ? IValue() : mapped(arg, on_meta, Device(c10::kMeta)));
      }
      found.after = found.before;
      op.callBoxed(&found.after);
      found.there = true;
    } catch (const std::exception&) {
      // a real mistake shows when the CPU's kernel runs, at once
    }
    return found;
  }

  // The argument that a result is, or is a view of; -1 if it is new.
  int owner(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    for (size_t i = 0; alias && i < args.size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      if (info && info->beforeSets() == alias->beforeSets()) return int(i);
    }
    return -1;
  }

  void resize_written(const std::vector<IValue>& before) {
    for (size_t i = 0; i < args.size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      if (!info || !info->isWrite() || !args[i].isTensor() || !before[i].isTensor()) continue;
      const Tensor &wanted = before[i].toTensor(), &tensor = args[i].toTensor();
      if (!on_sim(tensor) || (wanted.sizes() == tensor.sizes() && wanted.strides() == tensor.strides())) continue;
      tensor.resize_(wanted.sizes());
      if (wanted.strides() != tensor.strides()) tensor.as_strided_(wanted.sizes(), wanted.strides());
    }
  }

  void allocate(const std::vector<IValue>& after) {
    for (size_t r = 0; r < results.size(); r++) {
      const int from = owner(r);
      if (from >= 0 && schema.returns()[r].alias_info()->isWrite()) {
        results[r] = args[from];
        continue;
      }
      auto made = [&](const Tensor& wanted) {
        if (!wanted.defined()) return wanted;
        return from >= 0 ? view_as(args[from].toTensor(), wanted) : empty_as(wanted, device);
      };
      results[r] = mapped(after[r], made, Device(kSim, device));
    }
  }

  // The arguments on the CPU: the same memory, and the numbers of the host as they are now.
  std::vector<IValue> host_args() const {
    std::vector<IValue> out;
    for (const IValue& arg : args) {
      auto host = [](const Tensor& tensor) {
        if (on_sim(tensor)) return tensor.is_sparse() ? sparse_on_host(tensor) : host_view(tensor);
        return tensor.defined() && !tensor.is_sparse() ? tensor.clone() : tensor;
      };
      out.push_back(arg.isGenerator() ? IValue() : mapped(arg, host, Device(c10::kCPU)));
    }
    return out;
  }

  std::function<void(std::vector<IValue>&)> kernel() const {
    int generator = -1;  // the argument that may be one
    for (size_t i = 0; i < args.size(); i++) {
      if (schema.arguments()[i].name() == "generator") generator = int(i);
    }
    const bool spoiled = spoils(device, schema.name());
    return [op = op, random = random, seed = seed, generator, spoiled, device = device](std::vector<IValue>& stack) {
      KernelsOnly kernels;
      const auto begun = std::chrono::steady_clock::now();
      if (!random) {
        op.callBoxed(&stack);
        if (spoiled) spoil(device, stack[0].toTensor(), begun);
        return;
      }
      at::Generator own = at::detail::createCPUGenerator(seed);
      if (generator >= 0) {
        stack[generator] = own;
        return op.callBoxed(&stack);
      }
      // It draws from the CPU's own generator, which is put back.
      static std::mutex one;
      std::lock_guard<std::mutex> alone(one);
      at::Generator host = at::detail::getDefaultCPUGenerator();
      const auto kept = host.get_state();
      host.set_state(own.get_state());
      try {
        op.callBoxed(&stack);
      } catch (...) {
        host.set_state(kept);
        throw;
      }
      host.set_state(kept);
    };
  }

  void enqueue_kernel() {
    std::vector<std::pair<size_t, std::vector<Tensor>>> fresh;  // new results, and where they belong
    for (size_t r = 0; r < results.size(); r++) {
      if (owner(r) >= 0) continue;
      std::vector<Tensor> into;
      if (results[r].isTensor()) into.push_back(host_view(results[r].toTensor()));
      else each_tensor(results[r], [&](const Tensor& tensor) { into.push_back(host_view(tensor)); });
      fresh.emplace_back(r, std::move(into));
    }
    auto run = [call = kernel(), arguments = host_args(), fresh = std::move(fresh)] {
      std::vector<IValue> stack = arguments;
      call(stack);
      KernelsOnly kernels;
      for (auto& [r, into] : fresh) {
        size_t i = 0;
        if (stack[r].isTensor() && !stack[r].toTensor().defined()) continue;
        each_tensor(stack[r], [&, &targets = into](const Tensor& made) {
          // What the CPU leaves out (statistics that evaluation does not need) stays undefined here.
          if (made.numel() == targets[i].numel()) targets[i].copy_(made);
          i++;
        });
      }
    };
    launch(current_place(device), std::move(run));
  }
};

void finish(Call& call, torch::jit::Stack* stack) {
  stack->erase(stack->end() - call.args.size(), stack->end());
  for (IValue& result : call.results) stack->push_back(std::move(result));
}

std::vector<IValue> arguments_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return std::vector<IValue>(stack.end() - op.schema().arguments().size(), stack.end());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, arguments_of(op, *stack));
  call.run();
  finish(call, stack);
}
}  // namespace

// An operator that the host waits for.
void call_now(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, arguments_of(op, *stack));
  call.run_now();
  finish(call, stack);
}

// An operator under another name than it was called by.
void call_as(const char* name, const char* overload, torch::jit::Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack);
}

// A GPU has one kernel for a list of tensors; torch's general form would be one for each tensor.
void register_lists() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace sim
