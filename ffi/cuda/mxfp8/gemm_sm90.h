// The exact product on Hopper, which has no block-scaled tensor-core instruction: tiles are decoded
// to 16-bit values inside the kernel, and both operands stay MXFP8 in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

// Any shape; operands must begin at multiples of 16 bytes and have such strides, which every stride
// that is a multiple of 32 is.
int64_t GemmSm90WorkspaceBytes(int64_t rows, int64_t num_outputs, int64_t num_columns);
void LoadGemmSm90Kernels();
void LaunchGemmSm90(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                    cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
