// The shapes of the kernel for few tokens: its forms, what lies in shared memory, whose columns are
// whose.
//
// Owns every size that follows from a form, as constants; the work is in `small_sm90.cuh` and
// `small_finish.cuh`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "call.h"
#include "scales.h"
#include "small_scales.cuh"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kSmallSharedBytes = 227 * 1024;
inline constexpr int kConsumersBarrier = 1, kSegmentBarrier = 2, kRequestsBarrier = 3;
inline constexpr int kBiasThreads = 96;  // of the copying warpgroup, without the copying warp

// The tuning choices of a kernel.
template <int kTokens_, int kBlocks_, int kRanks_>
struct SmallForm {
  static constexpr int kTokens = kTokens_;  // 8, 16, 32 or 64
  static constexpr int kBlocks = kBlocks_;  // of 64 rows: 1 or 2
  static constexpr int kRanks = kRanks_;    // CTAs of a cluster
  static_assert(kRanks >= 2);
  // Consumer warpgroups, which take turns at stages. Two of them wait less than two that share each
  // stage: 17.7 us and 20.0 us at N = K = 7168.
  static constexpr int kTurns = 2;

  static constexpr int kRows = 64 * kBlocks;
  static constexpr int kConsumerWarps = 4 * kTurns;
  static constexpr int kConsumers = 32 * kConsumerWarps;
  static constexpr int kThreads = 256 + kConsumers;

  // The decoders share out a row's eight k16 steps.
  static constexpr int kDecodeSteps = std::max(1, kTokens / 16);
  static constexpr int kDecoderWarps = kTokens * 8 / kDecodeSteps / 32;

  // Scale words are held for so many stages; the columns beyond are further segments.
  static constexpr int kSegmentWords = 4096 / kRows;
  static constexpr int kWPitch = kRows + 10, kXPitch = kTokens + 10;  // see `WarpScales`
  static constexpr int kWScaleWarps = std::min(kRows / 8, kConsumerWarps);
  static constexpr int kXScaleWarps = std::min(kTokens / 8, 4);
  static constexpr int kRequesters = 32 * (1 + kWScaleWarps + kXScaleWarps);

  static constexpr int kShareRows = kRows / kRanks;  // that a rank finishes, if the tile has them
  static constexpr int kShareQuads = kTokens * kShareRows / 4;
  static_assert(kShareRows % 16 == 0);
  static constexpr int kInboxBytes = (kRanks - 1) * kTokens * kShareRows * 4;

  static constexpr int kStageBytes = (kRows + kTokens) * kTile;
  static constexpr int kDecodedBytes = kTokens * kTile * 2;
  // A consumer gives a slot back once it has begun with its next one.
  static constexpr int kDecodedStages = std::max(2 + 32 / kTokens, kTurns + 1);
  // Five or six stages are about 90 KiB an SM, which keeps the memory busy. With more nothing
  // arrives sooner, only less evenly, and all wait for the slowest CTA: at N = K = 7168 one token
  // takes 18.0 us with twelve instead of 16.4, 32 take 19.1 us with eight instead of 17.9. Four are
  // too few: 17.2 us and 18.7 us. 64 tokens do not mind.
  static constexpr int kMaxStages = kTokens == 32 ? 5 : kTokens < 32 && kRanks == 2 ? 6 : 24;
  static constexpr int kOtherBytes =
      kDecodedStages * kDecodedBytes + kInboxBytes + kSegmentWords * (kWPitch + kXPitch) * 4 +
      (2 * kRows + kTokens) * 4 + 8 * (3 * kMaxStages + 2 * kDecodedStages + kRanks + 1);
  // 2 KiB: alignment within and of the whole.
  static constexpr int kStages =
      std::min(kMaxStages, (kSmallSharedBytes - 2048 - kOtherBytes) / kStageBytes);
  static_assert(kStages >= 2);
  // A group that takes turns waits for a slot in every second round only, if their number is odd:
  // then what it has waited for before must tell that the round between is over.
  static_assert(kStages % kTurns == 0 || kStages >= kDecodedStages + 2);
  // Enough to keep the memory busy until the scales are there.
  static constexpr int kFirstStages = std::min(kStages, 96 * 1024 / (kRows * kTile));

  static constexpr int kSumsPitch = kRows + 4;  // 4 mod 16: stored without bank conflicts
};

template <class Form>
struct alignas(1024) SmallShared {
  union {
    struct {
      uint8_t w[Form::kStages][Form::kRows][kTile];
      uint8_t x[Form::kStages][Form::kTokens][kTile];
      uint16_t decoded[Form::kDecodedStages][2][Form::kTokens][kTile / 2];
    };
    float sums[Form::kTurns][Form::kTokens][Form::kSumsPitch];  // once the rings have served
  };
  float inbox[Form::kRanks - 1][Form::kTokens][Form::kShareRows];  // by distance, less one
  uint32_t w_words[Form::kSegmentWords][Form::kWPitch];
  uint32_t x_words[Form::kSegmentWords][Form::kXPitch];
  uint32_t w_states[Form::kRows];
  uint32_t x_states[Form::kTokens];
  float bias[Form::kRows];
  uint64_t w_full[Form::kStages], x_full[Form::kStages], empty[Form::kStages];
  uint64_t decoded_full[Form::kDecodedStages], decoded_empty[Form::kDecodedStages];
  uint64_t inbox_full;
  uint32_t has_far[Form::kRanks];  // by distance: the others' come with the inbox
};

// Where its parts are, as 32-bit addresses.
template <class Form>
class SmallMap {
 public:
  using Shared = SmallShared<Form>;

  __device__ explicit SmallMap(uint32_t base) : base_(base) {}

  __device__ uint32_t w(int stage) const {
    return base_ + offsetof(Shared, w) + stage * (Form::kRows * kTile);
  }
  __device__ uint32_t x(int stage) const {
    return base_ + offsetof(Shared, x) + stage * (Form::kTokens * kTile);
  }
  __device__ uint32_t decoded(int slot, int half) const {
    return base_ + offsetof(Shared, decoded) + slot * Form::kDecodedBytes +
           half * (Form::kDecodedBytes / 2);
  }
  __device__ uint32_t sums() const { return base_ + offsetof(Shared, sums); }
  __device__ uint32_t w_words() const { return base_ + offsetof(Shared, w_words); }
  __device__ uint32_t x_words() const { return base_ + offsetof(Shared, x_words); }
  __device__ uint32_t w_states() const { return base_ + offsetof(Shared, w_states); }
  __device__ uint32_t x_states() const { return base_ + offsetof(Shared, x_states); }
  __device__ uint32_t bias() const { return base_ + offsetof(Shared, bias); }
  __device__ uint32_t w_full(int s) const { return base_ + offsetof(Shared, w_full) + 8 * s; }
  __device__ uint32_t x_full(int s) const { return base_ + offsetof(Shared, x_full) + 8 * s; }
  __device__ uint32_t empty(int s) const { return base_ + offsetof(Shared, empty) + 8 * s; }
  __device__ uint32_t decoded_full(int s) const {
    return base_ + offsetof(Shared, decoded_full) + 8 * s;
  }
  __device__ uint32_t decoded_empty(int s) const {
    return base_ + offsetof(Shared, decoded_empty) + 8 * s;
  }
  __device__ uint32_t inbox(int slot, int token, int row) const {
    return base_ + offsetof(Shared, inbox) +
           ((slot * Form::kTokens + token) * Form::kShareRows + row) * 4;
  }
  __device__ uint32_t inbox_full() const { return base_ + offsetof(Shared, inbox_full); }
  __device__ uint32_t has_far(int distance) const {
    return base_ + offsetof(Shared, has_far) + 4 * distance;
  }

 private:
  uint32_t base_;
};

struct SmallArgs {
  MultiplyCall call;
  int num_groups;                  // K / 32
  int rank_words;                  // stages of 128 columns for each CTA of a cluster
  int tile_rows;                   // of w, for each cluster: at most the form's
  int x_load_bytes, w_load_bytes;  // of scales: 16, 4 or 1
  bool has_vector_stores;          // outputs can be stored by four
};
static_assert(std::is_trivially_copyable_v<SmallArgs>);

// What a CTA works on.
template <class Form>
struct SmallWork {
  int tile_rows, rank, first_row, num_rows, first_word, num_words;

  __device__ explicit SmallWork(const SmallArgs& args)
      : tile_rows(args.tile_rows),
        rank(blockIdx.x % Form::kRanks),
        first_row(blockIdx.x / Form::kRanks * tile_rows),
        num_rows(static_cast<int>(min(int64_t{tile_rows}, args.call.w.rows - first_row))),
        first_word(rank * args.rank_words),
        num_words(max(0, min(args.rank_words, (args.num_groups + 3) / 4 - first_word))) {}
};

}  // namespace jax_pcie::cuda::mxfp8
