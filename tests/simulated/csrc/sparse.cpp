// Sparse tensors (gradients of embeddings): indices and values lie on the device. Operators are the CPU's, for which
// the host waits, but for those that only put together or copy.
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>

#include "world.h"

namespace sim {
// A sparse tensor of the device as one of the CPU, whose values are the same memory. The device has nothing to do.
Tensor sparse_on_host(const Tensor& tensor) {
  auto* impl = at::sparse::get_sparse_impl(tensor);
  Tensor host = at::_sparse_coo_tensor_unsafe(host_view(impl->indices()), host_view(impl->values()), tensor.sizes());
  return host._coalesced_(impl->coalesced());
}

void store_sparse(const Tensor& host, const Tensor& target, DeviceIndex device) {
  auto *from = at::sparse::get_sparse_impl(host), *to = at::sparse::get_sparse_impl(target);
  Tensor indices = onto_device(from->indices(), device), values = onto_device(from->values(), device);
  to->raw_resize_(from->sparse_dim(), from->dense_dim(), host.sizes());
  to->set_indices_and_values_unsafe(indices, values);
  to->set_coalesced(from->coalesced());
}

Tensor sparse_onto_device(const Tensor& host, DeviceIndex device) {
  c10::DeviceGuard guard(Device(kSim, device));
  Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), host.dtype());
  store_sparse(host, made, device);
  return made;
}

namespace {
Tensor from_parts(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef size, const Tensor& indices,
                  const Tensor& values, bool coalesced) {
  c10::DeviceGuard guard(values.device());
  Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), values.dtype());
  auto* impl = at::sparse::get_sparse_impl(made);
  impl->raw_resize_(sparse_dim, dense_dim, size);
  // Views, as for CUDA: the caller's tensors keep their own history of gradients.
  impl->set_indices_and_values_unsafe(indices.alias(), values.alias());
  impl->set_coalesced(coalesced);
  return made;
}

Tensor new_sparse(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef size, const Tensor& indices,
                  const Tensor& values, std::optional<c10::ScalarType>, std::optional<c10::Layout>,
                  std::optional<Device>, std::optional<bool>, std::optional<bool> coalesced) {
  return from_parts(sparse_dim, dense_dim, size, indices, values, coalesced.value_or(false));
}

Tensor clone_sparse(const Tensor& tensor, std::optional<c10::MemoryFormat>) {
  auto* impl = at::sparse::get_sparse_impl(tensor);
  return from_parts(impl->sparse_dim(), impl->dense_dim(), tensor.sizes(), impl->indices().clone(),
                    impl->values().clone(), impl->coalesced());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_now>()); }
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", new_sparse);
  m.impl("clone", clone_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
}
}  // namespace

// Sparse CPU tensors have kernels of their own for these operators: the general ones, which would be taken otherwise,
// are for dense tensors.
void register_sparse() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::SparsePrivateUse1)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_now>());
  }
}
}  // namespace sim
