// Operators that torch has for GPUs alone, put together from the CPU's: recurrent cells, synchronised batch
// normalisation, dropout.
#include "world.h"

namespace sim {
namespace {
DeviceIndex index_of(const Tensor& tensor) { return tensor.device().index(); }

Tensor like(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype = {}) {
  c10::DeviceGuard guard(tensor.device());
  return at::empty(sizes, tensor.options().dtype(dtype.value_or(tensor.scalar_type())));
}

Tensor host(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? host_view(*tensor) : Tensor();
}

// Launches a kernel whose results, in the host's memory, go to these tensors.
template <class F>
void launch_into(DeviceIndex device, std::vector<Tensor> outputs, F compute) {
  std::vector<Tensor> into;
  for (const Tensor& output : outputs) into.push_back(output.defined() ? host_view(output) : Tensor());
  launch(current_place(device), [into, compute]() mutable {
    KernelsOnly kernels;
    std::vector<Tensor> made = compute();
    for (size_t i = 0; i < into.size(); i++) {
      if (into[i].defined() && made[i].defined()) into[i].copy_(made[i]);
    }
  });
}

// ---- dropout
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const bool drops = !train.has_value() || *train;
  Tensor output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  const uint64_t seed = next_seed({}, index_of(input));
  launch_into(index_of(input), {output, mask}, [input = host_view(input), p, drops, seed]() -> std::vector<Tensor> {
    if (!drops) return {input, at::ones_like(input, input.options().dtype(at::kBool))};
    at::Generator generator = at::detail::createCPUGenerator(seed);
    Tensor kept = at::empty_like(input, input.options().dtype(at::kFloat)).bernoulli_(1 - p, generator);
    const double scale = p == 1 ? 0 : 1 / (1 - p);
    return {input * kept.to(input.scalar_type()) * scale, kept.to(at::kBool)};
  });
  return {output, mask};
}

// ---- chunks of several tensors put together (FSDP2): a GPU's kernel also changes the dtype
Tensor& chunk_cat(at::TensorList tensors, int64_t dim, int64_t chunks, Tensor& output) {
  std::vector<Tensor> from;
  for (const Tensor& tensor : tensors) from.push_back(host_view(tensor));
  launch_into(index_of(output), {output}, [from, dim, chunks]() -> std::vector<Tensor> {
    return {at::_chunk_cat(from, dim, chunks)};
  });
  return output;
}

// ---- layer normalisation: the CPU's backward pass takes statistics in the input's type, where all are of that type
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias, std::array<bool, 3> wanted) {
  Tensor grad_input = wanted[0] ? at::empty_like(input) : Tensor();
  Tensor grad_weight = wanted[1] && weight ? at::empty_like(*weight) : Tensor();
  Tensor grad_bias = wanted[2] && bias ? at::empty_like(*bias) : Tensor();
  auto compute = [g = host_view(grad), x = host_view(input), m = host_view(mean), r = host_view(rstd),
                  w = host(weight), b = host(bias), shape = shape.vec(), wanted]() -> std::vector<Tensor> {
    const bool mixed = w.defined() && w.scalar_type() != x.scalar_type();
    const auto type = mixed ? at::kFloat : x.scalar_type();
    auto [of_x, of_w, of_b] = at::native_layer_norm_backward(g, x, shape, m.to(type), r.to(type), w, b, wanted);
    return {of_x, of_w, of_b};
  };
  launch_into(index_of(input), {grad_input, grad_weight, grad_bias}, compute);
  return {grad_input, grad_weight, grad_bias};
}

// ---- LSTM: gates are in the order input, forget, cell, output
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  Tensor hy = like(cx, cx.sizes()), cy = like(cx, cx.sizes()), workspace = like(cx, input_gates.sizes());
  auto compute = [i = host_view(input_gates), h = host_view(hidden_gates), c = host_view(cx), ib = host(input_bias),
                  hb = host(hidden_bias)]() -> std::vector<Tensor> {
    Tensor gates = i + h;
    if (ib.defined()) gates = gates + ib + hb;
    auto part = gates.chunk(4, 1);
    Tensor in = part[0].sigmoid(), forget = part[1].sigmoid(), cell = part[2].tanh(), out = part[3].sigmoid();
    Tensor next = forget * c + in * cell;
    return {out * next.tanh(), next, at::cat({in, forget, cell, out}, 1)};
  };
  launch_into(index_of(cx), {hy, cy, workspace}, compute);
  return {hy, cy, workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                                      const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const bool any = (grad_hy && grad_hy->defined()) || (grad_cy && grad_cy->defined());
  if (!any) return {Tensor(), Tensor(), Tensor()};
  Tensor grad_gates = like(workspace, workspace.sizes()), grad_cx = like(cx, cx.sizes());
  Tensor grad_bias = has_bias ? like(workspace, {workspace.size(1)}) : Tensor();
  auto compute = [gh = host(grad_hy), gc = host(grad_cy), c = host_view(cx), next = host_view(cy),
                  w = host_view(workspace)]() -> std::vector<Tensor> {
    auto part = w.chunk(4, 1);
    Tensor in = part[0], forget = part[1], cell = part[2], out = part[3], squashed = next.tanh();
    Tensor into_cell = gc.defined() ? gc : at::zeros_like(c);
    if (gh.defined()) into_cell = into_cell + gh * out * (1 - squashed * squashed);
    Tensor grad_out = gh.defined() ? gh * squashed * out * (1 - out) : at::zeros_like(c);
    Tensor gates = at::cat({into_cell * cell * in * (1 - in), into_cell * c * forget * (1 - forget),
                            into_cell * in * (1 - cell * cell), grad_out}, 1);
    return {gates, into_cell * forget, gates.sum(0)};
  };
  launch_into(index_of(cx), {grad_gates, grad_cx, grad_bias}, compute);
  return {grad_gates, grad_cx, grad_bias};
}

// ---- GRU: gates are in the order reset, input, new
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  Tensor hy = like(hx, hx.sizes()), workspace = like(hx, {hx.size(0), hx.size(1) * 5});
  auto compute = [i = host_view(input_gates), h = host_view(hidden_gates), x = host_view(hx), ib = host(input_bias),
                  hb = host(hidden_bias)]() -> std::vector<Tensor> {
    auto from_input = (ib.defined() ? i + ib : i).chunk(3, 1), from_hidden = (hb.defined() ? h + hb : h).chunk(3, 1);
    Tensor reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
    Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
    return {fresh + update * (x - fresh), at::cat({reset, update, fresh, x, from_hidden[2]}, 1)};
  };
  launch_into(index_of(hx), {hy, workspace}, compute);
  return {hy, workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const int64_t batch = workspace.size(0), hidden = workspace.size(1) / 5;
  Tensor grad_input = like(workspace, {batch, 3 * hidden}), grad_hidden = like(workspace, {batch, 3 * hidden});
  Tensor grad_hx = like(grad_hy, grad_hy.sizes());
  Tensor input_bias = has_bias ? like(workspace, {3 * hidden}) : Tensor();
  Tensor hidden_bias = has_bias ? like(workspace, {3 * hidden}) : Tensor();
  auto compute = [g = host_view(grad_hy), w = host_view(workspace)]() -> std::vector<Tensor> {
    auto part = w.chunk(5, 1);
    Tensor reset = part[0], update = part[1], fresh = part[2], x = part[3], from_hidden = part[4];
    Tensor grad_fresh = g * (1 - update) * (1 - fresh * fresh);
    Tensor grad_update = g * (x - fresh) * update * (1 - update);
    Tensor grad_reset = grad_fresh * from_hidden * reset * (1 - reset);
    Tensor into_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
    Tensor into_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
    return {into_input, into_hidden, g * update, into_input.sum(0), into_hidden.sum(0)};
  };
  launch_into(index_of(grad_hy), {grad_input, grad_hidden, grad_hx, input_bias, hidden_bias}, compute);
  return {grad_input, grad_hidden, grad_hx, input_bias, hidden_bias};
}

// ---- synchronised batch normalisation: statistics are of dimension 1, over all others
at::ScalarType statistics_of(const Tensor& input) {
  return input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16 ? at::kFloat : input.scalar_type();
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); dim++) {
    if (dim != 1) dims.push_back(dim);
  }
  return dims;
}

Tensor by_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return values.view(shape);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  Tensor mean = like(input, {input.size(1)}, statistics_of(input)), invstd = at::empty_like(mean);
  auto compute = [x = host_view(input), dtype = mean.scalar_type(), eps]() -> std::vector<Tensor> {
    auto dims = all_but_channels(x);
    Tensor wide = x.to(dtype), centre = wide.mean(dims);
    return {centre, ((wide - by_channel(centre, x)).square().mean(dims) + eps).rsqrt()};
  };
  launch_into(index_of(input), {mean, invstd}, compute);
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& means, const Tensor& invstds, const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var, double momentum, double eps, const Tensor& counts) {
  Tensor mean = like(means, {means.size(1)}), invstd = like(means, {means.size(1)});
  auto compute = [m = host_view(means), s = host_view(invstds), rm = host(running_mean), rv = host(running_var),
                  n = host_view(counts), momentum, eps]() mutable -> std::vector<Tensor> {
    Tensor weights = n.to(m.scalar_type()).view({-1, 1}), total = weights.sum();
    Tensor centre = (m * weights).sum(0) / total;
    Tensor within = (s.square().reciprocal() - eps) * weights, between = (m - centre).square() * weights;
    Tensor variance = (within + between).sum(0) / total;
    if (rm.defined()) rm.mul_(1 - momentum).add_(centre.to(rm.scalar_type()), momentum);
    if (rv.defined()) rv.mul_(1 - momentum).add_((variance * total / (total - 1)).to(rv.scalar_type()), momentum);
    return {centre, (variance + eps).rsqrt()};
  };
  launch_into(index_of(input), {mean, invstd}, compute);
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats(const Tensor& input, const Tensor& means, const Tensor& invstds,
                                                   const std::optional<Tensor>& running_mean,
                                                   const std::optional<Tensor>& running_var, double momentum,
                                                   double eps, int64_t count) {
  Tensor counts = at::full({means.size(0)}, count, means.options());
  return at::batch_norm_gather_stats_with_counts(input, means, invstds, running_mean, running_var, momentum, eps,
                                                 counts);
}

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, double) {
  Tensor output = at::empty_like(input);
  auto compute = [x = host_view(input), w = host(weight), b = host(bias), m = host_view(mean),
                  s = host_view(invstd)]() -> std::vector<Tensor> {
    Tensor out = (x.to(m.scalar_type()) - by_channel(m, x)) * by_channel(s, x);
    if (w.defined()) out = out * by_channel(w, x);
    if (b.defined()) out = out + by_channel(b, x);
    return {out};
  };
  launch_into(index_of(input), {output}, compute);
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad, const Tensor& input,
                                                                      const Tensor& mean, const Tensor& invstd,
                                                                      const std::optional<Tensor>& weight,
                                                                      bool input_g, bool weight_g, bool bias_g) {
  const bool affine = weight && weight->defined();
  Tensor sum_dy = input_g ? at::empty_like(mean) : Tensor(), sum_dy_xmu = input_g ? at::empty_like(mean) : Tensor();
  Tensor grad_weight = affine && weight_g ? at::empty_like(*weight) : Tensor();
  Tensor grad_bias = affine && bias_g ? at::empty_like(*weight) : Tensor();
  auto compute = [g = host_view(grad), x = host_view(input), m = host_view(mean),
                  s = host_view(invstd)]() -> std::vector<Tensor> {
    auto dims = all_but_channels(x);
    Tensor wide = g.to(m.scalar_type()), dy = wide.sum(dims);
    Tensor dy_xmu = (wide * (x.to(m.scalar_type()) - by_channel(m, x))).sum(dims);
    return {dy, dy_xmu, dy_xmu * s, dy};
  };
  launch_into(index_of(input), {sum_dy, sum_dy_xmu, grad_weight, grad_bias}, compute);
  return {sum_dy, sum_dy_xmu, grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                 const std::optional<Tensor>& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                                 const Tensor& count) {
  Tensor output = at::empty_like(input);
  auto compute = [g = host_view(grad), x = host_view(input), m = host_view(mean), s = host_view(invstd),
                  w = host(weight), dy = host_view(sum_dy), dy_xmu = host_view(sum_dy_xmu),
                  n = host_view(count)]() -> std::vector<Tensor> {
    Tensor total = n.sum().to(m.scalar_type());
    Tensor centred = x.to(m.scalar_type()) - by_channel(m, x);
    Tensor scale = w.defined() ? s * w : s;
    Tensor out = g.to(m.scalar_type()) - by_channel(dy / total, x) -
                 centred * by_channel(s.square() * dy_xmu / total, x);
    return {out * by_channel(scale, x)};
  };
  launch_into(index_of(input), {output}, compute);
  return output;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("_chunk_cat.out", chunk_cat);
  m.impl("native_layer_norm_backward", layer_norm_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("batch_norm_stats", batch_norm_stats);
  m.impl("batch_norm_gather_stats", batch_norm_gather_stats);
  m.impl("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_elemt", batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", batch_norm_backward_elemt);
}
}  // namespace
}  // namespace sim
