// Codecs: how a block of fp32 values becomes bytes on the wire and back.
//
// A codec is a struct of scalar functions and constants, the same source for CPU and CUDA; loops,
// warps, memory and the record's place belong to the backends, and no codec knows a topology.
// `Limited` marks the codecs that round; `Raw` moves the array's own elements. Surprising fact: a
// value that would round to Inf in the array's dtype is non-finite for every rounding codec, so
// that an overflowing sum arrives as NaN and never as a plausible number.
#pragma once

#include <concepts>

#include "error.h"
#include "numerics.h"

namespace jax_pcie {

enum class CodecId : int32_t { kRaw = 0, kInt8 = 1, kE4m3 = 2, kMxfp8 = 3 };

// Scales never go below this, so that their reciprocal stays finite (2^126).
constexpr float kMinScale = 0x1p-126f;

// Shards and pieces are cut at multiples of this many values, whatever the codec's own block.
constexpr int kSpanAlign = 128;

// --- E4M3 (OCP FP8: 4 exponent bits with bias 7, 3 mantissa bits, no infinity, 0x7f is NaN).

constexpr float kE4m3Max = 448.f;
constexpr uint8_t kE4m3Nan = 0x7f;

// Saturating round-to-nearest-even of a finite value.
HD uint8_t E4m3FromFloat(float v) {
  const uint32_t sign = (BitsOf(v) >> 24) & 0x80u;
  const float magnitude = Min(Abs(v), kE4m3Max);
  const uint32_t bits = BitsOf(magnitude);
  // Normal: round the mantissa to 3 bits, then move the exponent's bias from 127 to 7.
  const uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the grid is 2^-9, which is the last bit of a float next to 2^14.
  const uint32_t subnormal = BitsOf(AddRn(magnitude, 0x1p14f)) - BitsOf(0x1p14f);
  return static_cast<uint8_t>(sign | (magnitude < 0x1p-6f ? subnormal : normal));
}

HD float E4m3ToFloat(uint8_t q) {
  const uint32_t magnitude = q & 0x7fu;
  const uint32_t sign = uint32_t{q & 0x80u} << 24;
  if (magnitude == kE4m3Nan) return QuietNan();
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = BitsOf(MulRn(static_cast<float>(magnitude), 0x1p-9f));
  return FloatOf(sign | (magnitude < 8u ? subnormal : normal));
}

// A record holds finite values only as finite ones: rounding up at the top must not make Inf.
HD float ClampToFinite(float v) {
  if (IsNan(v)) return QuietNan();
  return Max(Min(v, kMaxFloat), -kMaxFloat);
}

// --- The codecs.

// The array's own elements, moved bit for bit; partial sums are rounded once to the element type.
// Infinities stay infinities.
template <class ElementType>
struct Raw {
  using Element = ElementType;
  static constexpr CodecId kId = CodecId::kRaw;
  static constexpr int kPayloadBytes = sizeof(Element);
  static constexpr int kScaleBytesPerSpan = 0;  // per kSpanAlign values
};

// The fp32 scale that takes a block's largest value to the largest payload.
HD float ScaleFor(float amax, float max_payload) {
  return amax > 0.f ? Max(DivRn(amax, max_payload), kMinScale) : 1.f;
}

// Symmetric: value = payload * scale, payload in [-127, 127], scale = amax / 127.
// Zero block: scale 1. Non-finite: payload -128, otherwise unused. Tiny blocks: scale 2^-126.
struct Int8 {
  using Scale = float;
  static constexpr CodecId kId = CodecId::kInt8;
  static constexpr int kBlock = 128;
  static constexpr int kPayloadBytes = 1;
  static constexpr int kScaleBytesPerSpan = 4;
  static constexpr float kMaxPayload = 127.f;
  static constexpr uint8_t kNan = 0x80;

  HD static Scale MakeScale(float amax) { return ScaleFor(amax, kMaxPayload); }
  HD static float Inverse(Scale scale) { return DivRn(1.f, scale); }
  HD static float Value(Scale scale) { return scale; }
  HD static uint8_t Encode(float v, float inverse) {
    const float scaled = Max(Min(MulRn(v, inverse), kMaxPayload), -kMaxPayload);
    // Next to 1.5 * 2^23 the last mantissa bit is 1, so the addition rounds to the nearest integer.
    return static_cast<uint8_t>(BitsOf(AddRn(scaled, 12582912.f)) & 0xffu);
  }
  HD static float Decode(uint8_t q, float scale) {
    if (q == kNan) return QuietNan();
    return ClampToFinite(MulRn(static_cast<float>(static_cast<int8_t>(q)), scale));
  }
};

// Floating payload under one scale per 128: value = e4m3(payload) * scale, scale = amax / 448.
// Zero block: scale 1. Non-finite: payload 0x7f. Saturates, which only the reciprocal's rounding
// can ask for. -0 keeps its sign.
struct E4m3 {
  using Scale = float;
  static constexpr CodecId kId = CodecId::kE4m3;
  static constexpr int kBlock = 128;
  static constexpr int kPayloadBytes = 1;
  static constexpr int kScaleBytesPerSpan = 4;
  static constexpr float kMaxPayload = kE4m3Max;
  static constexpr uint8_t kNan = kE4m3Nan;

  HD static Scale MakeScale(float amax) { return ScaleFor(amax, kMaxPayload); }
  HD static float Inverse(Scale scale) { return DivRn(1.f, scale); }
  HD static float Value(Scale scale) { return scale; }
  HD static uint8_t Encode(float v, float inverse) { return E4m3FromFloat(MulRn(v, inverse)); }
  HD static float Decode(uint8_t q, float scale) {
    return ClampToFinite(MulRn(E4m3ToFloat(q), scale));
  }
};

// OCP MX: E4M3 payload, one power-of-two scale byte (E8M0, bias 127) per 32. The scale is rounded
// *up*, so that no element saturates (the OCP sample conversion rounds down and does).
// Zero block: byte 127. Byte 0 decodes as the subnormal 2^-127, byte 255 as NaN.
struct Mxfp8 {
  using Scale = uint8_t;
  static constexpr CodecId kId = CodecId::kMxfp8;
  static constexpr int kBlock = 32;
  static constexpr int kPayloadBytes = 1;
  static constexpr int kScaleBytesPerSpan = 4;
  static constexpr float kMaxPayload = kE4m3Max;
  static constexpr uint8_t kNan = kE4m3Nan;

  // The smallest b with amax <= 448 * 2^(b-127). 448 = 1.75 * 2^8, so adding the distance from
  // 1.75 to 2 to the mantissa carries into the exponent exactly when amax needs the next power.
  HD static Scale MakeScale(float amax) {
    if (!(amax > 0.f)) return 127;
    const uint32_t rounded_up = (BitsOf(amax) + 0x1fffffu) >> 23;
    return static_cast<Scale>(rounded_up > 8u ? rounded_up - 8u : 0u);
  }
  HD static float Inverse(Scale scale) {  // 2^(127 - b), exact
    return scale == 254 ? FloatOf(0x00400000u) : FloatOf((254u - scale) << 23);
  }
  HD static float Value(Scale scale) {  // 2^(b - 127), exact
    if (scale == 255) return QuietNan();
    return scale == 0 ? FloatOf(0x00400000u) : FloatOf(uint32_t{scale} << 23);
  }
  HD static uint8_t Encode(float v, float inverse) { return E4m3FromFloat(MulRn(v, inverse)); }
  HD static float Decode(uint8_t q, float scale) {
    return ClampToFinite(MulRn(E4m3ToFloat(q), scale));
  }
};

template <class Codec>
concept Limited = requires(float v, typename Codec::Scale scale, uint8_t q) {
  { Codec::MakeScale(v) } -> std::same_as<typename Codec::Scale>;
  { Codec::Inverse(scale) } -> std::same_as<float>;
  { Codec::Value(scale) } -> std::same_as<float>;
  { Codec::Encode(v, v) } -> std::same_as<uint8_t>;
  { Codec::Decode(q, v) } -> std::same_as<float>;
  requires kSpanAlign % Codec::kBlock == 0;
  requires Codec::kScaleBytesPerSpan == kSpanAlign / Codec::kBlock * sizeof(scale);
};
static_assert(Limited<Int8> && Limited<E4m3> && Limited<Mxfp8> && !Limited<Raw<Bf16>>);
static_assert(kSpanAlign * Int8::kPayloadBytes + Int8::kScaleBytesPerSpan == 132);

// --- Where a record's parts lie.

constexpr int64_t CeilDiv(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// A record of `values` values: payload first, then the scales in block order at a 16-byte boundary.
struct RecordLayout {
  int64_t scales_offset;  // bytes from the record's start
  int64_t total_bytes;    // a multiple of 16

  template <class Codec>
  static constexpr RecordLayout For(int64_t values) {
    const int64_t padded = RoundUp(values, kSpanAlign);
    const int64_t payload = RoundUp(padded * Codec::kPayloadBytes, 16);
    return {payload, RoundUp(payload + padded / kSpanAlign * Codec::kScaleBytesPerSpan, 16)};
  }
};
static_assert(RecordLayout::For<Int8>(512).total_bytes == 512 + 16);
static_assert(RecordLayout::For<Mxfp8>(1).total_bytes == 128 + 16);
static_assert(RecordLayout::For<Raw<Bf16>>(129).total_bytes == 512);

// Calls `body.template operator()<Codec>()` with the codec of `id` for arrays of `Element`.
template <class Element, class Body>
decltype(auto) VisitCodec(CodecId id, Body&& body) {
  switch (id) {
    case CodecId::kInt8:
      return body.template operator()<Int8>();
    case CodecId::kE4m3:
      return body.template operator()<E4m3>();
    case CodecId::kMxfp8:
      return body.template operator()<Mxfp8>();
    case CodecId::kRaw:
      return body.template operator()<Raw<Element>>();
  }
  throw Error(Concat("codec ", int(id), " is not known"));
}

}  // namespace jax_pcie
