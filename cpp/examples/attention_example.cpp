// Attention without Python: two causal query rows over five keys, forward and backward.
// Zero queries make every visible key count the same, so each output row is the mean of the values
// it sees: keys 0..3 for the first row, 0..4 for the second.
#include <flashattn/attention.h>
#include <flashattn/backend.h>

#include <cstdio>
#include <exception>
#include <vector>

using flashattn::contiguous_view;
using flashattn::DType;
using flashattn::TensorView;

int main() try {
  constexpr int kBatch = 1, kRows = 2, kKeys = 5, kHeads = 1, kDim = 1;
  std::vector<float> q(kRows, 0.0F), k(kKeys, 0.0F), v = {0, 1, 2, 3, 4};
  std::vector<float> out(kRows), lse(kRows), dout(kRows, 1.0F), dq(kRows), dk(kKeys), dv(kKeys);

  const auto rows = [](std::vector<float>& data) {
    return contiguous_view(data.data(), DType::kFloat32, kBatch, kRows, kHeads, kDim);
  };
  const auto keys = [](std::vector<float>& data) {
    return contiguous_view(data.data(), DType::kFloat32, kBatch, kKeys, kHeads, kDim);
  };
  const TensorView lse_view = contiguous_view(lse.data(), DType::kFloat32, kBatch, kHeads, kRows);
  const flashattn::AttentionInputs inputs{.query = rows(q), .key = keys(k), .value = keys(v)};
  const flashattn::AttentionOptions options{.causal = flashattn::Causal::kBottomRight};

  flashattn::forward({.inputs = inputs, .out = rows(out), .lse = lse_view}, options);
  flashattn::backward({.inputs = inputs,
                       .out = rows(out),
                       .lse = lse_view,
                       .dout = rows(dout),
                       .dq = rows(dq),
                       .dk = keys(dk),
                       .dv = keys(dv)},
                      options);

  std::printf("backend: %s\n", flashattn::backends().front()->name().c_str());
  std::printf("out: %.4f %.4f\n", double{out[0]}, double{out[1]});
  std::printf("lse: %.4f %.4f\n", double{lse[0]}, double{lse[1]});
  std::printf("dv: %.4f %.4f\n", double{dv[0]}, double{dv[4]});
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
