// Scales inside the kernel for few tokens: no pass of their own, as the weight is read only once.
//
// A CTA reads the scale bytes of its rows and its columns while the first values are on their way,
// chooses each row's reference, and leaves words [128 columns][row] in shared memory. A byte of
// them is the bf16 exponent field of the group's multiplier, relative to the reference, whose own
// is 2^7; so the f16 exponent field is that less 112, and both loops multiply the same numbers.
#pragma once

#include <cstdint>

#include "../ptx_sm90.cuh"
#include "call.h"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kReferenceExponent = 134;  // of 2^7 as bf16
// Groups of a wide row lie within this many octaves of its largest: then all products and sums are
// normal numbers of fp32. Rows that reach further are far, and so are those whose reference would
// make the result's factor leave fp32.
inline constexpr int kWideOctaves = 60;

// What shared memory holds of a row.
struct RowState {
  static constexpr uint32_t kReference = 0xff;  // mask
  static constexpr uint32_t kPlain = 0x100;     // all bytes are in f16's reach
  static constexpr uint32_t kWide = 0x200;      // far rows too
  static constexpr uint32_t kFar = 0x400;
};

// One operand's scales and a CTA's part of the columns.
struct ScaleSource {
  Operand operand;
  int num_groups;             // of the whole row
  int first_word, num_words;  // this CTA's, of four groups
  bool is_aligned;            // rows begin at multiples of four bytes

  // Rows behind the last, whose values are zero, repeat its scales.
  __device__ int64_t Clamped(int row) const {
    return min(int64_t{row}, operand.rows - 1) * operand.stride;
  }

  __device__ const uint8_t* Scales(int row) const { return operand.scales + Clamped(row) / kGroup; }

  // Bytes behind the last group repeat the word's first: values there are zero.
  __device__ uint32_t Word(const uint8_t* scales, int word) const {
    const int group = 4 * word;
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = __ldg(scales + group + (group + i < num_groups ? i : 0));
      bytes |= byte << (8 * i);
    }
    return bytes;
  }

  __device__ bool IsZeroGroup(int row, int group) const {
    const auto* const values =
        reinterpret_cast<const uint4*>(operand.values + Clamped(row) + int64_t{group} * kGroup);
    const uint4 a = __ldg(values), b = __ldg(values + 1);
    return ((a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) & 0x7f7f7f7f) == 0;
  }
};

// A warp's share of the rows: kUnits times eight, a row for each quad of lanes, of which a lane has
// every fourth word. What it stores must be stored before others read it.
template <int kUnits, int kSegmentWords, int kPitch>
class WarpScales {
 public:
  // The first row is `row` of the CTA's and of shared memory's, `first_row` + `row` of the operand.
  __device__ WarpScales(const ScaleSource& source, int first_row, int row, uint32_t words,
                        uint32_t states)
      : source_(source),
        row_(first_row + row + threadIdx.x % 32 / 4),
        words_(words + (threadIdx.x % 4 * kPitch + row + threadIdx.x % 32 / 4) * 4),
        states_(states + (row + threadIdx.x % 32 / 4) * 4) {}

  // Stores the rows' states and the words of the first segment; returns this lane's rows' states.
  __device__ uint32_t Prepare() {
    if (source_.num_words == 0) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) StoreState(u, 127 | RowState::kPlain);
      return 0;
    }
    uint32_t highest[kUnits], lowest[kUnits];  // two 16-bit values each
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      highest[u] = 0;
      lowest[u] = 0x00ff00ff;
    }
    for (int first = (source_.num_words - 1) / kSegmentWords * kSegmentWords; first >= 0;
         first -= kSegmentWords) {
      Load(first);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          const uint32_t even = held_[u][j] & 0x00ff00ff, odd = held_[u][j] >> 8 & 0x00ff00ff;
          highest[u] = __vmaxu2(__vmaxu2(highest[u], even), odd);
          lowest[u] = __vminu2(__vminu2(lowest[u], even), odd);
        }
      }
    }
    uint32_t all = 0;
    bool are_plain = true;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 1; i < 4; i *= 2) {
        highest[u] = __vmaxu2(highest[u], __shfl_xor_sync(~0u, highest[u], i));
        lowest[u] = __vminu2(lowest[u], __shfl_xor_sync(~0u, lowest[u], i));
      }
      const int high = max(highest[u] & 0xffff, highest[u] >> 16);
      const int low = min(lowest[u] & 0xffff, lowest[u] >> 16);
      const bool is_plain =
          high - low < kReferenceField && high >= kMinReference && high <= kMaxReference;
      are_plain &= is_plain;
      StoreState(u, is_plain ? high | RowState::kPlain : 0);
    }
    if (!__all_sync(~0u, are_plain)) {
      __syncwarp();
#pragma unroll 1
      for (int u = 0; u < kUnits; ++u) {
        if (__all_sync(~0u, LoadState(u) & RowState::kPlain)) continue;
        const uint32_t state = LookAtValues(u);
        if (!(LoadState(u) & RowState::kPlain)) StoreState(u, state);
        __syncwarp();
        all |= LoadState(u);
      }
    }
    __syncwarp();
    StoreHeld(0);
    return all;
  }

  // The words of a later segment.
  __device__ void StoreSegment(int first) {
    Load(first);
    StoreHeld(first);
  }

 private:
  static constexpr int kLaneWords = kSegmentWords / 4;

  __device__ uint32_t LoadState(int u) const { return ptx::LoadShared32(states_ + u * 8 * 4); }

  __device__ void StoreState(int u, uint32_t state) const {
    if (threadIdx.x % 4 == 0) ptx::StoreShared32(states_ + u * 8 * 4, state);
  }

  // From word `first` of the CTA's part on; words behind the last repeat it.
  __device__ void Load(int first) {
    const int end = source_.first_word + source_.num_words;
    const int word = source_.first_word + first + threadIdx.x % 4;
    const bool is_whole = source_.is_aligned && 4 * end <= source_.num_groups;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint8_t* const scales = source_.Scales(row_ + u * 8);
      if (is_whole) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          held_[u][j] =
              __ldg(reinterpret_cast<const uint32_t*>(scales) + min(word + 4 * j, end - 1));
        }
      } else {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          held_[u][j] = source_.Word(scales, min(word + 4 * j, end - 1));
        }
      }
    }
  }

  __device__ void StoreHeld(int first) const {
    const int num_left = source_.num_words - first - static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t state = LoadState(u);
      const uint32_t reference = state & RowState::kReference;
      const uint32_t to = words_ + u * 8 * 4;
      if (__all_sync(~0u, state & RowState::kPlain)) {
        const uint32_t shift = (kReferenceExponent - reference) * 0x01010101u;
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {  // no byte leaves its range
          if (4 * j < num_left) ptx::StoreShared32(to + j * (4 * kPitch * 4), held_[u][j] + shift);
        }
        continue;
      }
      const uint32_t reach = state & RowState::kWide ? kWideOctaves : kReferenceField - 1;
#pragma unroll
      for (int j = 0; j < kLaneWords; ++j) {
        // Groups of zeros may be out of reach on either side: any multiplier will do for them.
        const uint32_t down =
            __vminu4(__vsubus4(reference * 0x01010101u, held_[u][j]), reach * 0x01010101u);
        const uint32_t bytes =
            (kReferenceExponent * 0x01010101u - down) | __vcmpeq4(held_[u][j], 0xffffffff);
        if (4 * j < num_left) ptx::StoreShared32(to + j * (4 * kPitch * 4), bytes);
      }
    }
  }

  // The state of a row that looks wide or far: it may owe that to groups of zeros, whose scale is
  // only a convention.
  __device__ uint32_t LookAtValues(int u) const {
    const int row = row_ + u * 8;
    const uint8_t* const scales = source_.Scales(row);
    int highest = -1, lowest = 256;
    bool has_nan = false;
#pragma unroll 1
    for (int i = threadIdx.x % 4; i < source_.num_words; i += 4) {
      const int word = source_.first_word + i;
      const uint32_t bytes = source_.Word(scales, word);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int group = 4 * word + j, byte = bytes >> (8 * j) & 0xff;
        if (group >= source_.num_groups) continue;
        if (byte == kNanScale) {
          has_nan = true;
        } else if (!source_.IsZeroGroup(row, group)) {
          highest = max(highest, byte);
          lowest = min(lowest, byte);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 1; i < 4; i *= 2) {
      highest = max(highest, __shfl_xor_sync(~0u, highest, i));
      lowest = min(lowest, __shfl_xor_sync(~0u, lowest, i));
      has_nan |= __shfl_xor_sync(~0u, has_nan, i);
    }
    if (highest < 0) return 127 | (has_nan ? RowState::kWide : 0);
    const bool is_far =
        highest - lowest > kWideOctaves || highest < kMinReference || highest > kMaxReference;
    const bool is_wide = is_far || has_nan || highest - lowest >= kReferenceField;
    return highest | (is_wide ? RowState::kWide : 0) | (is_far ? RowState::kFar : 0);
  }

  const ScaleSource& source_;
  int row_;
  uint32_t words_, states_;
  uint32_t held_[kUnits][kLaneWords];
};

// 2^(reference - 134): what undoes a row's multipliers.
__device__ __forceinline__ float FactorOf(uint32_t state) {
  return __uint_as_float(((state & RowState::kReference) - (kReferenceExponent - 127)) << 23);
}

}  // namespace jax_pcie::cuda::mxfp8
