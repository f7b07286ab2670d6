// Scales as the Hopper kernels want them: one word per row and 128 columns, ordered by columns
// first, relative to a reference per row, with a mark on the rows for which f16 is not enough.
//
// f16 holds an E4M3 value times 2^s exactly for s from -14 to 7. So a row whose scales lie within
// 21 octaves of its largest, the reference, becomes f16 without loss ("near"). Others are "wide":
// they go through bf16. What is too far apart for fp32 to hold the products is "far".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../codec.h"
#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kBlockRows = 32;  // rows that share a form, and a CTA of the preparation

enum class RowClass : uint8_t { kNear = 0, kWide = 1, kFar = 2 };

// Where multipliers begin: that of scale byte `reference` is 2^7. The exponent fields of it as f16,
// where 1 is the smallest, and as bf16.
inline constexpr int kReferenceField = 22, kReferenceExponent = 134;
inline constexpr int kFieldToExponent = kReferenceExponent - kReferenceField;
// References outside make a row far, so that the factors of the result are exact in fp32.
inline constexpr int kMinReference = 64, kMaxReference = 190;
// Groups of a wide row lie within this many octaves of its largest: then all products and sums are
// normal numbers of fp32.
inline constexpr int kWideOctaves = 60;
inline constexpr int kNanScale = 255;

// Words of a row: four groups each, an even number, because the kernel works on pairs of stages.
// Values behind the last column are zero.
HD constexpr int64_t NumScaleWords(int64_t num_columns) {
  return RoundUp(CeilDiv(num_columns, kTile), 2);
}

// Exponent fields of four groups, from their scale bytes, where the row's reference has field `top`
// and all groups lie at most `top` - 1 below it.
__device__ __forceinline__ uint32_t PlainFields(uint32_t bytes, int reference, int top) {
  return bytes + (top - reference) * 0x01010101u;  // no byte leaves its range
}

// The same of any groups: 255 stays, and of others none is more than `reach` below the reference.
// What is further down or above is a group of zeros: any multiplier will do for it.
__device__ __forceinline__ uint32_t Fields(uint32_t bytes, int reference, int top, int reach) {
  const uint32_t down = __vminu4(__vsubus4(reference * 0x01010101u, bytes), reach * 0x01010101u);
  return (top * 0x01010101u - down) | __vcmpeq4(bytes, kNanScale * 0x01010101u);
}

// 2^(reference - 134): what undoes a row's multipliers. Only the lowest byte counts.
__device__ __forceinline__ float FactorOf(uint32_t reference) {
  return __uint_as_float(((reference & 0xff) - (kReferenceExponent - 127)) << 23);
}

// One operand, in device memory. `rows` is padded to a multiple of the GEMM's tile.
struct PreparedScales {
  uint32_t* words;       // [NumScaleWords, rows]: byte g is group g's exponent field
  uint16_t* references;  // [rows]: the reference scale byte; kFarRow is set if the row is far
  RowClass* classes;     // [rows / 32]: the largest of the rows; fields are bf16's if not near
  int64_t rows;

  static constexpr uint16_t kFarRow = 0x100;

  static int64_t WorkspaceBytes(int64_t rows, int64_t num_columns);
  static PreparedScales At(void* workspace, int64_t rows, int64_t num_columns);
};

void LoadScaleKernels();

// Also sets `num_flags` flags to 0.
void LaunchPrepareScales(const Operand& x, const PreparedScales& prepared_x, const Operand& w,
                         const PreparedScales& prepared_w, int64_t num_columns, uint32_t* flags,
                         int num_flags, cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
