// The kernel of `small.h` on Hopper: streams w once, with w as the tensor cores' register operand.
//
// A tile of w's rows belongs to a cluster whose CTAs (ranks) share out the columns. In a CTA:
//
//   warpgroup 0   decodes the tokens from the ring that the copy engine fills to a second one
//   warpgroup 1   one thread keeps the first ring filled
//   the others    decode w into registers and multiply: w from registers, tokens from the second
//                 ring
//
// At the end each rank gets the others' sums of its share of the rows in its inbox, and adds them
// in rank order. Memory is the bound, so the first ring is all the shared memory that is left. Its
// first round is requested as soon as the scales are: behind 200 KB of w for each SM these would
// arrive last, and nothing can be multiplied without them. The order of columns is that of
// `gemm_sm90.cuh`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../ptx_sm90.cuh"
#include "../wgmma.cuh"
#include "call.h"
#include "decode_sm90.cuh"
#include "gemm_far.cuh"
#include "small_scales.cuh"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kSmallSharedBytes = 227 * 1024;
inline constexpr int kConsumersBarrier = 1, kSegmentBarrier = 2, kRequestsBarrier = 3;
inline constexpr int kBiasThreads = 96;  // of the copying warpgroup, without the copying warp

// The tuning choices of a kernel.
template <int kTokens_, int kRowGroups_, int kColumnGroups_, int kBlocks_, int kRanks_>
struct SmallForm {
  static constexpr int kTokens = kTokens_;              // 8, 16, 32 or 64
  static constexpr int kRowGroups = kRowGroups_;        // consumer warpgroups, along the rows
  static constexpr int kColumnGroups = kColumnGroups_;  // the same, taking turns at stages
  static constexpr int kBlocks = kBlocks_;              // of 64 rows, for each warpgroup: 1 or 2
  static constexpr int kRanks = kRanks_;                // CTAs of a cluster
  static_assert(kRanks >= 2);

  static constexpr int kRows = 64 * kBlocks * kRowGroups;
  static constexpr int kConsumerWarps = 4 * kRowGroups * kColumnGroups;
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

  static constexpr int kShareRows = kRows / kRanks;  // that a rank finishes
  static constexpr int kShareQuads = kTokens * kShareRows / 4;
  static_assert(kShareRows % 16 == 0);
  static constexpr int kInboxBytes = (kRanks - 1) * kTokens * kShareRows * 4;

  static constexpr int kStageBytes = (kRows + kTokens) * kTile;
  static constexpr int kDecodedBytes = kTokens * kTile * 2;
  // A consumer gives a slot back once it has begun with its next one.
  static constexpr int kDecodedStages = std::max(2 + 32 / kTokens, kColumnGroups + 1);
  static constexpr int kMaxStages = 24;
  static constexpr int kOtherBytes =
      kDecodedStages * kDecodedBytes + kInboxBytes + kSegmentWords * (kWPitch + kXPitch) * 4 +
      (2 * kRows + kTokens) * 4 + 8 * (3 * kMaxStages + 2 * kDecodedStages + kRanks + 1);
  // 2 KiB: alignment within and of the whole.
  static constexpr int kStages =
      std::min(kMaxStages, (kSmallSharedBytes - 2048 - kOtherBytes) / kStageBytes);
  static_assert(kStages >= 2);
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
    float sums[Form::kColumnGroups][Form::kTokens][Form::kSumsPitch];  // once the rings have served
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
  int x_load_bytes, w_load_bytes;  // of scales: 16, 4 or 1
  bool has_vector_stores;          // outputs can be stored by four
};
static_assert(std::is_trivially_copyable_v<SmallArgs>);

// What a CTA works on.
template <class Form>
struct SmallWork {
  int rank, first_row, num_rows, first_word, num_words;

  __device__ explicit SmallWork(const SmallArgs& args)
      : rank(blockIdx.x % Form::kRanks),
        first_row(blockIdx.x / Form::kRanks * Form::kRows),
        num_rows(static_cast<int>(min(int64_t{Form::kRows}, args.call.w.rows - first_row))),
        first_word(rank * args.rank_words),
        num_words(max(0, min(args.rank_words, (args.num_groups + 3) / 4 - first_word))) {}
};

// --- The warp that fills the ring

template <class Form>
__device__ __forceinline__ void InitSmallBarriers(const SmallMap<Form>& shared, int num_tokens,
                                                  int lane) {
  static_assert(Form::kStages < 32 && Form::kDecodedStages < 32);
  if (lane < Form::kStages) {
    ptx::MbarrierInit(shared.w_full(lane), 1);
    ptx::MbarrierInit(shared.x_full(lane), 1);
    ptx::MbarrierInit(shared.empty(lane), 4 * Form::kRowGroups + Form::kDecoderWarps);
  }
  if (lane < Form::kDecodedStages) {
    ptx::MbarrierInit(shared.decoded_full(lane), Form::kDecoderWarps);
    ptx::MbarrierInit(shared.decoded_empty(lane), 4 * Form::kRowGroups);
  }
  if (lane == 31) {
    ptx::MbarrierInit(shared.inbox_full(), 1);
    ptx::MbarrierArriveExpectTx(shared.inbox_full(),
                                (Form::kRanks - 1) * (num_tokens * Form::kShareRows + 1) * 4);
  }
  ptx::FenceMbarrierInit();
  ptx::FenceProxyAsync();
  __syncwarp();
}

// Tokens and w arrive separately: tokens come from L2, and are decoded while w is on its way.
template <class Form>
__device__ __forceinline__ void RequestStage(const SmallMap<Form>& shared,
                                             const SmallWork<Form>& work, const CUtensorMap* x_map,
                                             const CUtensorMap* w_map, int k, int slot) {
  const int column = (work.first_word + k) * kTile;
  ptx::MbarrierArriveExpectTx(shared.x_full(slot), Form::kTokens * kTile);
  ptx::CopyTensor2d(shared.x(slot), x_map, column, 0, shared.x_full(slot));
  ptx::MbarrierArriveExpectTx(shared.w_full(slot), Form::kRows * kTile);
  ptx::CopyTensor2d(shared.w(slot), w_map, column, work.first_row, shared.w_full(slot));
}

template <class Form>
__device__ __forceinline__ void RequestStages(const SmallMap<Form>& shared,
                                              const SmallWork<Form>& work, const CUtensorMap* x_map,
                                              const CUtensorMap* w_map, int begin, int end) {
  RingPosition<Form::kStages> stage;
  for (int k = 0; k < begin; ++k) stage.Advance();
#pragma unroll 1
  for (int k = begin; k < end; ++k, stage.Advance()) {
    ptx::MbarrierWait(shared.empty(stage.index()), stage.parity() ^ 1);
    RequestStage(shared, work, x_map, w_map, k, stage.index());
  }
}

// All of the CTA waits until these have been requested.
template <class Form>
__device__ __forceinline__ void RequestFirstStages(const SmallMap<Form>& shared,
                                                   const SmallWork<Form>& work,
                                                   const CUtensorMap* x_map,
                                                   const CUtensorMap* w_map) {
  RequestStages(shared, work, x_map, w_map, 0, min(work.num_words, Form::kFirstStages));
}

template <class Form>
__device__ __forceinline__ void RequestLaterStages(const SmallMap<Form>& shared,
                                                   const SmallWork<Form>& work,
                                                   const CUtensorMap* x_map,
                                                   const CUtensorMap* w_map) {
  RequestStages(shared, work, x_map, w_map, Form::kFirstStages, work.num_words);
}

// --- Scales

// The decoders have the tokens', the consumers those of w.
template <class Form>
using TokenScales =
    WarpScales<Form::kTokens / 8 / Form::kXScaleWarps, Form::kSegmentWords, Form::kXPitch>;
template <class Form>
using WeightScales =
    WarpScales<Form::kRows / 8 / Form::kWScaleWarps, Form::kSegmentWords, Form::kWPitch>;

template <class Form, class Visitor>
__device__ __forceinline__ void WithTokenScales(const SmallMap<Form>& shared, const SmallArgs& args,
                                                const SmallWork<Form>& work, int warp,
                                                Visitor&& visit) {
  const int row = warp * (Form::kTokens / Form::kXScaleWarps);
  if (row >= Form::kTokens) return;
  const ScaleSource source{args.call.x, args.num_groups, work.first_word, work.num_words,
                           args.x_load_bytes};
  visit(TokenScales<Form>(source, 0, row, shared.x_words(), shared.x_states()));
}

template <class Form, class Visitor>
__device__ __forceinline__ void WithWeightScales(const SmallMap<Form>& shared,
                                                 const SmallArgs& args, const SmallWork<Form>& work,
                                                 int warp, Visitor&& visit) {
  const int row = warp * (Form::kRows / Form::kWScaleWarps);
  if (row >= Form::kRows) return;
  const ScaleSource source{args.call.w, args.num_groups, work.first_word, work.num_words,
                           args.w_load_bytes};
  visit(WeightScales<Form>(source, work.first_row, row, shared.w_words(), shared.w_states()));
}

// Returns this thread's part of the rows' states.
template <class Form>
__device__ __forceinline__ uint32_t PrepareStates(const SmallMap<Form>& shared,
                                                  const SmallArgs& args,
                                                  const SmallWork<Form>& work) {
  const int warp = threadIdx.x / 32;
  uint32_t states = 0;
  auto prepare = [&](auto scales) {
    states = scales.Prepare([] {
      ptx::BarrierArrive(kRequestsBarrier, Form::kRequesters);  // w may follow
    });
  };
  if (warp < 4) {
    WithTokenScales(shared, args, work, warp, prepare);
  } else if (warp >= 8) {
    WithWeightScales(shared, args, work, warp - 8, prepare);
  }
  return states;
}

// --- The bias

// By the threads that have nothing else to do; late, as it is needed last.
template <class Form>
__device__ __forceinline__ void PrepareBias(const SmallMap<Form>& shared, const SmallArgs& args,
                                            const SmallWork<Form>& work, int thread) {
  if (args.call.bias != nullptr) {
#pragma unroll
    for (int row = thread; row < Form::kRows; row += kBiasThreads) {
      const float bias = row < work.num_rows ? args.call.bias[work.first_row + row] : 0;
      ptx::StoreShared32(shared.bias() + row * 4, __float_as_uint(bias));
    }
  }
  ptx::BarrierArrive(kConsumersBarrier, Form::kConsumers + kBiasThreads);
}

// --- 16-bit values: the same numbers in both loops.

template <class Decoder>
struct SmallDecoder {
  // The multiplier twice, from the exponent field that `RowState` explains.
  __device__ static uint32_t Multiplier(uint32_t exponent) {
    if constexpr (Decoder::kIsFallback) {
      return exponent == kNanScale ? 0x7fff7fff : exponent * 0x00800080;
    } else {
      constexpr uint32_t kField = kReferenceExponent - kReferenceField;
      return exponent * 0x04000400u - kField * 0x04000400u;
    }
  }

  using Type = std::conditional_t<Decoder::kIsFallback, ptx::WgmmaBf16, ptx::WgmmaF16>;
};

// --- The decoders

template <int kWords>
__device__ __forceinline__ void LoadSharedWords(uint32_t (&words)[kWords], uint32_t address) {
  if constexpr (kWords == 4) {
    const uint4 v = ptx::LoadShared128(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = ptx::LoadShared64(address);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = ptx::LoadShared32(address);
  }
}

template <class Form, class Decoder>
__device__ __forceinline__ void DecodeTokens(const SmallMap<Form>& shared, const SmallArgs& args,
                                             const SmallWork<Form>& work, int thread) {
  constexpr int kSteps = Form::kDecodeSteps;
  // Token `row` and the k16 steps from `step` on.
  const uint32_t row = ptx::Kept(thread % Form::kTokens);
  const int step = thread / Form::kTokens * kSteps;
  const bool is_active = thread < 32 * Form::kDecoderWarps;
  const int half = step / 4;
  uint32_t from[4], to[kSteps];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    from[q] = ptx::Kept(row * kTile + ((2 * q + half) ^ (row % 8)) * 16 + step % 4 * 4);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    to[i] = ptx::Kept(row * kTile + ((2 * (step + i)) % 8 ^ (row % 8)) * 16);
  }
  const uint32_t words = ptx::Kept(shared.x_words() + row * 4);
  RingPosition<Form::kStages> stage;
  RingPosition<Form::kDecodedStages> out;
#pragma unroll 1
  for (int segment = 0; segment < work.num_words; segment += Form::kSegmentWords) {
    if (segment > 0) {
      ptx::BarrierSync(kSegmentBarrier, 128 + Form::kConsumers);
      WithTokenScales(shared, args, work, thread / 32,
                      [&](auto scales) { scales.StoreSegment(segment); });
      ptx::BarrierSync(kSegmentBarrier, 128 + Form::kConsumers);
    }
    if (!is_active) continue;
    const int num_stages = min(Form::kSegmentWords, work.num_words - segment);
#pragma unroll 1
    for (int k = 0; k < num_stages; ++k, stage.Advance(), out.Advance()) {
      const uint32_t word = ptx::LoadShared32(words + k * (Form::kXPitch * 4));
      ptx::MbarrierWait(shared.x_full(stage.index()), stage.parity());
      uint32_t groups[4][kSteps];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        LoadSharedWords(groups[q], shared.x(stage.index()) + from[q]);
      }
      uint2 decoded[kSteps][4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t multiplier = SmallDecoder<Decoder>::Multiplier(word >> (8 * q) & 0xff);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          decoded[i][q] = Decoded<Decoder>(groups[q][i], multiplier);
        }
      }
      ptx::MbarrierWait(shared.decoded_empty(out.index()), out.parity() ^ 1);
      const uint32_t slot = shared.decoded(out.index(), half);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const auto& d = decoded[i];
        ptx::StoreShared128(slot + to[i], {d[0].x, d[1].x, d[2].x, d[3].x});
        ptx::StoreShared128(slot + (to[i] ^ 16), {d[0].y, d[1].y, d[2].y, d[3].y});
      }
      ptx::FenceProxyAsync();
      __syncwarp();
      if (thread % 32 == 0) {
        ptx::MbarrierArrive(shared.decoded_full(out.index()));
        ptx::MbarrierArrive(shared.empty(stage.index()));
      }
    }
  }
}

// --- The consumers

// Leaves the sums of this thread's rows, scaled back, in shared memory.
template <class Form, class Decoder>
__device__ __forceinline__ void Multiply(const SmallMap<Form>& shared, const SmallArgs& args,
                                         const SmallWork<Form>& work, int thread) {
  constexpr int kBlocks = Form::kBlocks, kThreadRows = 2 * kBlocks;
  constexpr int kBatchSteps = 4 / kBlocks;  // k16 steps between two waits: four products
  constexpr int kTurns = Form::kColumnGroups;
  const int group = thread / 128;
  const int turn = group / Form::kRowGroups;
  const uint32_t lane = ptx::Kept(thread % 32);
  const uint32_t q = lane % 4;
  // Row i of this thread: block i / 2, upper or lower half of its 16.
  const uint32_t first_row =
      ptx::Kept(thread / 32 % 4 * 16 + group % Form::kRowGroups * (64 * kBlocks) + lane / 4);
  auto row_of = [&](int i) { return i / 2 * 64 + i % 2 * 8; };  // from the first
  const uint32_t chunk = ptx::Kept(first_row * kTile + ((2 * q) ^ (first_row % 8)) * 16);
  const uint32_t first_field =
      ptx::Kept(shared.w_words() + first_row * 4 + q + turn * (Form::kWPitch * 4));

  float sums[kBlocks][Form::kTokens / 2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < Form::kTokens / 2; ++i) sums[b][i] = 0;
  }
  RingPosition<Form::kStages> stage;
  RingPosition<Form::kDecodedStages> in;
  auto advance = [](auto& position, int count) {
    for (int i = 0; i < count; ++i) position.Advance();
  };
  advance(stage, turn);
  advance(in, turn);
  int last_in = -1;
#pragma unroll 1
  for (int segment = 0; segment < work.num_words; segment += Form::kSegmentWords) {
    if (segment > 0) {
      ptx::BarrierSync(kSegmentBarrier, 128 + Form::kConsumers);
      WithWeightScales(shared, args, work, thread / 32,
                       [&](auto scales) { scales.StoreSegment(segment); });
      ptx::BarrierSync(kSegmentBarrier, 128 + Form::kConsumers);
    }
    const int num_stages = min(Form::kSegmentWords, work.num_words - segment);
    uint32_t multipliers[kThreadRows];
    uint4 chunks[kThreadRows];  // a thread's bytes of half a stage, by row
    uint32_t fields = first_field;
    auto load_multipliers = [&] {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        multipliers[i] =
            SmallDecoder<Decoder>::Multiplier(ptx::LoadShared8(fields + row_of(i) * 4));
      }
      fields += kTurns * (Form::kWPitch * 4);
      ptx::MbarrierWait(shared.w_full(stage.index()), stage.parity());
    };
    auto load_chunks = [&](int half) {
      const uint32_t w = shared.w(stage.index()) + (chunk ^ (half * 16));
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) chunks[i] = ptx::LoadShared128(w + row_of(i) * kTile);
    };
    if (turn < num_stages) {
      load_multipliers();
      load_chunks(0);
    }
#pragma unroll 1
    for (int k = turn; k < num_stages; k += kTurns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int batch = 0; batch < kBlocks; ++batch) {
          const bool is_first = half == 0 && batch == 0, is_last = batch == kBlocks - 1;
          uint32_t fragments[kBatchSteps][kBlocks][4];
#pragma unroll
          for (int step = 0; step < kBatchSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
              const uint2 values =
                  Decoded<Decoder>((&chunks[i].x)[kBatchSteps * batch + step], multipliers[i]);
              fragments[step][i / 2][i % 2] = values.x;
              fragments[step][i / 2][i % 2 + 2] = values.y;
            }
          }
          if (is_first) ptx::MbarrierWait(shared.decoded_full(in.index()), in.parity());
          ptx::WgmmaFence();
#pragma unroll
          for (int step = 0; step < kBatchSteps; ++step) {
            const uint64_t tokens =
                DescribeDecoded(shared.decoded(in.index(), half), kBatchSteps * batch + step);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
              ptx::Wgmma(sums[b], fragments[step][b], tokens,
                         typename SmallDecoder<Decoder>::Type{});
            }
          }
          ptx::WgmmaCommitGroup();
          if (is_last && half == 0) {
            load_chunks(1);
          } else if (is_last) {
            // Released after the last use of what was loaded, not after the loads were issued.
            __syncwarp();
            if (lane == 0) ptx::MbarrierArrive(shared.empty(stage.index()));
            advance(stage, kTurns);
            if (k + kTurns < num_stages) {
              load_multipliers();
              load_chunks(0);
            }
          }
          ptx::WgmmaWaitGroup<1>();
          if (is_first) {  // the last batch of the stage before has just ended
            if (last_in >= 0 && lane == 0) ptx::MbarrierArrive(shared.decoded_empty(last_in));
            last_in = in.index();
          }
        }
      }
      advance(in, kTurns);
    }
    ptx::WgmmaWaitGroup<0>();
    if (last_in >= 0 && lane == 0) ptx::MbarrierArrive(shared.decoded_empty(last_in));
    last_in = -1;
  }

  float factors[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    factors[i] = FactorOf(ptx::LoadShared32(shared.w_states() + (first_row + row_of(i)) * 4));
  }
  uint2 states[Form::kTokens / 8];  // of tokens 2 q and the next
#pragma unroll
  for (int j = 0; j < Form::kTokens / 8; ++j) {
    states[j] = ptx::LoadShared64(shared.x_states() + (2 * q + j * 8) * 4);
  }
  // The rings have served, and the bias is there.
  ptx::BarrierSync(kConsumersBarrier, Form::kConsumers + kBiasThreads);
  const uint32_t to =
      shared.sums() + ((turn * Form::kTokens + 2 * q) * Form::kSumsPitch + first_row) * 4;
#pragma unroll
  for (int j = 0; j < Form::kTokens / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = j * 8 + i;  // from 2 q
      const float factor = FactorOf(i == 0 ? states[j].x : states[j].y);
#pragma unroll
      for (int h = 0; h < kThreadRows; ++h) {
        // Both factors first: a power of two that is exact even where it is not normal.
        const float sum = sums[h / 2][4 * j + h % 2 * 2 + i] * (factors[h] * factor);
        ptx::StoreShared32(to + (token * Form::kSumsPitch + row_of(h)) * 4, __float_as_uint(sum));
      }
    }
  }
  ptx::BarrierSync(kConsumersBarrier, Form::kConsumers);
}

// --- The end

template <class Output>
__device__ __forceinline__ void StoreFour(const SmallArgs& args, int64_t index,
                                          const float (&values)[4], int count) {
  Output* const y = static_cast<Output*>(args.call.y) + index;
  struct alignas(4 * sizeof(Output)) Four {
    Output elements[4];
  };
  Four four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.elements[i] = Rounded<Output>(values[i]);
  if (args.has_vector_stores && count >= 4) {
    *reinterpret_cast<Four*>(y) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) y[i] = four.elements[i];
    }
  }
}

__device__ __forceinline__ float4 AsFloats(uint4 v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

__device__ __forceinline__ uint4 AsBits(float4 v) {
  return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

__device__ __forceinline__ float4 Sum(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// Whether any rank has found the row that this state belongs to far.
template <class Form>
__device__ __forceinline__ bool IsFar(uint32_t state) {
  uint32_t all = 0;
  for (int rank = 0; rank < Form::kRanks; ++rank) all |= ptx::LoadCluster32(ptx::Mapa(state, rank));
  return all & RowState::kFar;
}

// The sums of a CTA for four rows: turns in ascending order.
template <class Form>
__device__ __forceinline__ float4 SumTurns(const SmallMap<Form>& shared, int token, int row) {
  const uint32_t from = shared.sums() + (token * Form::kSumsPitch + row) * 4;
  uint4 parts[Form::kColumnGroups];
#pragma unroll
  for (int turn = 0; turn < Form::kColumnGroups; ++turn) {
    parts[turn] = ptx::LoadShared128(from + turn * (Form::kTokens * Form::kSumsPitch * 4));
  }
  float4 sum = AsFloats(parts[0]);
#pragma unroll
  for (int turn = 1; turn < Form::kColumnGroups; ++turn) sum = Sum(sum, AsFloats(parts[turn]));
  return sum;
}

// Each rank sends the others its sums of their shares of the rows. Here and below, all loads are
// issued before the first is used: also those of tokens that are not wanted.
template <class Form>
__device__ __forceinline__ void SendSums(const SmallMap<Form>& shared, const SmallWork<Form>& work,
                                         int num_tokens, int thread) {
  constexpr int kRowQuads = Form::kShareRows / 4;
  constexpr int kQuads = (Form::kRanks - 1) * Form::kShareQuads;
  constexpr int kRounds = (kQuads + Form::kConsumers - 1) / Form::kConsumers;
  auto slot_of = [&](int round) { return (thread + round * Form::kConsumers) / Form::kShareQuads; };
  auto rank_of = [&](int slot) { return (work.rank + 1 + slot) % Form::kRanks; };
  auto token_of = [&](int round) {
    return (thread + round * Form::kConsumers) / kRowQuads % Form::kTokens;
  };
  const int row = thread % kRowQuads * 4;
  float4 sums[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    sums[round] =
        SumTurns(shared, token_of(round), rank_of(slot_of(round)) * Form::kShareRows + row);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int token = token_of(round), slot = slot_of(round);
    if (slot >= Form::kRanks - 1 || token >= num_tokens) continue;
    ptx::StoreAsync128(ptx::Mapa(shared.inbox(slot, token, row), rank_of(slot)),
                       AsBits(sums[round]), ptx::Mapa(shared.inbox_full(), rank_of(slot)));
  }
  if (thread < Form::kRanks - 1) {
    const int rank = rank_of(thread);
    ptx::StoreAsync32(ptx::Mapa(shared.has_far(1 + thread), rank),
                      ptx::LoadShared32(shared.has_far(0)), ptx::Mapa(shared.inbox_full(), rank));
  }
}

// Each rank finishes its share of the cluster's rows, four at a time: ranks in ascending order,
// then the bias, then one rounding. By the consumers.
template <class Form>
__device__ __forceinline__ void FinishRows(const SmallMap<Form>& shared, const SmallArgs& args,
                                           const SmallWork<Form>& work, int thread) {
  constexpr int kRowQuads = Form::kShareRows / 4;
  constexpr int kRounds = (Form::kShareQuads + Form::kConsumers - 1) / Form::kConsumers;
  static_assert(Form::kConsumers % kRowQuads == 0);
  const int num_tokens = static_cast<int>(args.call.x.rows);
  SendSums(shared, work, num_tokens, thread);

  // Those who have sent less begin.
  constexpr int kShift = (Form::kRanks - 1) * Form::kShareQuads % Form::kConsumers;
  const int first_quad = (thread + Form::kConsumers - kShift) % Form::kConsumers;
  auto token_of = [&](int round) { return (first_quad + round * Form::kConsumers) / kRowQuads; };
  const int share_row = first_quad % kRowQuads * 4;
  const int row = work.rank * Form::kShareRows + share_row;
  const int count = work.num_rows - row;
  float4 own[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    own[round] = SumTurns(shared, token_of(round) % Form::kTokens, row);
  }
  const uint4 bias = ptx::LoadShared128(shared.bias() + row * 4);

  ptx::MbarrierWaitCluster(shared.inbox_full(), 0);
  uint4 parts[kRounds][Form::kRanks - 1];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int slot = 0; slot < Form::kRanks - 1; ++slot) {
      parts[round][slot] =
          ptx::LoadShared128(shared.inbox(slot, token_of(round) % Form::kTokens, share_row));
    }
  }
  uint32_t has_far = 0;
#pragma unroll
  for (int i = 0; i < Form::kRanks; ++i) has_far |= ptx::LoadShared32(shared.has_far(i));
  if (has_far) {  // all ranks know that; nobody leaves while others read its states
    ptx::BarrierClusterArrive();
    ptx::BarrierClusterWait();
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int token = token_of(round);
    if (count <= 0 || token >= num_tokens) continue;
    float4 sum{};
#pragma unroll
    for (int rank = 0; rank < Form::kRanks; ++rank) {
      float4 part = own[round];
#pragma unroll
      for (int slot = 0; slot < Form::kRanks - 1; ++slot) {
        if ((rank + 1 + slot) % Form::kRanks == work.rank) part = AsFloats(parts[round][slot]);
      }
      sum = rank == 0 ? part : Sum(sum, part);
    }
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (has_far) {
      const bool is_far_token = IsFar<Form>(shared.x_states() + token * 4);
#pragma unroll 1
      for (int i = 0; i < min(count, 4); ++i) {
        if (!is_far_token && !IsFar<Form>(shared.w_states() + (row + i) * 4)) continue;
        const float value = FarProduct(args.call, token, work.first_row + row + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = i == j ? value : values[j];
      }
    }
    if (args.call.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = __fadd_rn(values[i], __uint_as_float((&bias.x)[i]));
      }
    }
    const int64_t index = token * args.call.w.rows + work.first_row + row;
    switch (args.call.output) {
      case OutputType::kBf16:
        StoreFour<__nv_bfloat16>(args, index, values, count);
        break;
      case OutputType::kF16:
        StoreFour<__half>(args, index, values, count);
        break;
      case OutputType::kF32:
        StoreFour<float>(args, index, values, count);
        break;
    }
  }
  if (has_far) {
    ptx::BarrierClusterArriveRelaxed();  // all that was read has been used
    ptx::BarrierClusterWait();
  }
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    SmallKernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap w_map, const __grid_constant__ SmallArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t unaligned[];
  const SmallMap<Form> shared(ptx::Kept((ptx::SharedAddress(unaligned) + 1023) / 1024 * 1024));
  const SmallWork<Form> work(args);
  uint32_t states = 0;
  if (threadIdx.x / 32 == 4) {
    InitSmallBarriers(shared, static_cast<int>(args.call.x.rows), threadIdx.x % 32);
    ptx::BarrierSync(kRequestsBarrier, Form::kRequesters);
    if (threadIdx.x == 128) RequestFirstStages(shared, work, &x_map, &w_map);
    __syncwarp();
  } else {
    states = PrepareStates(shared, args, work);
  }
  const bool has_wide = __syncthreads_or(states & RowState::kWide);
  const bool has_far = has_wide && __syncthreads_or(states & RowState::kFar);
  // Pairs with the waits below: until then the others may not have begun.
  ptx::BarrierClusterArriveRelaxed();

  // Registers of a lane in all: 4 x 128 with two consumer warpgroups, 6 x 80 with four. Waits for
  // the decoders cost more than what the consumers lack.
  constexpr bool kIsNarrow = Form::kConsumers > 256;
  if (threadIdx.x < 128) {
    ptx::SetMaxNRegDec<kIsNarrow ? 72 : 88>();
    if (has_wide) {
      DecodeTokens<Form, DecodeBf16>(shared, args, work, threadIdx.x);
    } else {
      DecodeTokens<Form, DecodeF16>(shared, args, work, threadIdx.x);
    }
  } else if (threadIdx.x < 256) {
    ptx::SetMaxNRegDec<24>();
    if (threadIdx.x == 128) RequestLaterStages(shared, work, &x_map, &w_map);
    if (threadIdx.x >= 256 - kBiasThreads) {
      PrepareBias(shared, args, work, threadIdx.x - (256 - kBiasThreads));
    }
  } else {
    ptx::SetMaxNRegInc<kIsNarrow ? 96 : 200>();
    const int thread = threadIdx.x - 256;
    if (thread == 0) ptx::StoreShared32(shared.has_far(0), has_far);
    if (has_wide) {
      Multiply<Form, DecodeBf16>(shared, args, work, thread);
    } else {
      Multiply<Form, DecodeF16>(shared, args, work, thread);
    }
    ptx::BarrierClusterWait();
    FinishRows(shared, args, work, thread);
    return;
  }
  ptx::BarrierClusterWait();
#elif defined(__CUDA_ARCH__)
  __trap();  // built for another architecture: an error, not an array that nobody wrote
#endif
}

}  // namespace jax_pcie::cuda::mxfp8
