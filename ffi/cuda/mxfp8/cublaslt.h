// MXFP8 products by cuBLASLt, for the two problems that it has:
//
//   BlockScaled   Hopper, operands scaled in groups of 128: x one scale per row and 128 columns, w
//                 one per tile of 128 rows x 128 columns. Only the first scale byte of a group (of
//                 a tile: of its first row) is read; the others must repeat it.
//   Mxfp8Native   Blackwell, any scale per row and 32 columns.
//
// Which shapes these serve follows from the shape alone, so that a program chooses its kernel when
// it is lowered. All functions mean the current device and may be called from any thread; `Launch*`
// may be captured, and after the `Prepare*` of its call neither allocates nor waits.
//
// Numbers: fp32 sums without fast accumulation, bias added in fp32, one rounding. BlockScaled
// multiplies each partial sum of 128 columns by (x scale * w scale) in fp32, where a scale of byte
// 0 (2^-127) or a product of scales outside [2^-126, 2^127] may become 0 or infinite.
#pragma once

#include <string>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

// False with the reason in `why_not` where the library or the device is not the right one.
bool BlockScaledAvailable(std::string* why_not);
bool Mxfp8NativeAvailable(std::string* why_not);

bool BlockScaledSupports(int64_t m, int64_t n, int64_t k);
bool Mxfp8NativeSupports(int64_t m, int64_t n, int64_t k);

// Of the `workspace` below; needs no GPU.
int64_t BlockScaledWorkspaceBytes(int64_t m, int64_t n, int64_t k, ElementType output,
                                  bool has_bias);
int64_t Mxfp8NativeWorkspaceBytes(int64_t m, int64_t n, int64_t k, ElementType output,
                                  bool has_bias);

// Those around the library's product.
void LoadCublasLtKernels();

// Makes the library's handle, chooses its algorithm and loads its kernel, as the call's first
// launch would. Reads and writes none of the arrays. Once per device and shape.
void PrepareBlockScaled(const MultiplyCall& call, void* workspace, int64_t workspace_bytes);
void PrepareMxfp8Native(const MultiplyCall& call, void* workspace, int64_t workspace_bytes);

// `workspace` is aligned to 256 bytes, values and y to 16.
void LaunchBlockScaled(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                       cudaStream_t stream);
void LaunchMxfp8Native(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                       cudaStream_t stream);

// The scales of the first `num_columns` columns as Blackwell's tensor cores read them: `swizzled`
// is [SwizzledScales::NumBytes(rows, num_columns / 32)], its padding bytes 127. Runs on any GPU.
void LaunchSwizzleScales(const Operand& operand, int64_t num_columns, uint8_t* swizzled,
                         cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
