// Quantises a matrix to MXFP8, in one pass, into a part of a wider operand.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

struct QuantizeCall {
  const void* x;  // [rows, columns], dense, aligned to 16 bytes
  ElementType input;
  int64_t rows, columns;  // columns: a multiple of 32
  int scale_group;        // 32 or 128
  uint8_t* values;        // [rows or more, stride]
  uint8_t* scales;        // [rows or more, stride / 32]
  int64_t stride;         // a multiple of 32
  int64_t first_column;   // a multiple of 32, where x goes; or -1, and it is in device memory:
  const int32_t* device_column;  // the column, or ~column to make the scales NaN; null if not used
};

void LoadQuantizeKernels();

void LaunchQuantize(const QuantizeCall& call, cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
