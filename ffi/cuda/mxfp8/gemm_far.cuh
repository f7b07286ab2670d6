// Outputs of far rows: scales so far apart, or so near the ends of E8M0's range, that fp32 does not
// hold all the products of decoded values. Slow, and right: the sum of a group's products of
// payloads, then the two scales at once.
//
// Only these outputs are computed so, not the whole tile: the others' bits must not depend on them.
#pragma once

#include "gemm_tiles.cuh"

namespace jax_pcie::cuda::mxfp8 {

// value * 2^exponent, exact but for what the result cannot hold; in halves, since 2^exponent may
// not be a normal number.
__device__ __forceinline__ float TimesPowerOfTwo(float value, int exponent) {
  const int half = exponent / 2, rest = exponent - half;
  return value * __uint_as_float(static_cast<uint32_t>(half + 127) << 23) *
         __uint_as_float(static_cast<uint32_t>(rest + 127) << 23);
}

__device__ __forceinline__ float2 DecodePair(uint32_t two_bytes) {
  const uint32_t halves = ptx::CvtF16x2E4m3x2(two_bytes);
  return __half22float2(reinterpret_cast<const __half2&>(halves));
}

__device__ inline float FarProduct(const MultiplyCall& call, int64_t row, int64_t output) {
  const uint8_t* const x = call.x.values + row * call.x.stride;
  const uint8_t* const w = call.w.values + output * call.w.stride;
  const uint8_t* const x_scales = call.x.scales + row * (call.x.stride / kGroup);
  const uint8_t* const w_scales = call.w.scales + output * (call.w.stride / kGroup);
  float sum = 0;
  for (int group = 0; group < call.num_columns / kGroup; ++group) {
    float part = 0;
    for (int pair = group * kGroup / 2; pair < (group + 1) * kGroup / 2; ++pair) {
      const float2 a = DecodePair(reinterpret_cast<const uint16_t*>(x)[pair]);
      const float2 b = DecodePair(reinterpret_cast<const uint16_t*>(w)[pair]);
      part += a.x * b.x + a.y * b.y;
    }
    const int x_scale = x_scales[group], w_scale = w_scales[group];
    if (x_scale == kNanScale || w_scale == kNanScale) return __uint_as_float(0x7fffffff);
    sum += TimesPowerOfTwo(part, x_scale + w_scale - 254);
  }
  return sum;
}

// By the 256 threads of the consumers, one row of the tile each.
template <class Output>
__device__ __forceinline__ void StoreFarOutputs(const GemmParams& params, int tile_row,
                                                int tile_output) {
  const MultiplyCall& call = params.call;
  const int64_t row = tile_row + threadIdx.x % kTileRows;
  if (row >= call.x.rows) return;
  const bool is_far_row = params.x.references[row] & PreparedScales::kFarRow;
  for (int column = 0; column < kTileOutputs; ++column) {
    const int64_t output = tile_output + column;
    if (output >= call.w.rows) return;
    if (!is_far_row && !(params.w.references[output] & PreparedScales::kFarRow)) continue;
    float value = FarProduct(call, row, output);
    if (call.bias != nullptr) value += call.bias[output];
    static_cast<Output*>(call.y)[row * call.w.rows + output] = Rounded<Output>(value);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
