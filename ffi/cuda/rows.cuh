// Codecs by warps: a row is 256 values, 8 to a lane; the arithmetic is that of `codec.h`.
//
// Each lane holds 8 consecutive values, so that every load and store of a warp is one contiguous
// span. Blocks of 128 are half a row, blocks of 32 four lanes. The fast paths below give the same
// bits as the scalar functions, to which rare rows (NaN, Inf, huge scales) fall back.
#pragma once

#include <cuda_fp8.h>

#include "../codec.h"
#include "ptx.cuh"

namespace jax_pcie::cuda {

constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kLaneValues = 8;
constexpr int kRowValues = 32 * kLaneValues;

using Values = float[kLaneValues];

// --- A lane's 8 elements as they lie in an array.

template <class Element>
struct Chunk {
  static constexpr int kVectors = sizeof(Element) * kLaneValues / sizeof(uint4);
  uint4 vectors[kVectors];
};

// A chunk as a shift register, for the rare chunks that are not whole: a loop of 8 passes instead
// of 8 unrolled cases keeps the kernels small. `Push` enters at the top, `Pop` leaves at the
// bottom.
template <class Element>
struct ChunkRegister {
  static constexpr int kWords = sizeof(Chunk<Element>) / sizeof(uint32_t);
  static constexpr int kBits = 8 * sizeof(Element);
  uint32_t words[kWords];

  __device__ __forceinline__ Element Pop() {
    const Element bottom{static_cast<decltype(Element::bits)>(words[0])};
    Push(Element{});
    return bottom;
  }
  __device__ __forceinline__ void Push(Element top) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t next = i + 1 < kWords ? words[i + 1] : uint32_t{top.bits};
      words[i] = kBits == 32 ? next : __funnelshift_r(words[i], next, kBits);
    }
  }
};

// `valid` of the 8 elements exist; absent ones read as zero, which changes no block's amax.
template <class Element>
__device__ __forceinline__ Chunk<Element> LoadChunk(const Element* x, int valid, bool aligned) {
  Chunk<Element> chunk;
  if (aligned && valid >= kLaneValues) {
#pragma unroll
    for (int i = 0; i < Chunk<Element>::kVectors; ++i) {
      chunk.vectors[i] = __ldcs(reinterpret_cast<const uint4*>(x) + i);
    }
  } else {
    ChunkRegister<Element> elements = {};
#pragma unroll 1
    for (int i = 0; i < kLaneValues; ++i) elements.Push(i < valid ? x[i] : Element{});
    memcpy(&chunk, &elements, sizeof chunk);
  }
  return chunk;
}

template <class Element>
__device__ __forceinline__ void StoreChunk(Element* y, const Chunk<Element>& chunk, int valid,
                                           bool aligned) {
  if (aligned && valid >= kLaneValues) {
#pragma unroll
    for (int i = 0; i < Chunk<Element>::kVectors; ++i) {
      __stcs(reinterpret_cast<uint4*>(y) + i, chunk.vectors[i]);
    }
  } else {
    ChunkRegister<Element> elements;
    memcpy(&elements, &chunk, sizeof chunk);
#pragma unroll 1
    for (int i = 0; i < min(valid, kLaneValues); ++i) y[i] = elements.Pop();
  }
}

template <class Element>
__device__ __forceinline__ void Unpack(const Chunk<Element>& chunk, Values& v) {
  Element elements[kLaneValues];
  memcpy(elements, &chunk, sizeof chunk);
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) v[i] = Widen(elements[i]);
}

template <class Element>
__device__ __forceinline__ Chunk<Element> Pack(const Values& v) {
  Chunk<Element> chunk;
  if constexpr (std::is_same_v<Element, Bf16>) {
    __nv_bfloat162 pairs[kLaneValues / 2];
#pragma unroll
    for (int i = 0; i < kLaneValues / 2; ++i) {
      pairs[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    }
    memcpy(&chunk, pairs, sizeof chunk);
  } else {
    Element elements[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) elements[i] = Narrow<Element>(v[i]);
    memcpy(&chunk, elements, sizeof chunk);
  }
  return chunk;
}

// --- Payload bytes of 8 values.

template <Limited Codec>
__device__ __forceinline__ uint2 EncodePayload(const Values& v, float inverse) {
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const float* const four = v + 4 * w;
    if constexpr (std::is_same_v<Codec, Int8>) {
      // Next to 1.5 * 2^23 an integer is the low byte. The clamp to 127 never acts on finite
      // values (|v * RN(1 / scale)| < 127.5), so the scalar function's may be left out.
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) bits[i] = BitsOf(AddRn(MulRn(four[i], inverse), 12582912.f));
      words[w] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040),
                             __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
    } else {
      static_assert(std::is_same_v<Codec, E4m3> || std::is_same_v<Codec, Mxfp8>);
      const auto pair = [&](int i) -> uint32_t {
        return __nv_cvt_float2_to_fp8x2(
            make_float2(MulRn(four[i], inverse), MulRn(four[i + 1], inverse)), __NV_SATFINITE,
            __NV_E4M3);
      };
      words[w] = pair(0) | pair(2) << 16;
    }
  }
  return make_uint2(words[0], words[1]);
}

// Whether a word has a zero byte.
__device__ __forceinline__ bool HasZeroByte(uint32_t word) {
  return ((word - 0x01010101u) & ~word & 0x80808080u) != 0;
}

// 8 payload bytes times `scale`, with the bits of `Codec::Decode`. Returns whether all of them are
// known to be finite and at most `limit`; otherwise the caller must expect anything.
template <Limited Codec>
__device__ __forceinline__ bool DecodePayload(uint2 payload, float scale, float limit, Values& v) {
  bool ordinary = MulRn(scale, Codec::kMaxPayload) <= limit;
  if constexpr (std::is_same_v<Codec, Int8>) {
    const uint32_t flipped[2] = {payload.x ^ 0x80808080u, payload.y ^ 0x80808080u};
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      // The byte as the last mantissa bits of 2^23 + q + 128.
      const uint32_t bits = __byte_perm(flipped[i / 4], 0x4b000000u, 0x7440 | (i % 4));
      v[i] = MulRn(AddRn(FloatOf(bits), -8388736.f), scale);
    }
    ordinary = ordinary && !HasZeroByte(flipped[0]) && !HasZeroByte(flipped[1]);
    if (!ordinary) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const uint32_t q = flipped[i / 4] >> (8 * (i % 4)) & 0xffu;
        v[i] = q == 0 ? QuietNan() : ClampToFinite(v[i]);
      }
    }
  } else {
    const uint32_t words[2] = {payload.x, payload.y};
#pragma unroll
    for (int i = 0; i < kLaneValues; i += 2) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 4] >> (8 * (i % 4)));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      v[i] = MulRn(two.x, scale);
      v[i + 1] = MulRn(two.y, scale);
    }
    if (!ordinary) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) v[i] = ClampToFinite(v[i]);
    }
  }
  return ordinary;
}

// --- Scales. Every 128 values have one 32-bit scale word, whatever the codec.

template <Limited Codec>
__device__ __forceinline__ uint32_t BlockMax(uint32_t v) {
#pragma unroll
  for (int offset = 1; offset < Codec::kBlock / kLaneValues; offset *= 2) {
    v = max(v, __shfl_xor_sync(kFullWarp, v, offset));
  }
  return v;
}

// The scale word of this lane's 128 values, equal in all 16 lanes.
template <Limited Codec>
__device__ __forceinline__ uint32_t ScaleWord(typename Codec::Scale scale, int lane) {
  if constexpr (sizeof(typename Codec::Scale) == 4) {
    return BitsOf(scale);
  } else {
    uint32_t word = uint32_t{scale} << (8 * (lane / 4 % 4));
    word |= __shfl_xor_sync(kFullWarp, word, 4);
    word |= __shfl_xor_sync(kFullWarp, word, 8);
    return word;
  }
}

template <Limited Codec>
__device__ __forceinline__ float ScaleValue(uint32_t word, int lane) {
  if constexpr (sizeof(typename Codec::Scale) == 4) {
    return Codec::Value(FloatOf(word));
  } else {
    return Codec::Value(static_cast<uint8_t>(word >> (8 * (lane / 4 % 4))));
  }
}

// --- A row as it travels: payload and scale word, or the elements themselves.

template <class Codec>
struct WireRow {
  uint2 payload;
  uint32_t scale_word;
};
template <class Element>
struct WireRow<Raw<Element>> {
  Chunk<Element> payload;
};

template <class Codec, class Element>
__device__ __forceinline__ WireRow<Codec> EncodeRow(Values& v, int lane) {
  WireRow<Codec> row;
  if constexpr (Limited<Codec>) {
    const auto max_magnitude = [&] {
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) amax = max(amax, BitsOf(v[i]) & kAbsMask);
      return amax;
    };
    uint32_t amax = max_magnitude();
    uint32_t nan_bytes[2] = {0, 0};  // 0xff where a value is not finite
    const bool ordinary = __all_sync(kFullWarp, amax < Element::kOverflowBits);
    if (!ordinary) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        if ((BitsOf(v[i]) & kAbsMask) < Element::kOverflowBits) continue;
        v[i] = 0.f;
        nan_bytes[i / 4] |= 0xffu << (8 * (i % 4));
      }
      amax = max_magnitude();
    }
    const auto scale = Codec::MakeScale(FloatOf(BlockMax<Codec>(amax)));
    row.payload = EncodePayload<Codec>(v, Codec::Inverse(scale));
    row.scale_word = ScaleWord<Codec>(scale, lane);
    if (!ordinary) {
      constexpr uint32_t kNans = Codec::kNan * 0x01010101u;
      row.payload.x = (row.payload.x & ~nan_bytes[0]) | (kNans & nan_bytes[0]);
      row.payload.y = (row.payload.y & ~nan_bytes[1]) | (kNans & nan_bytes[1]);
    }
  } else {
    row.payload = Pack<Element>(v);
  }
  return row;
}

// The values of a row as a term of an fp32 sum.
template <class Codec>
__device__ __forceinline__ void DecodeRow(const WireRow<Codec>& row, int lane, Values& v) {
  if constexpr (Limited<Codec>) {
    DecodePayload<Codec>(row.payload, ScaleValue<Codec>(row.scale_word, lane), kMaxFloat, v);
  } else {
    Unpack(row.payload, v);
  }
}

// The elements of a row as every rank's output gets them.
template <class Codec, class Element>
__device__ __forceinline__ Chunk<Element> DecodeRowToElements(const WireRow<Codec>& row, int lane) {
  if constexpr (Limited<Codec>) {
    Values v;
    const float scale = ScaleValue<Codec>(row.scale_word, lane);
    if (DecodePayload<Codec>(row.payload, scale, Element::kMaxFinite, v)) return Pack<Element>(v);
    Element elements[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) elements[i] = NarrowSaturating<Element>(v[i]);
    Chunk<Element> chunk;
    memcpy(&chunk, elements, sizeof chunk);
    return chunk;
  } else {
    return row.payload;
  }
}

}  // namespace jax_pcie::cuda
