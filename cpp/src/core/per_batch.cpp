// Copies of small arrays; see per_batch.h.
#include "core/per_batch.h"

#include <utility>

#include "core/make_visibility.h"

namespace flashattn {

namespace {

bool is_readable(const TensorView& view) {
  const std::size_t item = item_size(view.dtype);
  return (view.rank == 1 || view.rank == 2) && view.device == DeviceKind::kCpu &&
         (view.dtype == DType::kInt32 || view.dtype == DType::kInt64) && view.data != nullptr &&
         view.shape[0] >= 0 && (view.rank == 1 || view.shape[1] >= 0) &&
         reinterpret_cast<std::uintptr_t>(view.data) % item == 0;
}

void take_values(TensorView& view, std::vector<std::int64_t>& values) {
  if (!is_readable(view)) return;
  const std::int64_t columns = view.rank == 2 ? view.shape[1] : 1;
  values.reserve(static_cast<std::size_t>(view.shape[0] * columns));
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) values.push_back(read_integer(view, i, j));
  }
  view = view.rank == 2 ? contiguous_view(values.data(), DType::kInt64, view.shape[0], columns)
                        : contiguous_view(values.data(), DType::kInt64, view.shape[0]);
}

}  // namespace

// Lists that this thread is done with: a call like an earlier one allocates nothing. Two, because a
// binding reads the arrays before the library does.
struct PerBatchValues::Spare {
  static constexpr std::size_t kMostKept = std::size_t{1} << 16;  // numbers of one array

  std::array<Values, 2> lists;
  std::size_t count = 0;
};

PerBatchValues::Spare& PerBatchValues::spare() {
  thread_local Spare of_this_thread;
  return of_this_thread;
}

PerBatchValues::~PerBatchValues() {
  Spare& kept = spare();
  if (kept.count == kept.lists.size()) return;
  for (std::vector<std::int64_t>& list : values_) {
    if (list.capacity() > Spare::kMostKept) return;
    list.clear();
  }
  kept.lists[kept.count++] = std::move(values_);
}

PerBatchValues::PerBatchValues(AttentionInputs& inputs) {
  Spare& kept = spare();
  if (kept.count != 0) values_ = std::move(kept.lists[--kept.count]);
  auto values = values_.begin();
  for (TensorView* view :
       {&inputs.q_offsets, &inputs.kv_lengths, &inputs.cu_seqlens_q, &inputs.cu_seqlens_k,
        &inputs.block_table, &inputs.kv_starts, &inputs.kv_batch_index}) {
    take_values(*view, *values++);
  }
}

}  // namespace flashattn
