// Scales as the Hopper kernel wants them: one word per row and 128 columns, ordered by columns
// first, relative to a reference per row, with a mark on the rows for which f16 is not enough.
//
// f16 holds an E4M3 value times 2^s exactly for s from -14 to 7. So a row whose scales lie within
// 21 octaves of its largest, the reference, becomes f16 without loss ("near"). Others are "wide":
// they go through bf16, from scale bytes as they are. What bf16 cannot hold is "far".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kBlockRows = 32;  // rows that share a form, and a CTA of the preparation

enum class RowClass : uint8_t { kNear = 0, kWide = 1, kFar = 2 };

// Where a near row's f16 multipliers begin: scale byte `reference` is the multiplier 2^7, whose
// exponent field is 22; 1 is the smallest.
inline constexpr int kReferenceField = 22;
// References outside are wide, so that the factors of the result stay in fp32's normal range.
inline constexpr int kMinReference = 64, kMaxReference = 190;
// Scale bytes outside make E4M3 values that are not normal bf16 numbers: 2^-9 to 448 times
// 2^(e-127).
inline constexpr int kMinWide = 10, kMaxWide = 246;
inline constexpr int kNanScale = 255;

// One operand, in device memory. `rows` is padded to a multiple of the GEMM's tile.
struct PreparedScales {
  uint32_t* words;       // [columns / 128, rows]: byte g is group g's exponent field, or scale byte
  uint16_t* references;  // [rows]: the reference scale byte; kFarRow is set if the row is far
  RowClass* classes;     // [rows / 32]: the largest of the rows; scale bytes if not near
  int64_t rows;

  static constexpr uint16_t kFarRow = 0x100;

  static int64_t WorkspaceBytes(int64_t rows, int64_t num_columns);
  static PreparedScales At(void* workspace, int64_t rows, int64_t num_columns);
};

// Also sets `num_flags` flags to 0.
void LaunchPrepareScales(const Operand& x, const PreparedScales& prepared_x, const Operand& w,
                         const PreparedScales& prepared_w, int64_t num_columns, uint32_t* flags,
                         int num_flags, cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
