// Flash attention: the CPU's kernels under the names, and with the results, of a GPU's.
#include "world.h"

namespace sim {
namespace {
using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attended flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, bool,
                         std::optional<double> scale) {
  TORCH_CHECK(dropout == 0, "the flash attention of sim has no dropout");
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  Tensor output = like(query, {batch, length, heads, value.size(3)}).transpose(1, 2);
  Tensor log_sums = like(query, {batch, heads, length}, at::kFloat), nothing = like(query, {0}, at::kLong);
  auto compute = [q = host_view(query), k = host_view(key), v = host_view(value), causal,
                  scale]() -> std::vector<Tensor> {
    auto [mixed, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, {}, scale);
    return {mixed, sums};
  };
  launch_into(index_of(query), {output, log_sums}, compute);
  return {output, log_sums, nothing, nothing, length, key.size(2), nothing, nothing, nothing};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& log_sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  Tensor grad_query = at::empty_like(query), grad_key = at::empty_like(key), grad_value = at::empty_like(value);
  auto compute = [g = host_view(grad), q = host_view(query), k = host_view(key), v = host_view(value),
                  o = host_view(output), sums = host_view(log_sums), causal, scale]() -> std::vector<Tensor> {
    auto [to_q, to_k, to_v] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, o, sums, 0.0, causal, {}, scale);
    return {to_q, to_k, to_v};
  };
  launch_into(index_of(query), {grad_query, grad_key, grad_value}, compute);
  return {grad_query, grad_key, grad_value};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
}
}  // namespace
}  // namespace sim
