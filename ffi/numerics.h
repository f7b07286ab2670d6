// The arithmetic that CPU and CUDA share: fp32 operations rounded to nearest even, and the element
// types with their conversions.
//
// Every function gives the same bits on both platforms. Two things would break that and are kept
// out here: fused multiply-adds (`-ffp-contract=off` on the host, `__fmul_rn` on the device) and
// NaN payloads (the host propagates an operand's, CUDA writes one spelling; the host follows CUDA).
// Subnormals are kept: code that runs on somebody else's thread needs `FloatEnvironment` (cpu/).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HD __host__ __device__ __forceinline__
#else
#define HD inline
#endif

namespace jax_pcie {

HD uint32_t BitsOf(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
#endif
}

HD float FloatOf(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
#endif
}

constexpr uint32_t kAbsMask = 0x7fffffffu;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kMaxFloat = std::numeric_limits<float>::max();

HD float QuietNan() { return FloatOf(0x7fffffffu); }  // the spelling of every NaN made here
HD bool IsNan(float v) { return (BitsOf(v) & kAbsMask) > kInfinityBits; }
HD bool IsFinite(float v) { return (BitsOf(v) & kAbsMask) < kInfinityBits; }
HD float Abs(float v) { return FloatOf(BitsOf(v) & kAbsMask); }
HD float Max(float a, float b) { return a > b ? a : b; }
HD float Min(float a, float b) { return a < b ? a : b; }

HD float AddRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  const float sum = a + b;
  return sum == sum ? sum : QuietNan();
#endif
}

HD float MulRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

HD float DivRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// a * b + c rounded once. Not for NaNs: no one spelling is promised.
HD float FmaRn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// --- Element types: what an array holds. `kOverflowBits` is the smallest |fp32| that rounds to
// Inf.

struct Bf16 {
  uint16_t bits;
  static constexpr uint32_t kOverflowBits = 0x7f7f8000u;
  static constexpr float kMaxFinite = 0x1.fep127f;
  static constexpr uint16_t kMaxFiniteBits = 0x7f7f;
  static constexpr uint16_t kSignBit = 0x8000;
};

struct F16 {
  uint16_t bits;
  static constexpr uint32_t kOverflowBits = 0x477ff000u;  // 65520
  static constexpr float kMaxFinite = 65504.f;
  static constexpr uint16_t kMaxFiniteBits = 0x7bff;
  static constexpr uint16_t kSignBit = 0x8000;
};

struct F32 {
  uint32_t bits;
  static constexpr uint32_t kOverflowBits = kInfinityBits;
  static constexpr float kMaxFinite = kMaxFloat;
  static constexpr uint32_t kMaxFiniteBits = 0x7f7fffffu;
  static constexpr uint32_t kSignBit = 0x80000000u;
};

static_assert(sizeof(Bf16) == 2 && sizeof(F16) == 2 && sizeof(F32) == 4);

HD float Widen(F32 v) { return FloatOf(v.bits); }
HD float Widen(Bf16 v) { return FloatOf(uint32_t{v.bits} << 16); }

HD float Widen(F16 v) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(v.bits));
#else
  const uint32_t sign = uint32_t{v.bits & 0x8000u} << 16;
  const uint32_t magnitude = v.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatOf(sign | kInfinityBits | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
  return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal or zero
#endif
}

template <class Element>
HD Element Narrow(float v);

template <>
HD F32 Narrow<F32>(float v) {
  return {BitsOf(v)};
}

template <>
HD Bf16 Narrow<Bf16>(float v) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(v))};
#else
  const uint32_t bits = BitsOf(v);
  if ((bits & kAbsMask) > kInfinityBits) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
HD F16 Narrow<F16>(float v) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(v))};
#else
  const uint32_t bits = BitsOf(v);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & kAbsMask;
  if (magnitude > kInfinityBits) return {0x7fff};
  if (magnitude >= F16::kOverflowBits) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 aligns the last bit with 2^-24
    const uint32_t q = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
    return {static_cast<uint16_t>(sign | q)};
  }
  const uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
}

// Narrows what a record decoded to: finite stays finite, because rounding up near the top of the
// range would otherwise make an infinity that no rank ever had.
template <class Element>
HD Element NarrowSaturating(float v) {
  const uint32_t magnitude = BitsOf(v) & kAbsMask;
  if (magnitude < Element::kOverflowBits || magnitude >= kInfinityBits) return Narrow<Element>(v);
  using Bits = decltype(Element::bits);
  const Bits sign = (BitsOf(v) >> 31) ? Bits{Element::kSignBit} : Bits{0};
  return {static_cast<Bits>(sign | Element::kMaxFiniteBits)};
}

}  // namespace jax_pcie
