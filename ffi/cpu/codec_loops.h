// Codecs over spans of host memory: plain loops around the scalar arithmetic of `codec.h`.
//
// A span starts at a block boundary and may end inside a block; values past its end are absent and
// influence nothing. The loops run over whole blocks of constant length, so compilers vectorise
// them; a block with a non-finite value takes the slow path, which is the definition.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "../codec.h"

namespace jax_pcie::cpu {

template <class Codec>
typename Codec::Scale* ScalesOf(std::byte* record, int64_t values) {
  const RecordLayout layout = RecordLayout::For<Codec>(values);
  return reinterpret_cast<typename Codec::Scale*>(record + layout.scales_offset);
}

// |bits|, signed because that is the integer maximum which every vector unit has.
inline int32_t Magnitude(float v) { return static_cast<int32_t>(BitsOf(v) & kAbsMask); }

// `count` values (at most a block) -> payload; returns the scale. Values whose |bits| reach
// `overflow_bits` count as non-finite.
template <Limited Codec>
typename Codec::Scale EncodeBlock(const float* values, int count, uint32_t overflow_bits,
                                  uint8_t* payload) {
  const auto limit = static_cast<int32_t>(overflow_bits);
  int32_t amax = 0;
  for (int i = 0; i < count; ++i) amax = std::max(amax, Magnitude(values[i]));
  if (amax < limit) [[likely]] {
    const auto scale = Codec::MakeScale(FloatOf(amax));
    const float inverse = Codec::Inverse(scale);
    for (int i = 0; i < count; ++i) payload[i] = Codec::Encode(values[i], inverse);
    return scale;
  }
  amax = 0;
  for (int i = 0; i < count; ++i) {
    if (Magnitude(values[i]) < limit) amax = std::max(amax, Magnitude(values[i]));
  }
  const auto scale = Codec::MakeScale(FloatOf(amax));
  const float inverse = Codec::Inverse(scale);
  for (int i = 0; i < count; ++i) {
    payload[i] = Magnitude(values[i]) < limit ? Codec::Encode(values[i], inverse) : Codec::kNan;
  }
  return scale;
}

// Calls `body(begin, count)` for each block of a span; all but the last have a constant count,
// which is what lets the compiler unroll and vectorise what it inlines.
template <int kBlock, class Body>
void ForEachBlock(int64_t values, Body&& body) {
  int64_t begin = 0;
  for (; begin + kBlock <= values; begin += kBlock)
    body(begin, std::integral_constant<int, kBlock>());
  if (begin < values) body(begin, static_cast<int>(values - begin));
}

template <class Codec, class Element>
void EncodeSpan(const float* values, int64_t count, std::byte* record) {
  if constexpr (Limited<Codec>) {
    auto* payload = reinterpret_cast<uint8_t*>(record);
    auto* scales = ScalesOf<Codec>(record, count);
    ForEachBlock<Codec::kBlock>(count, [&](int64_t begin, auto n) {
      scales[begin / Codec::kBlock] =
          EncodeBlock<Codec>(values + begin, n, Element::kOverflowBits, payload + begin);
    });
  } else {
    auto* payload = reinterpret_cast<Element*>(record);
    for (int64_t i = 0; i < count; ++i) payload[i] = Narrow<Element>(values[i]);
  }
}

// The decoded values of a record, before they are rounded to an element.
template <class Codec>
void DecodeSpan(const std::byte* record, int64_t count, float* values) {
  if constexpr (Limited<Codec>) {
    const auto* payload = reinterpret_cast<const uint8_t*>(record);
    const auto* scales = ScalesOf<Codec>(const_cast<std::byte*>(record), count);
    ForEachBlock<Codec::kBlock>(count, [&](int64_t begin, auto n) {
      const float scale = Codec::Value(scales[begin / Codec::kBlock]);
      for (int i = 0; i < n; ++i) values[begin + i] = Codec::Decode(payload[begin + i], scale);
    });
  } else {
    const auto* payload = reinterpret_cast<const typename Codec::Element*>(record);
    for (int64_t i = 0; i < count; ++i) values[i] = Widen(payload[i]);
  }
}

// A record -> the elements that every rank's output gets.
template <class Codec, class Element>
void DecodeToElements(const std::byte* record, int64_t count, Element* y) {
  if constexpr (Limited<Codec>) {
    std::array<float, kSpanAlign> values;
    const auto* payload = reinterpret_cast<const uint8_t*>(record);
    const auto* scales = ScalesOf<Codec>(const_cast<std::byte*>(record), count);
    ForEachBlock<Codec::kBlock>(count, [&](int64_t begin, auto n) {
      const float scale = Codec::Value(scales[begin / Codec::kBlock]);
      for (int i = 0; i < n; ++i) values[i] = Codec::Decode(payload[begin + i], scale);
      for (int i = 0; i < n; ++i) y[begin + i] = NarrowSaturating<Element>(values[i]);
    });
  } else {
    std::memcpy(y, record, count * sizeof(Element));
  }
}

}  // namespace jax_pcie::cpu
