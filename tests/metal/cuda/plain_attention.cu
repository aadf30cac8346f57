// Plain attention on the GPU; see plain_attention.h.
#include <cstdio>
#include <cstdlib>

#include "device_array.cuh"
#include "plain_attention.h"
#include "plain_kernels.cuh"

namespace {

using namespace plain;

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
  return {values.begin(), values.end()};
}

template <class Rule, int dim>
PlainResult run(const Call& call, Storage storage, const Reference& inputs,
                const PlainResult* stored) {
  using Real = typename Rule::Real;
  const Problem& p = call.problem;
  const DeviceArray<float> query(inputs.query), key(inputs.key), value(inputs.value),
      dout(inputs.dout);
  const std::size_t rows = static_cast<std::size_t>(p.query_heads) * p.seqlen_q;
  DeviceArray<Real> out(rows * dim), dq(rows * dim), dk(inputs.key.size()), dv(inputs.key.size());
  DeviceArray<Real> shift(rows), total(rows), delta(rows), lse(rows);
  if (stored != nullptr) {
    std::vector<Real> as_stored = converted<Real>(stored->out);
    for (Real& x : as_stored) x = round_to(static_cast<float>(x), storage);
    out.write(as_stored);
    lse.write(converted<Real>(stored->lse));
  }
  const Arrays<Real> at{query.pointer(), key.pointer(),   value.pointer(), dout.pointer(),
                        out.pointer(),   dq.pointer(),    dk.pointer(),    dv.pointer(),
                        shift.pointer(), total.pointer(), delta.pointer(), lse.pointer()};
  const auto blocks = [](int length) {
    return static_cast<unsigned>((length + kOwnRows - 1) / kOwnRows);
  };
  own_rows<Rule, dim><<<dim3(blocks(p.seqlen_q), p.query_heads), kThreads>>>(call, at);
  CHECK_CUDA(cudaGetLastError());
  own_keys<Rule, dim><<<dim3(blocks(p.seqlen_k), p.kv_heads), kThreads>>>(call, at);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());
  return {converted<double>(out.read()), converted<double>(lse.read()),
          converted<double>(dq.read()), converted<double>(dk.read()), converted<double>(dv.read())};
}

template <int dim>
PlainResult run_naive(const Call& call, Storage storage, const Reference& inputs,
                      const PlainResult* stored) {
  switch (storage) {
    case Storage::kFloat16:
      return run<Naive<Storage::kFloat16>, dim>(call, storage, inputs, stored);
    case Storage::kBFloat16:
      return run<Naive<Storage::kBFloat16>, dim>(call, storage, inputs, stored);
    default:
      return run<Naive<Storage::kFloat32>, dim>(call, storage, inputs, stored);
  }
}

template <int dim>
PlainResult run_arithmetic(const Call& call, Storage storage, const Reference& inputs,
                           Arithmetic arithmetic, const PlainResult* stored) {
  if (arithmetic == Arithmetic::kExact) return run<Exact, dim>(call, storage, inputs, nullptr);
  return run_naive<dim>(call, storage, inputs, stored);
}

}  // namespace

PlainResult plain_attention(const Problem& p, Storage storage, const Reference& inputs,
                            Arithmetic arithmetic, const PlainResult* stored) {
  const bool from_stored = arithmetic == Arithmetic::kNaiveFromStored;
  const Call call{p, dropout_threshold(p), from_stored};
  if (p.batch != 1 || p.head_dim != p.value_dim || (p.head_dim != 64 && p.head_dim != 128)) {
    std::fprintf(stderr, "no plain attention for %s\n", p.name().c_str());
    std::exit(2);
  }
  const PlainResult* start = from_stored ? stored : nullptr;
  return p.head_dim == 64 ? run_arithmetic<64>(call, storage, inputs, arithmetic, start)
                          : run_arithmetic<128>(call, storage, inputs, arithmetic, start);
}
