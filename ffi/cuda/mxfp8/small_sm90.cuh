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
// in rank order. Memory is the bound, so the first ring is deep. Its first stages are requested as
// soon as the scales are: behind so much of w these would arrive last, and nothing can be
// multiplied without them. The order of columns is that of `gemm_sm90.cuh`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx_sm90.cuh"
#include "../wgmma.cuh"
#include "call.h"
#include "decode_sm90.cuh"
#include "small_finish.cuh"
#include "small_form.cuh"
#include "small_scales.cuh"

namespace jax_pcie::cuda::mxfp8 {

// --- The warp that fills the ring

template <class Form>
__device__ __forceinline__ void InitSmallBarriers(const SmallMap<Form>& shared, int num_tokens,
                                                  int lane) {
  static_assert(Form::kStages < 32 && Form::kDecodedStages < 32);
  if (lane < Form::kStages) {
    ptx::MbarrierInit(shared.w_full(lane), 1);
    ptx::MbarrierInit(shared.x_full(lane), 1);
    ptx::MbarrierInit(shared.empty(lane), 4 + Form::kDecoderWarps);
  }
  if (lane < Form::kDecodedStages) {
    ptx::MbarrierInit(shared.decoded_full(lane), Form::kDecoderWarps);
    ptx::MbarrierInit(shared.decoded_empty(lane), 4);
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
  ptx::MbarrierArriveExpectTx(shared.w_full(slot), work.tile_rows * kTile);
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
  Operand w = args.call.w;
  w.rows = work.first_row + work.num_rows;  // the next tile's rows must not widen this one
  const ScaleSource source{w, args.num_groups, work.first_word, work.num_words, args.w_load_bytes};
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

// The multiplier twice, from the exponent field that `RowState` explains.
template <class Decoder>
__device__ __forceinline__ uint32_t MultiplierOf(uint32_t exponent) {
  return Decoder::Multiplier(exponent - (Decoder::kIsFallback ? 0 : kFieldToExponent), 0);
}

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
        const uint32_t multiplier = MultiplierOf<Decoder>(word >> (8 * q) & 0xff);
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
  constexpr int kTurns = Form::kTurns;
  const int turn = thread / 128;
  const uint32_t lane = ptx::Kept(thread % 32);
  const uint32_t q = lane % 4;
  // Row i of this thread: block i / 2, upper or lower half of its 16.
  const uint32_t first_row = ptx::Kept(thread / 32 % 4 * 16 + lane / 4);
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
        multipliers[i] = MultiplierOf<Decoder>(ptx::LoadShared8(fields + row_of(i) * 4));
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
              Decoder::Multiply(sums[b], fragments[step][b], tokens);
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

  // Budgets of 128 threads each, 4 * 128 registers a lane in all: 88 + 24 + 2 * 200. Waits for the
  // decoders cost more than what the consumers lack.
  static_assert(Form::kConsumers == 256);
  if (threadIdx.x < 128) {
    ptx::SetMaxNRegDec<88>();
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
    ptx::SetMaxNRegInc<200>();
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