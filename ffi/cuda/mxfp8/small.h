// Products of few tokens (decode) on Hopper: bound by reading the weight once. They need no
// workspace, and nothing prepared: scales are read, and ranges judged, while the first columns are
// on their way.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int64_t kMaxSmallTokens = 64;

// Whether the kernels for few tokens can compute a product of this shape.
bool SmallSupports(int64_t num_tokens, int64_t num_outputs, int64_t num_columns);

void LoadSmallKernels();

// Computes `call` on `stream`. The same call gives the same bits each time, and a row of y depends
// on its own row of x alone; rows of x behind M are never read.
void LaunchSmall(const MultiplyCall& call, cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
