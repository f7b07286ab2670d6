// One fp8 product as cuBLASLt is asked for it, whatever the scale format: descriptors, the choice
// of an algorithm, the call. Row-major on the outside.
//
// cuBLASLt is column-major: a row-major y [M, N] is its D [N, M], so that its A is our w
// (transposed, the only form that Hopper has for fp8) and its B our x, and its M and N are our N
// and M.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>

#include "cublaslt_api.h"

namespace jax_pcie::cuda::cublaslt {

// What an algorithm is chosen by. Pointers are left out: all of them are taken to be aligned to
// kAlignment and no better, so that the choice, and with it the order of the sums, depends on
// shapes alone.
struct Product {
  int64_t m, n, k;
  int64_t x_stride, w_stride, y_stride;  // elements from row to row
  DataType y_type;
  ScaleMode x_scale_mode, w_scale_mode;

  friend auto operator<=>(const Product&, const Product&) = default;
};
inline constexpr uint32_t kAlignment = 16;  // bytes, of every pointer and every row of a matrix

struct ProductPointers {
  const void* x;
  const void* x_scales;
  const void* w;
  const void* w_scales;
  void* y;
  void* scratch;  // [kScratchBytes]
};
inline constexpr int64_t kScratchBytes = int64_t{32} << 20;  // what NVIDIA recommends for Hopper

template <class T, class Result = Status>
using Owned = std::unique_ptr<T, Result (*)(T*)>;

struct Descriptors {
  Descriptors(const Product& product, const ProductPointers& at);

  Owned<MatmulDesc> operation;
  Owned<MatrixLayout> w, x, y;
};

// Makes the current device's handle, unless there is one, chooses the problem's algorithm and loads
// its kernel. Runs nothing: pointers need only be aligned as those of the calls to come.
void Prepare(const Product& product, const ProductPointers& at);

// Enqueues y = x w^T. Thread-safe and capturable; a problem's first call asks the heuristics.
void Multiply(const Product& product, const ProductPointers& at, cudaStream_t stream);

}  // namespace jax_pcie::cuda::cublaslt
