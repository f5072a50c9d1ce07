// Tensors: their memory, copies between host and devices, views, and the names of convolution.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include "world.h"

namespace sim {
namespace {
// ---- memory and copies
// As a device whose hardware has no float64 (Apple's, some of Intel's) does.
static c10::ScalarType allowed(std::optional<c10::ScalarType> dtype) {
  static const char* float64 = std::getenv("PACELINE_SIMULATED_FLOAT64");
  const c10::ScalarType wanted = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(!float64 || std::string(float64) != "0" || wanted != c10::kDouble,
                   "this simulated accelerator has no float64. Please use float32 instead.");
  return wanted;
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kSim, -1)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   allowed(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kSim, -1)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, allowed(dtype));
}

std::function<void()> copying(Tensor from, Tensor to, Storage kept = {}) {
  return [from, to, kept]() mutable {
    KernelsOnly kernels;
    to.copy_(from);
  };
}

// The CPU's tensor without what torch holds of it, for a task that some other thread may run and drop.
Tensor bare(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options());
}

// The second stream waits for all that the first has now.
void order(Place first, Place second) {
  Lock lock = enter(first.device);
  auto event = std::make_shared<Event>(Event{first, 0, false});
  event->seq = enqueue(lock, first, {[] {}});
  enqueue(lock, second, {nullptr, event});
}

void copy_between(const Tensor& source, const Tensor& target) {
  const Place from = current_place(source.device().index()), to = current_place(target.device().index());
  const bool peers = from.device != to.device;
  if (peers) order(to, from);
  launch(from, copying(host_view(source), host_view(target)));
  if (peers) order(from, to);
}

void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  const Place place = current_place(target.device().index());
  {
    Lock lock(world().lock);
    world().counts.copies_to_device++;
  }
  if (non_blocking && source.numel() && is_pinned(source.const_data_ptr())) {
    launch(place, copying(bare(source), host_view(target), source.storage()));
    return;
  }
  Tensor staged;
  {
    KernelsOnly kernels;
    staged = source.clone();
  }
  launch(place, copying(staged, host_view(target)));
  if (!non_blocking) wait_on_host("copy to the device", place);
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  const Place place = current_place(source.device().index());
  {
    Lock lock(world().lock);
    world().counts.copies_to_host++;
  }
  if (non_blocking && target.numel() && is_pinned(target.const_data_ptr())) {
    launch(place, copying(host_view(source), bare(target), target.storage()));
    return;
  }
  launch(place, [] {});
  wait_on_host("copy to the host", place);
  KernelsOnly kernels;
  Tensor(target).copy_(host_view(source));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (on_sim(source) && on_sim(target)) copy_between(source, target);
  else if (on_sim(target)) copy_to_device(source, target, non_blocking);
  else copy_to_host(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  wait_on_host("item", current_place(tensor.device().index()));
  return host_view(tensor).item();
}

void record_stream(Tensor& tensor, Stream stream) { record_use(tensor.storage().data_ptr(), stream); }

// ---- views and sizes
Tensor view(const Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); }

Tensor as_strided(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && needed > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return tensor.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_storage(Tensor& tensor, Storage storage) {
  const int64_t elements = storage.nbytes() / tensor.itemsize();
  return tensor.set_(storage, 0, {elements}, {1});
}

Tensor& set_all(Tensor& tensor, Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  const auto contiguous = c10::contiguous_strides(size);
  impl->set_sizes_and_strides(size, stride.data() ? stride : c10::IntArrayRef(contiguous));
  return tensor;
}

// ---- operators under other names
template <class... Args>
torch::jit::Stack called(const char* name, const char* overload, Args&&... args) {
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  call_as(name, overload, &stack);
  return stack;
}

// ---- indexing: a mask becomes positions, for which the host waits once, as with CUDA
c10::List<std::optional<Tensor>> without_masks(const c10::List<std::optional<Tensor>>& indices) {
  c10::List<std::optional<Tensor>> out;
  for (const std::optional<Tensor>& index : indices) {
    const auto dtype = index && index->defined() ? index->scalar_type() : at::kLong;
    if (dtype != at::kBool && dtype != at::kByte) {
      out.push_back(index);
      continue;
    }
    for (const Tensor& positions : index->nonzero().unbind(1)) out.push_back(positions);
  }
  return out;
}

Tensor index(const Tensor& tensor, const c10::List<std::optional<Tensor>>& indices) {
  return called("aten::index", "Tensor", tensor, without_masks(indices))[0].toTensor();
}

Tensor& index_put(Tensor& tensor, const c10::List<std::optional<Tensor>>& indices, const Tensor& values,
                  bool accumulate, bool unsafe) {
  // One value is written by the mask alone.
  const auto positions = values.numel() == 1 ? indices : without_masks(indices);
  called("aten::_index_put_impl_", "", tensor, positions, values, accumulate, unsafe);
  return tensor;
}

// ---- convolution asks for the device inside: a backend that it does not know gets other names of the same operators
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  return called("aten::convolution", "", input, weight, bias, stride.vec(), padding.vec(), dilation.vec(), transposed,
                 output_padding.vec(), groups)[0]
      .toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const std::optional<std::vector<int64_t>> bias_size = std::vector<int64_t>{outputs};
  auto out = called("aten::convolution_backward", "", grad, input, weight, bias_size, stride.vec(), padding.vec(),
                     dilation.vec(), transposed, output_padding.vec(), groups,
                     c10::List<bool>({mask[0], mask[1], mask[2]}));
  auto result = [&](size_t i) { return out[i].isTensor() ? out[i].toTensor() : Tensor(); };
  return {result(0), result(1), result(2)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_all);
  m.impl("index.Tensor", index);
  m.impl("_index_put_impl_", index_put);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
}  // namespace
}  // namespace sim
