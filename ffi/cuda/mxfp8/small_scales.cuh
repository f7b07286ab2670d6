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
  int load_bytes;             // that one load can have: 16, 4 or 1

  // Rows behind the last, whose sums nobody uses, repeat its scales.
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

// A warp's share of the rows: kUnits times eight, a row for each quad of lanes. Of 16 words a lane
// has four in a row where loads are that wide, else every fourth. What it stores must be stored
// before others read it.
template <int kUnits, int kSegmentWords, int kPitch>
class WarpScales {
 public:
  // The first row is `row` of the CTA's and of shared memory's, `first_row` + `row` of the operand.
  __device__ WarpScales(const ScaleSource& source, int first_row, int row, uint32_t words,
                        uint32_t states)
      : source_(source), lane_(ptx::Kept(threadIdx.x % 32)) {
    const bool is_wide = source.load_bytes == 16;
    first_word_ = lane_ % 4 * (is_wide ? 4 : 1);
    word_step_ = is_wide ? 1 : 4;
    row_ = first_row + row + lane_ / 4;
    words_ = words + (first_word_ * kPitch + row + lane_ / 4) * 4;
    states_ = states + (row + lane_ / 4) * 4;
  }

  // Stores the rows' states and the words of the first segment; returns this lane's rows' states.
  // Calls `announce` once the first loads have begun.
  template <class Announce>
  __device__ __forceinline__ uint32_t Prepare(Announce&& announce) {
    if (source_.num_words == 0) {
      announce();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) StoreState(u, 127 | RowState::kPlain);
      return 0;
    }
    uint32_t highest[kUnits], lowest[kUnits];  // of 16-bit values whose upper bytes count
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      highest[u] = 0;
      lowest[u] = ~0u;
    }
    for (int first = LastSegment();; first -= kSegmentWords) {
      Load(first);
      if (first == LastSegment()) announce();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          const uint32_t odd = held_[u][j], even = odd << 8;
          highest[u] = __vimax3_u16x2(highest[u], odd, even);
          lowest[u] = __vimin3_u16x2(lowest[u], odd, even);
        }
      }
      if (first == 0) break;
    }
    uint32_t row_states[kUnits];
    bool are_plain = true;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      // The highest, and what the lowest lacks to 255.
      const uint32_t high_halves = highest[u] >> 8 & 0x00ff00ff;
      const uint32_t low_halves = ~lowest[u] >> 8 & 0x00ff00ff;
      uint32_t both = __vmaxu2(__byte_perm(high_halves, low_halves, 0x5410),
                               __byte_perm(high_halves, low_halves, 0x7632));
#pragma unroll
      for (int i = 1; i < 4; i *= 2) both = __vmaxu2(both, __shfl_xor_sync(~0u, both, i));
      const int high = both & 0xffff, low = 255 - static_cast<int>(both >> 16);
      const bool is_plain =
          high - low < kReferenceField && high >= kMinReference && high <= kMaxReference;
      are_plain &= is_plain;
      row_states[u] = is_plain ? high | RowState::kPlain : 0;
      StoreState(u, row_states[u]);
    }
    uint32_t all = 0;
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
      LoadStates(row_states);
    }
    StoreHeld(0, row_states);
    return all;
  }

  // The words of a later segment.
  __device__ __forceinline__ void StoreSegment(int first) {
    Load(first);
    uint32_t row_states[kUnits];
    LoadStates(row_states);
    StoreHeld(first, row_states);
  }

 private:
  static constexpr int kLaneWords = kSegmentWords / 4;
  static_assert(kLaneWords % 4 == 0);
  static_assert(kPitch % 8 == 2);  // wide loads: rows by lanes of a word lie in different banks

  __device__ int LastSegment() const {
    return (source_.num_words - 1) / kSegmentWords * kSegmentWords;
  }

  __device__ uint32_t LoadState(int u) const { return ptx::LoadShared32(states_ + u * 8 * 4); }

  __device__ __forceinline__ void LoadStates(uint32_t (&row_states)[kUnits]) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) row_states[u] = LoadState(u);
  }

  __device__ void StoreState(int u, uint32_t state) const {
    if (lane_ % 4 == 0) ptx::StoreShared32(states_ + u * 8 * 4, state);
  }

  // From word `first` of the CTA's part on; words behind the last repeat it.
  __device__ __forceinline__ void Load(int first) {
    const int begin = source_.first_word + first;
    const int last = source_.first_word + source_.num_words - 1;
    const bool is_whole = source_.load_bytes >= 4 && 4 * (last + 1) <= source_.num_groups;
    auto visit_rows = [&](auto&& visit) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) visit(source_.Scales(row_ + u * 8), held_[u]);
    };
    if (source_.load_bytes == 16) {
      visit_rows([&](const uint8_t* scales, uint32_t (&held)[kLaneWords]) {
#pragma unroll
        for (int j = 0; j < kLaneWords; j += 4) {
          const int four = min((begin + WordOf(j)) / 4, last / 4);
          const uint4 v = __ldg(reinterpret_cast<const uint4*>(scales) + four);
          held[j] = v.x, held[j + 1] = v.y, held[j + 2] = v.z, held[j + 3] = v.w;
        }
      });
    } else if (is_whole) {
      visit_rows([&](const uint8_t* scales, uint32_t (&held)[kLaneWords]) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          held[j] = __ldg(reinterpret_cast<const uint32_t*>(scales) + min(begin + WordOf(j), last));
        }
      });
    } else {
      visit_rows([&](const uint8_t* scales, uint32_t (&held)[kLaneWords]) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          held[j] = source_.Word(scales, min(begin + WordOf(j), last));
        }
      });
    }
  }

  // Where this lane's word j is in a segment.
  __device__ int WordOf(int j) const { return first_word_ + j / 4 * 16 + j % 4 * word_step_; }

  __device__ __forceinline__ void StoreHeld(int first, const uint32_t (&row_states)[kUnits]) const {
    const int num_left = source_.num_words - first;
    auto store = [&](int u, int j, uint32_t word) {
      const uint32_t to = words_ + (j / 4 * 16 + j % 4 * word_step_) * (kPitch * 4) + u * 8 * 4;
      if (WordOf(j) < num_left) ptx::StoreShared32(to, word);
    };
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t state = row_states[u];
      const int reference = state & RowState::kReference;
      if (__all_sync(~0u, state & RowState::kPlain)) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
          store(u, j, PlainFields(held_[u][j], reference, kReferenceExponent));
        }
        continue;
      }
      const int reach = state & RowState::kWide ? kWideOctaves : kReferenceField - 1;
#pragma unroll
      for (int j = 0; j < kLaneWords; ++j) {
        store(u, j, Fields(held_[u][j], reference, kReferenceExponent, reach));
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
    for (int i = lane_ % 4; i < source_.num_words; i += 4) {
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
  uint32_t lane_;  // kept, so that nothing is computed from it before it is wanted
  int row_;
  int first_word_, word_step_;  // of this lane's four words of 16
  uint32_t words_, states_;
  uint32_t held_[kUnits][kLaneWords];
};

}  // namespace jax_pcie::cuda::mxfp8
