// What a gather of rows and a selection of experts are: pointers, shapes and the rule.
#pragma once

#include <cstdint>

#include "topk.h"

namespace jax_pcie {

constexpr int kMaxArrays = 2;  // that one gather moves

// An array whose rows all ranks put side by side: [rows, row] -> [rows, world size, row].
struct GatherCall {
  const void* x;
  void* y;
  int64_t num_rows, row_bytes;
};

// Experts chosen from rows of logits: one rank's part of each row, or whole rows.
struct RouteCall {
  const void* logits;
  const float* bias;  // [experts] or null
  float* weights;     // [rows, k]
  int32_t* ids;       // [rows, k]
  int64_t num_rows;
  RouteRule rule;
};

}  // namespace jax_pcie
