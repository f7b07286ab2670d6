// The kernel of `gemm_sm90.h`: persistent CTAs, each with a tile of 256 x 128 outputs at a time.
//
//   warpgroup 0     decodes w's tile to 16-bit values, from one ring in shared memory to another
//   warpgroup 1     one thread has the copy engine fill the first ring: x, w, their scale words
//   warpgroups 2, 3 decode x in registers, 128 rows each, and multiply it with the second ring
//
// It is bound by power and the tensor pipe. Shared memory comes next: at full rate the products
// read 64 bytes a clock of it, decoding w writes 16, reading MXFP8 takes 24 and filling the ring
// 24, of 128 in all. So x is decoded in registers: no other pass through shared memory is
// affordable.
//
// The order of columns within a stage is our own, the same for both operands: of 128 columns,
// product step j takes bytes 4j .. 4j+3 of each of the four groups. Lane q of a quad then holds
// exactly the values of group q, so that it needs one scale a row, whole 16-byte loads, no
// shuffles.
#pragma once

#include <cstddef>

#include "../ptx_sm90.cuh"
#include "../wgmma.cuh"
#include "call.h"
#include "decode_sm90.cuh"
#include "gemm_far.cuh"
#include "gemm_tiles.cuh"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {

// --- Shared memory

inline constexpr int kStages = 3;         // of MXFP8, 128 columns each
inline constexpr int kDecodedStages = 4;  // of w as 16-bit values, 64 columns each
inline constexpr int kThreads = 512;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kDecoderWarps = 4;

struct alignas(1024) GemmShared {
  uint8_t x[kStages][kTileRows][kTile];
  uint8_t w[kStages][kTileOutputs][kTile];
  uint16_t decoded[kDecodedStages][kTileOutputs][kTile / 2];
  uint32_t x_words[kStages][kTileRows];
  uint32_t w_words[kStages][kTileOutputs];
  uint64_t full[kStages], empty[kStages];
  uint64_t decoded_full[kDecodedStages], decoded_empty[kDecodedStages];

  static constexpr uint32_t kStageBytes = (kTileRows + kTileOutputs) * (kTile + sizeof(uint32_t));
};
static_assert(sizeof(GemmShared) + 1024 <= 227 * 1024);

// Where its parts are, as 32-bit addresses.
class SharedMap {
 public:
  __device__ explicit SharedMap(uint32_t base) : base_(base) {}

  __device__ uint32_t x(int stage) const { return At<kTileRows * kTile>(kX, stage); }
  __device__ uint32_t w(int stage) const { return At<kTileOutputs * kTile>(kW, stage); }
  __device__ uint32_t decoded(int slot) const { return At<kTileOutputs * kTile>(kDecoded, slot); }
  __device__ uint32_t x_words(int stage) const { return At<kTileRows * 4>(kXWords, stage); }
  __device__ uint32_t w_words(int stage) const { return At<kTileOutputs * 4>(kWWords, stage); }
  __device__ uint32_t full(int stage) const { return At<8>(kFull, stage); }
  __device__ uint32_t empty(int stage) const { return At<8>(kEmpty, stage); }
  __device__ uint32_t decoded_full(int slot) const { return At<8>(kDecodedFull, slot); }
  __device__ uint32_t decoded_empty(int slot) const { return At<8>(kDecodedEmpty, slot); }

 private:
  enum : uint32_t {
    kX = offsetof(GemmShared, x),
    kW = offsetof(GemmShared, w),
    kDecoded = offsetof(GemmShared, decoded),
    kXWords = offsetof(GemmShared, x_words),
    kWWords = offsetof(GemmShared, w_words),
    kFull = offsetof(GemmShared, full),
    kEmpty = offsetof(GemmShared, empty),
    kDecodedFull = offsetof(GemmShared, decoded_full),
    kDecodedEmpty = offsetof(GemmShared, decoded_empty),
  };

  template <uint32_t kStride>
  __device__ uint32_t At(uint32_t offset, int index) const {
    return base_ + offset + kStride * index;
  }

  uint32_t base_;
};

// --- The warpgroups' work

__device__ __forceinline__ void Produce(const SharedMap& shared, const GemmParams& params,
                                        const CUtensorMap* x_map, const CUtensorMap* w_map,
                                        TileSchedule schedule) {
  RingPosition<kStages> stage;
  TilePart part;
  for (int number = 0; schedule.Find(number, part); ++number) {
    const int64_t first = part.begin;
    const uint32_t* x_words = params.x.words + first * params.x.rows + part.row;
    const uint32_t* w_words = params.w.words + first * params.w.rows + part.output;
#pragma unroll 1  // 32 registers
    for (int k = part.begin; k < part.end; ++k, stage.Advance()) {
      const int s = stage.index();
      const uint32_t full = shared.full(s);
      ptx::MbarrierWait(shared.empty(s), stage.parity() ^ 1);
      ptx::MbarrierArriveExpectTx(full, GemmShared::kStageBytes);
      ptx::CopyTensor2d(shared.x(s), x_map, k * kTile, part.row, full);
      ptx::CopyTensor2d(shared.w(s), w_map, k * kTile, part.output, full);
      ptx::CopyBulk(shared.x_words(s), x_words, sizeof(GemmShared::x_words[0]), full);
      ptx::CopyBulk(shared.w_words(s), w_words, sizeof(GemmShared::w_words[0]), full);
      x_words += params.x.rows;
      w_words += params.w.rows;
    }
  }
}

// Adding this to a near row's field gives its scale byte; a row that is not near has the byte
// itself.
__device__ __forceinline__ int ScaleBase(const PreparedScales& side, int row) {
  if (side.classes[row / kBlockRows] != RowClass::kNear) return 0;
  return (side.references[row] & 0xff) - kReferenceField;
}

// A thread is a row of w's tile. Half a stage is announced when the next has been decoded, just
// before that is stored: by then the fence finds its stores done and does not wait for them.
template <class Decoder>
__device__ __forceinline__ void DecodeW(const SharedMap& shared, const GemmParams& params,
                                        TileSchedule schedule, int thread) {
  const uint32_t row = ptx::Kept(thread);
  // 16-byte chunk 2 i of this row, under the 128-byte swizzle; ^ 16 makes it chunk 2 i + 1.
  uint32_t chunks[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) chunks[i] = ptx::Kept(row * kTile + ((2 * i) ^ (row % 8)) * 16);
  const bool is_first_lane = row % 32 == 0;
  RingPosition<kStages> stage;
  RingPosition<kDecodedStages> out;
  auto announce_previous = [&] {
    ptx::FenceProxyAsync();
    __syncwarp();
    if (is_first_lane) ptx::MbarrierArrive(shared.decoded_full(out.previous_index()));
  };
  TilePart part;
  for (int number = 0; schedule.Find(number, part); ++number) {
    const int base = Decoder::kIsFallback ? ScaleBase(params.w, part.output + row) : 0;
    for (int left = part.end - part.begin; left > 0; --left, stage.Advance()) {
      ptx::MbarrierWait(shared.full(stage.index()), stage.parity());
      const uint32_t w = shared.w(stage.index());
      const uint32_t word = ptx::LoadShared32(shared.w_words(stage.index()) + row * 4);
      uint4 groups[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) groups[q] = ptx::LoadShared128(w + chunks[q]);
      uint32_t multipliers[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        multipliers[q] = Decoder::Multiplier(word >> (8 * q) & 0xff, base);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half, out.Advance()) {
        uint2 decoded[4][4];  // [step, group]
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          decoded[0][q] = Decoded<Decoder>(groups[q].x, multipliers[q]);
          decoded[1][q] = Decoded<Decoder>(groups[q].y, multipliers[q]);
          decoded[2][q] = Decoded<Decoder>(groups[q].z, multipliers[q]);
          decoded[3][q] = Decoded<Decoder>(groups[q].w, multipliers[q]);
        }
        if (half == 0) {
#pragma unroll
          for (int q = 0; q < 4; ++q) groups[q] = ptx::LoadShared128(w + (chunks[q] ^ 16));
        }
        if (!out.IsFirst()) announce_previous();
        if (half == 1 && is_first_lane) ptx::MbarrierArrive(shared.empty(stage.index()));
        ptx::MbarrierWait(shared.decoded_empty(out.index()), out.parity() ^ 1);
        const uint32_t to = shared.decoded(out.index());
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const auto& d = decoded[step];
          ptx::StoreShared128(to + chunks[step], {d[0].x, d[1].x, d[2].x, d[3].x});
          ptx::StoreShared128(to + (chunks[step] ^ 16), {d[0].y, d[1].y, d[2].y, d[3].y});
        }
      }
    }
  }
  if (!out.IsFirst()) announce_previous();
}

// A consumer thread's first row in the tile; it also has those 8, 64 and 72 further on.
__device__ __forceinline__ uint32_t FirstRow(uint32_t thread) {
  return thread / 128 * 128 + thread / 32 % 4 * 16 + thread % 32 / 4;
}

// 128 rows of the tile: two blocks of 64, of which a thread has two rows each.
template <class Decoder, class Output>
__device__ __forceinline__ void Consume(const SharedMap& shared, const GemmParams& params,
                                        TileSchedule schedule, int thread) {
  const bool is_first_lane = thread % 32 == 0;
  auto row_of = [](int i) { return i / 2 * 64 + i % 2 * 8; };  // from `FirstRow`
  uint32_t chunk, field;  // the thread's first chunk of its first row; its byte of that row's word
  {
    const uint32_t row = FirstRow(thread), q = thread % 4;
    chunk = ptx::Kept(row * kTile + ((2 * q) ^ (row % 8)) * 16);
    field = ptx::Kept(row * 4 + q);
  }
  RingPosition<kStages> stage;
  RingPosition<kDecodedStages> in;
  TilePart part;
  for (int number = 0; schedule.Find(number, part); ++number) {
    float sums[2][64];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[b][i] = 0;
    }
    TileFactors::Prefetch(params, part.row, part.output, thread);
    int bases[4] = {};
    if constexpr (Decoder::kIsFallback) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bases[i] = ScaleBase(params.x, part.row + FirstRow(thread) + row_of(i));
      }
    }
    uint32_t multipliers[4];
    uint4 chunks[4];  // a thread's bytes of half a stage, by row
    auto load_multipliers = [&] {
      ptx::MbarrierWait(shared.full(stage.index()), stage.parity());
      const uint32_t fields = shared.x_words(stage.index()) + field;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multipliers[i] = Decoder::Multiplier(ptx::LoadShared8(fields + row_of(i) * 4), bases[i]);
      }
    };
    auto load_chunks = [&](int half) {
      const uint32_t x = shared.x(stage.index()) + (chunk ^ (half * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) chunks[i] = ptx::LoadShared128(x + row_of(i) * kTile);
    };
    load_multipliers();
    load_chunks(0);
    for (int left = part.end - part.begin; left > 0; --left) {
#pragma unroll
      for (int half = 0; half < 2; ++half, in.Advance()) {
        // Two batches of two k16 steps: one batch is decoded while the other multiplies.
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {
          uint32_t fragments[2][2][4];  // [step, block, register]
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint2 values =
                  Decoded<Decoder>((&chunks[i].x)[2 * batch + step], multipliers[i]);
              fragments[step][i / 2][i % 2] = values.x;
              fragments[step][i / 2][i % 2 + 2] = values.y;
            }
          }
          if (batch == 0) ptx::MbarrierWait(shared.decoded_full(in.index()), in.parity());
          ptx::WgmmaFence();
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const uint64_t w = DescribeDecoded(shared.decoded(in.index()), 2 * batch + step);
#pragma unroll
            for (int b = 0; b < 2; ++b) Decoder::Multiply(sums[b], fragments[step][b], w);
          }
          ptx::WgmmaCommitGroup();
          if (batch == 1 && half == 0) {
            load_chunks(1);
          } else if (batch == 1) {
            // Released after the last use of what was loaded, not after the loads were issued.
            __syncwarp();
            if (is_first_lane) ptx::MbarrierArrive(shared.empty(stage.index()));
            stage.Advance();
            if (left > 1) {
              load_multipliers();
              load_chunks(0);
            }
          }
          ptx::WgmmaWaitGroup<1>();
          if (batch == 0) {  // the last batch of the half before has just ended
            if (!in.IsFirst() && is_first_lane) {
              ptx::MbarrierArrive(shared.decoded_empty(in.previous_index()));
            }
          }
        }
      }
    }
    // Derived again rather than kept through the main loop.
    schedule.Locate(ptx::Kept(number), part);
    const uint32_t again = ptx::Kept(thread);
    const int first_row = FirstRow(again), q = again % 4, consumer = again / 128;
    if (part.end < params.num_words) {
      ptx::WgmmaWaitGroup<0>();
      LeavePartial(params.split, consumer, again % 128, sums);
      continue;
    }
    const TileFactors factors(params, part.row, part.output, first_row, q);
    ptx::WgmmaWaitGroup<0>();
    if (part.begin > 0) {
      const int first_cta = schedule.FirstCta(part);
      for (int cta = blockIdx.x - 1; cta >= first_cta; --cta) {
        AddPartial(params.split, cta, consumer, again % 128, sums);
      }
    }
    StoreTile<Decoder::kIsFallback, Output>(params, factors, part.row, part.output, first_row, q,
                                            sums);
    if constexpr (Decoder::kIsFallback) {
      ptx::BarrierSync(1, 256);  // the tile is stored
      StoreFarOutputs<Output>(params, part.row, part.output);
    }
  }
}

template <class Decoder, class Output>
__global__ void __launch_bounds__(kThreads, 1)
    GemmSm90Kernel(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ GemmParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t unaligned[];
  const SharedMap shared(ptx::Kept((ptx::SharedAddress(unaligned) + 1023) / 1024 * 1024));

  const bool has_wide = __syncthreads_or(AnyBlockIsWide(params));
  if (Decoder::kIsFallback && !has_wide) return;
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&x_map);
    ptx::PrefetchTensorMap(&w_map);
    for (int i = 0; i < kStages; ++i) {
      ptx::MbarrierInit(shared.full(i), 1);
      ptx::MbarrierInit(shared.empty(i), kConsumerWarps + kDecoderWarps);
    }
    for (int i = 0; i < kDecodedStages; ++i) {
      ptx::MbarrierInit(shared.decoded_full(i), kDecoderWarps);
      ptx::MbarrierInit(shared.decoded_empty(i), kConsumerWarps);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();

  const TileSchedule schedule(params, has_wide, Decoder::kIsFallback);
  const int warpgroup = threadIdx.x / 128;
  // Budgets of 128 threads each, 4 * 128 registers a lane in all: 80 + 32 + 2 * 200. With 72 for
  // the decoder, which then spills two, the whole is 5 % slower: consumers wait for it.
  if (warpgroup == 0) {
    ptx::SetMaxNRegDec<80>();
    DecodeW<Decoder>(shared, params, schedule, threadIdx.x);
  } else if (warpgroup == 1) {
    ptx::SetMaxNRegDec<32>();
    if (threadIdx.x == 128) Produce(shared, params, &x_map, &w_map, schedule);
  } else {
    ptx::SetMaxNRegInc<200>();
    Consume<Decoder, Output>(shared, params, schedule, threadIdx.x - 256);
  }
#elif defined(__CUDA_ARCH__)
  __trap();  // built for another architecture: an error, not an array that nobody wrote
#endif
}

}  // namespace jax_pcie::cuda::mxfp8
