// What make_problem reads out of query, key and value and of the integers that say where entries
// lie: sizes, packed sequences, pages, lengths. Relies on checks.h for the sentences; options and
// other arrays are problem.cpp's.
#pragma once

#include "core/checks.h"
#include "flashattn/problem.h"

namespace flashattn {

bool is_floating(DType dtype);

// Kinds and sizes of query, key and value, and through them the sizes of the problem.
void read_shapes(const Checks& check, const AttentionInputs& in, AttentionProblem& problem);

// kv_lengths, kv_starts, kv_batch_index and block_table, against the sizes that read_shapes found.
void read_places(const Checks& check, const AttentionInputs& in, AttentionProblem& problem);

// An int32 or int64 array of one value per batch entry, which the host reads: positions and lengths
// decide what the kernels touch, so no value may reach a device unseen.
void check_per_batch(const Checks& check, const NamedView& arg, const AttentionProblem& problem,
                     std::int64_t low, std::int64_t high);

}  // namespace flashattn
