// Attention over a key-value cache: appends new keys and values behind what each entry already
// holds, in place, and attends to all of it in the same call.
#pragma once

#include "flashattn/attention.h"

namespace flashattn {

// Rotary position embedding (Su et al., "RoFormer", 2021) of the first 2 * cos.shape[1] dimensions:
// pair p at position n is turned by the angle whose cosine and sine are cos[n][p] and sin[n][p].
struct Rotary {
  TensorView cos{};          // floating (positions, pairs); rank 0: no rotation
  TensorView sin{};          // like cos
  bool interleaved = false;  // pair p is dimensions (2p, 2p + 1), else (p, p + pairs)
};

// call.inputs: key and value are the caches, (cache_batch, rows, kv_heads, dim) or pages, and are
// written where there is something to append. kv_lengths, required, are the rows in use before this
// call; kv_starts is the left padding and kv_batch_index the place of an entry in the cache.
struct KvCacheTensors {
  ForwardTensors call{};
  TensorView new_key{};    // (batch, seqlen_new, kv_heads, head_dim), or rank 0: nothing to append
  TensorView new_value{};  // (batch, seqlen_new, kv_heads, value_dim)
  Rotary rotary{};         // of query and new_key; takes something to append
};

// Key row t of entry b is appended at row kv_lengths[b] + t and turned by its position there,
// counted from kv_starts[b]. Query row i is turned by the position of new key i under causal or a
// window, else by that of the first new key. Everything is checked before the first row is written.
// Throws as forward does; Unsupported also for caches outside of host memory that would be written.
void attention_kvcache(const KvCacheTensors& tensors, const AttentionOptions& options = {});

}  // namespace flashattn
