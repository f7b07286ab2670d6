// Products of few tokens (decode): bound by reading the weight once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int64_t kMaxSmallTokens = 64;

// Whether the kernels for few tokens can compute `call`, on compute capability 9.0 or newer.
bool SmallSupports(const MultiplyCall& call);

// Bytes that `LaunchSmall` wants at `workspace`.
int64_t SmallWorkspaceBytes(int64_t m, int64_t n, int64_t k);

// Computes `call` on `stream`. The same call gives the same bits each time, and a row of y depends
// on its own row of x alone; rows of x behind M are never read.
void LaunchSmall(const MultiplyCall& call, void* workspace, cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
