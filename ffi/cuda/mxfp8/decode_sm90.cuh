// What the Hopper kernels share: E4M3 values to operands of the tensor cores, and rings of slots in
// shared memory. Which decoder serves which rows is in `scales.h`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx_sm90.cuh"
#include "../wgmma.cuh"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {

// --- From E4M3 values as f16, and a multiplier, to 16-bit values that the tensor cores take.

// For near rows: a power of two relative to the row's reference makes every value exact in f16.
struct DecodeF16 {
  static constexpr bool kIsFallback = false;

  // The multiplier twice, from the exponent field that `PreparedScales` holds.
  __device__ static uint32_t Multiplier(uint32_t field, int /*base*/) { return field * 0x04000400; }

  __device__ static uint32_t Scaled(uint32_t halves, uint32_t multiplier) {
    return ptx::MulF16x2(halves, multiplier);
  }

  template <int kSums>
  __device__ static void Multiply(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
    ptx::Wgmma(d, a, b, ptx::WgmmaF16{});
  }
};

// For any row of a tile with wide ones: the same numbers, which bf16 holds further down.
struct DecodeBf16 {
  static constexpr bool kIsFallback = true;

  // `base` makes a field one of bf16.
  __device__ static uint32_t Multiplier(uint32_t field, int base) {
    const uint32_t exponent = field + base;
    return exponent == kNanScale ? 0x7fff7fff : exponent * 0x00800080;
  }

  // E4M3 has no direct conversion to bf16.
  __device__ static uint32_t Scaled(uint32_t halves, uint32_t multiplier) {
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(halves));
    const __nv_bfloat162 exact = __float22bfloat162_rn(wide);
    const auto result = __hmul2(exact, reinterpret_cast<const __nv_bfloat162&>(multiplier));
    return reinterpret_cast<const uint32_t&>(result);
  }

  template <int kSums>
  __device__ static void Multiply(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
    ptx::Wgmma(d, a, b, ptx::WgmmaBf16{});
  }
};

// Two registers of two 16-bit values, of the four bytes of a word.
template <class Decoder>
__device__ __forceinline__ uint2 Decoded(uint32_t word, uint32_t multiplier) {
  return {Decoder::Scaled(ptx::CvtF16x2E4m3x2(word), multiplier),
          Decoder::Scaled(ptx::CvtF16x2E4m3x2High(word), multiplier)};
}

// Describes a decoded tile to the tensor cores, from its k16 step on: rows of 128 bytes, 128-byte
// swizzle, 1024 bytes from eight rows to the next.
__device__ __forceinline__ uint64_t DescribeDecoded(uint32_t decoded, int step) {
  constexpr uint32_t kHigh = (1024 >> 4) | (1u << 30);
  return (uint64_t{kHigh} << 32) | (1u << 16) | ((decoded + 32 * step) >> 4);
}

// --- Rings

// A position in a ring, and the parity of its current round. A power of two needs one register.
template <int kLength, bool = (kLength & (kLength - 1)) == 0>
class RingPosition {
 public:
  RingPosition() = default;
  // After so many steps.
  __device__ explicit RingPosition(uint32_t count)
      : index_(count % kLength), parity_(count / kLength % 2) {}
  __device__ int index() const { return index_; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void Advance() {
    if (++index_ == kLength) {
      index_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int index_ = 0;
  uint32_t parity_ = 0;
};

template <int kLength>
class RingPosition<kLength, true> {
 public:
  __device__ int index() const { return count_ % kLength; }
  __device__ uint32_t parity() const { return count_ / kLength % 2; }
  __device__ void Advance() { ++count_; }

 private:
  uint32_t count_ = 0;
};

}  // namespace jax_pcie::cuda::mxfp8
