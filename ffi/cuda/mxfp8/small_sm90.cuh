// The kernel of `small.h` on Hopper: streams w once, with w as the tensor cores' register operand.
//
// A tile of w's rows belongs to a cluster whose CTAs (ranks) share out the columns. In a CTA:
//
//   warpgroup 0   decodes the tokens from the ring that the copy engine fills to a second one
//   warpgroup 1   one thread keeps the first ring filled
//   the others    decode w into registers and multiply: w from registers, tokens from the second
//                 ring
//
// At the end the ranks' partial sums meet through distributed shared memory, in rank order. Memory
// is the bound, so the first ring is all the shared memory that is left, and its first round is
// requested before anything else happens. The order of columns is that of `gemm_sm90.cuh`.
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
inline constexpr int kConsumersBarrier = 1, kSegmentBarrier = 2;

// The tuning choices of a kernel.
template <int kTokens_, int kRowGroups_, int kColumnGroups_, int kBlocks_, int kRanks_>
struct SmallForm {
  static constexpr int kTokens = kTokens_;              // 8, 16, 32 or 64
  static constexpr int kRowGroups = kRowGroups_;        // consumer warpgroups, along the rows
  static constexpr int kColumnGroups = kColumnGroups_;  // the same, taking turns at stages
  static constexpr int kBlocks = kBlocks_;              // of 64 rows, for each warpgroup: 1 or 2
  static constexpr int kRanks = kRanks_;                // CTAs of a cluster

  static constexpr int kRows = 64 * kBlocks * kRowGroups;
  static constexpr int kConsumerWarps = 4 * kRowGroups * kColumnGroups;
  static constexpr int kConsumers = 32 * kConsumerWarps;
  static constexpr int kThreads = 256 + kConsumers;

  // The decoders share out a row's eight k16 steps.
  static constexpr int kDecodeSteps = std::max(1, kTokens / 16);
  static constexpr int kDecoderWarps = kTokens * 8 / kDecodeSteps / 32;

  // Scale words are held for so many stages; the columns beyond are further segments.
  static constexpr int kSegmentWords = 4096 / kRows;
  // Words are written four rows of a column by eight: those then lie in different banks.
  static constexpr int Pitch(int rows) { return (rows + 23) / 32 * 32 + 8; }
  static constexpr int kWPitch = Pitch(kRows), kXPitch = Pitch(kTokens);

  static constexpr int kStageBytes = (kRows + kTokens) * kTile;
  static constexpr int kDecodedBytes = kTokens * kTile * 2;
  // A consumer gives a slot back once it has begun with its next one.
  static constexpr int kDecodedStages = std::max(kTokens == 64 ? 2 : 3, kColumnGroups + 1);
  static constexpr int kMaxStages = 24;
  static constexpr int kOtherBytes = kDecodedStages * kDecodedBytes +
                                     kSegmentWords * (kWPitch + kXPitch) * 4 +
                                     (2 * kRows + kTokens) * 4 + 8 * (3 * kMaxStages + 9);
  // 2 KiB: alignment within and of the whole.
  static constexpr int kStages =
      std::min(kMaxStages, (kSmallSharedBytes - 2048 - kOtherBytes) / kStageBytes);
  static_assert(kStages >= 2);

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
  uint32_t w_words[Form::kSegmentWords][Form::kWPitch];
  uint32_t x_words[Form::kSegmentWords][Form::kXPitch];
  uint32_t w_states[Form::kRows];
  uint32_t x_states[Form::kTokens];
  float bias[Form::kRows];
  uint64_t w_full[Form::kStages], x_full[Form::kStages], empty[Form::kStages];
  uint64_t decoded_full[Form::kDecodedStages], decoded_empty[Form::kDecodedStages];
  uint32_t has_far;
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
  __device__ uint32_t has_far() const { return base_ + offsetof(Shared, has_far); }

 private:
  uint32_t base_;
};

struct SmallArgs {
  MultiplyCall call;
  int num_groups;                   // K / 32
  int rank_words;                   // stages of 128 columns for each CTA of a cluster
  bool x_is_aligned, w_is_aligned;  // scale bytes can be loaded by four
  bool has_vector_stores;           // so can outputs be stored
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

// --- The thread that fills the ring

template <class Form>
__device__ __forceinline__ void InitSmallBarriers(const SmallMap<Form>& shared) {
  for (int s = 0; s < Form::kStages; ++s) {
    ptx::MbarrierInit(shared.w_full(s), 1);
    ptx::MbarrierInit(shared.x_full(s), 1);
    ptx::MbarrierInit(shared.empty(s), 4 * Form::kRowGroups + Form::kDecoderWarps);
  }
  for (int s = 0; s < Form::kDecodedStages; ++s) {
    ptx::MbarrierInit(shared.decoded_full(s), Form::kDecoderWarps);
    ptx::MbarrierInit(shared.decoded_empty(s), 4 * Form::kRowGroups);
  }
  ptx::FenceMbarrierInit();
  ptx::FenceProxyAsync();
}

// Tokens and w arrive separately: tokens come from L2, and are decoded while w is on its way.
template <class Form>
__device__ __forceinline__ void RequestStage(const SmallMap<Form>& shared,
                                             const SmallWork<Form>& work, const CUtensorMap* x_map,
                                             const CUtensorMap* w_map, int k, int slot) {
  const int column = (work.first_word + k) * kTile;
  ptx::MbarrierArriveExpectTx(shared.w_full(slot), Form::kRows * kTile);
  ptx::CopyTensor2d(shared.w(slot), w_map, column, work.first_row, shared.w_full(slot));
  ptx::MbarrierArriveExpectTx(shared.x_full(slot), Form::kTokens * kTile);
  ptx::CopyTensor2d(shared.x(slot), x_map, column, 0, shared.x_full(slot));
}

template <class Form>
__device__ __forceinline__ void RequestFirstStages(const SmallMap<Form>& shared,
                                                   const SmallWork<Form>& work,
                                                   const CUtensorMap* x_map,
                                                   const CUtensorMap* w_map) {
#pragma unroll 1
  for (int k = 0; k < min(work.num_words, Form::kStages); ++k) {
    RequestStage(shared, work, x_map, w_map, k, k);
  }
}

template <class Form>
__device__ __forceinline__ void RequestLaterStages(const SmallMap<Form>& shared,
                                                   const SmallWork<Form>& work,
                                                   const CUtensorMap* x_map,
                                                   const CUtensorMap* w_map) {
  RingPosition<Form::kStages> stage;
#pragma unroll 1
  for (int k = Form::kStages; k < work.num_words; ++k, stage.Advance()) {
    ptx::MbarrierWait(shared.empty(stage.index()), stage.parity());
    RequestStage(shared, work, x_map, w_map, k, stage.index());
  }
}

// --- Scales

// The decoders have the tokens', the consumers those of w.
template <class Form>
using TokenScales = WarpScales<(Form::kTokens + 31) / 32, Form::kSegmentWords, Form::kXPitch>;
template <class Form>
using WeightScales = WarpScales<Form::kRows / 8 / std::min(Form::kRows / 8, Form::kConsumerWarps),
                                Form::kSegmentWords, Form::kWPitch>;

template <class Form, class Visitor>
__device__ __forceinline__ void WithTokenScales(const SmallMap<Form>& shared, const SmallArgs& args,
                                                const SmallWork<Form>& work, int warp,
                                                Visitor&& visit) {
  const int row = warp * ((Form::kTokens + 31) / 32) * 8;
  if (row >= Form::kTokens) return;
  const ScaleSource source{args.call.x, args.num_groups, work.first_word, work.num_words,
                           args.x_is_aligned};
  visit(TokenScales<Form>(source, 0, row, shared.x_words(), shared.x_states()));
}

template <class Form, class Visitor>
__device__ __forceinline__ void WithWeightScales(const SmallMap<Form>& shared,
                                                 const SmallArgs& args, const SmallWork<Form>& work,
                                                 int warp, Visitor&& visit) {
  const int row = warp * (Form::kRows / std::min(Form::kRows / 8, Form::kConsumerWarps));
  if (row >= Form::kRows) return;
  const ScaleSource source{args.call.w, args.num_groups, work.first_word, work.num_words,
                           args.w_is_aligned};
  visit(WeightScales<Form>(source, work.first_row, row, shared.w_words(), shared.w_states()));
}

// By all of the CTA; returns this thread's part of the rows' states.
template <class Form>
__device__ __forceinline__ uint32_t PrepareStates(const SmallMap<Form>& shared,
                                                  const SmallArgs& args,
                                                  const SmallWork<Form>& work) {
  const int warp = threadIdx.x / 32;
  uint32_t states = 0;
  if (warp < 4) {
    WithTokenScales(shared, args, work, warp, [&](auto scales) { states = scales.Prepare(); });
  } else if (warp >= 8) {
    WithWeightScales(shared, args, work, warp - 8, [&](auto scales) { states = scales.Prepare(); });
  } else if (warp > 4 && args.call.bias != nullptr) {
    const int row = threadIdx.x - 5 * 32;
    constexpr int kLoads = (Form::kRows + 95) / 96;
    float bias[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      bias[i] = row + i * 96 < work.num_rows ? args.call.bias[work.first_row + row + i * 96] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * 96 < Form::kRows) {
        ptx::StoreShared32(shared.bias() + (row + i * 96) * 4, __float_as_uint(bias[i]));
      }
    }
  }
  return states;
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
  ptx::BarrierSync(kConsumersBarrier, Form::kConsumers);  // the rings have served
  const uint32_t to =
      shared.sums() + ((turn * Form::kTokens + 2 * q) * Form::kSumsPitch + first_row) * 4;
#pragma unroll
  for (int j = 0; j < Form::kTokens / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = j * 8 + i;  // from 2 q
      const float factor = FactorOf(ptx::LoadShared32(shared.x_states() + (2 * q + token) * 4));
#pragma unroll
      for (int h = 0; h < kThreadRows; ++h) {
        // Both factors first: a power of two that is exact even where it is not normal.
        const float sum = sums[h / 2][4 * j + h % 2 * 2 + i] * (factors[h] * factor);
        ptx::StoreShared32(to + (token * Form::kSumsPitch + row_of(h)) * 4, __float_as_uint(sum));
      }
    }
  }
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

// Whether any rank has found the row that this state belongs to far.
template <class Form>
__device__ __forceinline__ bool IsFar(uint32_t state) {
  uint32_t all = 0;
  for (int rank = 0; rank < Form::kRanks; ++rank) all |= ptx::LoadCluster32(ptx::Mapa(state, rank));
  return all & RowState::kFar;
}

// Each rank finishes its share of the cluster's rows, four at a time: ranks and turns in ascending
// order, then the bias, then one rounding. By the consumers.
template <class Form>
__device__ __forceinline__ void FinishRows(const SmallMap<Form>& shared, const SmallArgs& args,
                                           const SmallWork<Form>& work, int thread) {
  constexpr int kQuads = Form::kRows / Form::kRanks / 4;
  constexpr int kRounds = (Form::kTokens * kQuads + Form::kConsumers - 1) / Form::kConsumers;
  constexpr int kParts = Form::kRanks * Form::kColumnGroups;
  static_assert(kQuads >= 1);
  const int num_tokens = static_cast<int>(args.call.x.rows);
  const int64_t num_outputs = args.call.w.rows;
  static_assert(Form::kConsumers % kQuads == 0);
  auto token_of = [&](int round) { return (thread + round * Form::kConsumers) / kQuads; };
  const int row = work.rank * (4 * kQuads) + thread % kQuads * 4;
  const int count = work.num_rows - row;
  if (count <= 0 || token_of(0) >= num_tokens) return;
  uint32_t has_far = 0;
#pragma unroll
  for (int rank = 0; rank < Form::kRanks; ++rank) {
    has_far |= ptx::LoadCluster32(ptx::Mapa(shared.has_far(), rank));
  }
  uint4 parts[kRounds][kParts];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (token_of(round) >= num_tokens) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int turn = part % Form::kColumnGroups;
      const uint32_t address =
          shared.sums() + ((turn * Form::kTokens + token_of(round)) * Form::kSumsPitch + row) * 4;
      if constexpr (Form::kRanks == 1) {
        parts[round][part] = ptx::LoadShared128(address);
      } else {
        parts[round][part] = ptx::LoadCluster128(ptx::Mapa(address, part / Form::kColumnGroups));
      }
    }
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int token = token_of(round);
    if (token >= num_tokens) continue;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __uint_as_float((&parts[round][0].x)[i]);
#pragma unroll
      for (int part = 1; part < kParts; ++part) {
        values[i] = __fadd_rn(values[i], __uint_as_float((&parts[round][part].x)[i]));
      }
    }
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
      const uint4 bias = ptx::LoadShared128(shared.bias() + row * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = __fadd_rn(values[i], __uint_as_float((&bias.x)[i]));
      }
    }
    const int64_t index = token * num_outputs + work.first_row + row;
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
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    SmallKernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap w_map, const __grid_constant__ SmallArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t unaligned[];
  const SmallMap<Form> shared(ptx::Kept((ptx::SharedAddress(unaligned) + 1023) / 1024 * 1024));
  const SmallWork<Form> work(args);
  if (threadIdx.x == 128) {
    InitSmallBarriers(shared);
    RequestFirstStages(shared, work, &x_map, &w_map);
  }
  const uint32_t states = PrepareStates(shared, args, work);
  const bool has_wide = __syncthreads_or(states & RowState::kWide);
  const bool has_far = has_wide && __syncthreads_or(states & RowState::kFar);

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
  } else {
    ptx::SetMaxNRegInc<kIsNarrow ? 96 : 200>();
    const int thread = threadIdx.x - 256;
    if (thread == 0) ptx::StoreShared32(shared.has_far(), has_far);
    if (has_wide) {
      Multiply<Form, DecodeBf16>(shared, args, work, thread);
    } else {
      Multiply<Form, DecodeF16>(shared, args, work, thread);
    }
    if constexpr (Form::kRanks > 1) {
      ptx::BarrierClusterArrive();
      ptx::BarrierClusterWait();
      FinishRows(shared, args, work, thread);
      // Nobody leaves while others read its sums. All that was read has been used.
      ptx::BarrierClusterArriveRelaxed();
      ptx::BarrierClusterWait();
    } else {
      ptx::BarrierSync(kConsumersBarrier, Form::kConsumers);
      FinishRows(shared, args, work, thread);
    }
  }
#endif
}

}  // namespace jax_pcie::cuda::mxfp8
