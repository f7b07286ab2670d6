// How the sums of a cluster become outputs: each rank sends its sums of the others' rows to their
// inboxes, adds what arrives in its own, in rank order, and stores.
//
// So results do not depend on who is first, and nobody reads a CTA that may have left.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../ptx_sm90.cuh"
#include "call.h"
#include "gemm_far.cuh"
#include "small_form.cuh"

namespace jax_pcie::cuda::mxfp8 {

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
  uint4 parts[Form::kTurns];
#pragma unroll
  for (int turn = 0; turn < Form::kTurns; ++turn) {
    parts[turn] = ptx::LoadShared128(from + turn * (Form::kTokens * Form::kSumsPitch * 4));
  }
  float4 sum = AsFloats(parts[0]);
#pragma unroll
  for (int turn = 1; turn < Form::kTurns; ++turn) sum = Sum(sum, AsFloats(parts[turn]));
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
  // All ranks know whether. This release also publishes the rows' states, which others read in
  // `IsFar` (the arrive at the start is relaxed), and nobody leaves while others read them.
  if (has_far) {
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
      case ElementType::kBf16:
        StoreFour<__nv_bfloat16>(args, index, values, count);
        break;
      case ElementType::kF16:
        StoreFour<__half>(args, index, values, count);
        break;
      case ElementType::kF32:
        StoreFour<float>(args, index, values, count);
        break;
    }
  }
  if (has_far) {
    ptx::BarrierClusterArriveRelaxed();  // all that was read has been used
    ptx::BarrierClusterWait();
  }
}

}  // namespace jax_pcie::cuda::mxfp8
