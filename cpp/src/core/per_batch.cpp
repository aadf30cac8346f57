// Copies of small arrays; see per_batch.h.
#include "core/per_batch.h"

#include "core/make_visibility.h"

namespace flashattn {

namespace {

bool is_readable(const TensorView& view, std::int64_t batch) {
  const std::size_t item = item_size(view.dtype);
  return view.rank == 1 && view.shape[0] == batch && view.device == DeviceKind::kCpu &&
         (view.dtype == DType::kInt32 || view.dtype == DType::kInt64) && view.data != nullptr &&
         reinterpret_cast<std::uintptr_t>(view.data) % item == 0;
}

void take_values(TensorView& view, std::int64_t batch, std::vector<std::int64_t>& values) {
  if (!is_readable(view, batch)) return;
  values.reserve(static_cast<std::size_t>(batch));
  for (std::int64_t b = 0; b < batch; ++b) values.push_back(read_integer(view, b));
  view = contiguous_view(values.data(), DType::kInt64, batch);
}

}  // namespace

PerBatchValues::PerBatchValues(AttentionInputs& inputs) {
  if (inputs.query.rank != 4) return;
  take_values(inputs.q_offsets, inputs.query.shape[0], q_offsets_);
  take_values(inputs.kv_lengths, inputs.query.shape[0], kv_lengths_);
}

}  // namespace flashattn
