// What a product of MXFP8 operands is: pointers and shapes, for every kernel that can compute it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kGroup = 32;  // columns that share a scale byte
inline constexpr int kTile = 128;  // columns of a scale word: four groups

// Of what is not MXFP8: raw inputs and outputs.
enum class ElementType : int32_t { kBf16 = 0, kF16 = 1, kF32 = 2 };

// Row-major E4M3 values [rows, stride] and E8M0 scale bytes [rows, stride / 32]. Only the first
// columns of a row may belong to the product: `MultiplyCall::num_columns` of them.
struct Operand {
  const uint8_t* values;
  const uint8_t* scales;
  int64_t rows;
  int64_t stride;  // a multiple of 32
};

// y[m, n] = round(sum_k decode(x)[m, k] * decode(w)[n, k] + bias[n]), sums in fp32.
struct MultiplyCall {
  Operand x;            // rows: M tokens
  Operand w;            // rows: N outputs
  int64_t num_columns;  // K, a multiple of 32
  const float* bias;    // [N] or null
  void* y;              // [M, N], dense
  ElementType output;
};

}  // namespace jax_pcie::cuda::mxfp8
