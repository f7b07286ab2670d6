// The kernel of `gemm_sm90.h`: persistent CTAs, each with a tile of 256 x 128 outputs at a time.
//
//   warps 0 to 6    decode w's tile to 16-bit values, from one ring in shared memory to another
//   warp 7          has the copy engine fill the first ring: x, w, their scale words
//   warpgroups 2, 3 decode x in registers, 128 rows each, and multiply it with the second ring
//
// It is bound by the tensor pipe and by power, with little to spare elsewhere:
//
//   - Shared memory. At full rate the products read 64 bytes a clock of it, decoding w writes 16,
//     reading MXFP8 takes 24 and filling the ring 24, of 128 in all. So x is decoded in registers:
//     no other pass is affordable. Loads answer late, after 200 clocks and more; hence half a stage
//     lies between a consumer's load and its use, and decoders hide each other's waits.
//   - Register ports, which the sums keep busy: while products run, an instruction of a consumer
//     takes six clocks of its warp. Slots of the second ring are constants, so that nothing has to
//     be computed to find them: it was a quarter of the main loop.
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
inline constexpr int kDecodedStages = 4;  // of w as 16-bit values, 64 columns each: two stages
inline constexpr int kThreads = 512;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kDecoderWarps = 7;
inline constexpr int kStageTasks = 8;  // of the decoders

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
    const int64_t first = 2 * part.begin;
    const uint32_t* x_words = params.x.words + first * params.x.rows + part.row;
    const uint32_t* w_words = params.w.words + first * params.w.rows + part.output;
#pragma unroll 1
    for (int k = 2 * part.begin; k < 2 * part.end; ++k, stage.Advance()) {
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

// What makes the fields of a row those of bf16: they are already, where its block is not near.
__device__ __forceinline__ int FieldBase(const PreparedScales& side, int row) {
  const bool is_near = side.classes[row / kBlockRows] == RowClass::kNear;
  return is_near ? kFieldToExponent : 0;
}

// A stage is eight tasks, of 32 rows and half the columns each, a thread a row. The seven warps
// take every seventh task: each waits for its memory while others compute, and one warp is left to
// request.
template <class Decoder>
__device__ __forceinline__ void DecodeW(const SharedMap& shared, const GemmParams& params,
                                        TileSchedule schedule, int thread) {
  const uint32_t lane = ptx::Kept(thread % 32);
  // 16-byte chunk 0 of this lane's row, under the 128-byte swizzle; ^ 16 i makes it chunk i.
  const uint32_t chunk = ptx::Kept(lane * kTile + lane % 8 * 16);
  int task = thread / 32;
  RingPosition<kStages> stage;
  RingPosition<kDecodedStages / 2> out;  // pairs of slots: a stage's two halves
  TilePart part;
  for (int number = 0; schedule.Find(number, part); ++number) {
#pragma unroll 1
    for (int left = 2 * (part.end - part.begin); left > 0;) {
      const uint32_t row = task % 4 * 32 + lane, half = task / 4;
      const int slot = 2 * out.index() + half;
      const int base = Decoder::kIsFallback ? FieldBase(params.w, part.output + row) : 0;
      const uint32_t from =
          shared.w(stage.index()) + task % 4 * (32 * kTile) + (chunk ^ (half * 16));
      const uint32_t to = shared.decoded(slot) + task % 4 * (32 * kTile) + chunk;
      ptx::MbarrierWait(shared.full(stage.index()), stage.parity());
      const uint32_t word = ptx::LoadShared32(shared.w_words(stage.index()) + row * 4);
      uint4 groups[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) groups[q] = ptx::LoadShared128(from ^ (32 * q));
      uint32_t multipliers[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        multipliers[q] = Decoder::Multiplier(word >> (8 * q) & 0xff, base);
      }
      ptx::MbarrierWait(shared.decoded_empty(slot), out.parity() ^ 1);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint2 d[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          d[q] = Decoded<Decoder>((&groups[q].x)[step], multipliers[q]);
        }
        ptx::StoreShared128(to ^ (32 * step), {d[0].x, d[1].x, d[2].x, d[3].x});
        ptx::StoreShared128(to ^ (32 * step + 16), {d[0].y, d[1].y, d[2].y, d[3].y});
      }
      ptx::FenceProxyAsync();
      __syncwarp();
      if (lane == 0) {
        ptx::MbarrierArrive(shared.decoded_full(slot));
        ptx::MbarrierArrive(shared.empty(stage.index()));
      }
      if (task == 0) {
        task = kStageTasks - 1;
      } else {
        --task;
        --left;
        stage.Advance();
        out.Advance();
      }
    }
  }
}

// A consumer thread's first row in the tile; it also has those 8, 64 and 72 further on.
__device__ __forceinline__ uint32_t FirstRow(uint32_t thread) {
  return thread / 128 * 128 + thread / 32 % 4 * 16 + thread % 32 / 4;
}

// 128 rows of the tile: two blocks of 64, of which a thread has two rows each.
template <class Decoder, class Output>
__device__ __forceinline__ void Consume(const SharedMap& shared, const GemmParams& params,
                                        TileSchedule schedule, int thread) {
  auto row_of = [](int i) { return i / 2 * 64 + i % 2 * 8; };  // from `FirstRow`
  // Where the first stage has the thread's first chunk of its first row, and its byte of that row's
  // word.
  uint32_t first_chunk, first_field;
  {
    const uint32_t row = FirstRow(thread), q = thread % 4;
    first_chunk = ptx::Kept(shared.x(0) + row * kTile + ((2 * q) ^ (row % 8)) * 16);
    first_field = ptx::Kept(shared.x_words(0) + row * 4 + q);
  }
  uint32_t pair = 0;  // of stages, so far
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
        bases[i] = FieldBase(params.x, part.row + FirstRow(thread) + row_of(i));
      }
    }
    RingPosition<kStages> stage(2 * pair);
    uint32_t fields[4], multipliers[4];
    uint4 chunks[2][4];  // a thread's bytes of a stage, by half and row
    auto load_fields = [&] {
      const uint32_t from = first_field + stage.index() * sizeof(GemmShared::x_words[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) fields[i] = ptx::LoadShared8(from + row_of(i) * 4);
    };
    auto load_chunks = [&](int half) {
      const uint32_t x = (first_chunk + stage.index() * sizeof(GemmShared::x[0])) ^ (half * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) chunks[half][i] = ptx::LoadShared128(x + row_of(i) * kTile);
    };
    auto multiply_fields = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) multipliers[i] = Decoder::Multiplier(fields[i], bases[i]);
    };
    ptx::MbarrierWait(shared.full(stage.index()), stage.parity());
    load_fields();
    load_chunks(0);
    multiply_fields();
#pragma unroll 1
    for (int left = part.end - part.begin; left > 0; --left) {
      // A pair of stages, so that slots of the second ring are constants.
      stage = RingPosition<kStages>(2 * pair);  // cheaper than to remember it
#pragma unroll
      for (int slot = 0; slot < kDecodedStages; ++slot) {
        const int half = slot % 2;
        const uint32_t decoded_full = shared.decoded_full(slot);
        // Uniform registers hold the other slots' descriptors, and there are no more of them.
        const uint32_t decoded = slot == 0 ? ptx::Kept(shared.decoded(slot)) : shared.decoded(slot);
        // Two batches of two k16 steps: one batch is decoded while the other multiplies. What the
        // next half needs is loaded half a stage ahead: shared memory is busy, and answers late.
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {
          const bool is_decoded = batch == 1 || ptx::MbarrierTest(decoded_full, pair % 2);
          uint32_t read_stage_empty = 0;
          uint32_t fragments[2][2][4];  // [step, block, register]
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint2 values =
                  Decoded<Decoder>((&chunks[half][i].x)[2 * batch + step], multipliers[i]);
              fragments[step][i / 2][i % 2] = values.x;
              fragments[step][i / 2][i % 2 + 2] = values.y;
            }
          }
          if (batch == 0 && half == 1) {
            read_stage_empty = shared.empty(stage.index());
            stage.Advance();
            if (slot == 1 || left > 1) {
              ptx::MbarrierWait(shared.full(stage.index()), stage.parity());
            }
          }
          if (batch == 1 && half == 1) multiply_fields();
          if (batch == 0 && !is_decoded) ptx::MbarrierWait(decoded_full, pair % 2);
          ptx::WgmmaFence();
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const uint64_t w = DescribeDecoded(decoded, 2 * batch + step);
#pragma unroll
            for (int b = 0; b < 2; ++b) Decoder::Multiply(sums[b], fragments[step][b], w);
            if (batch == 0 && step == 0) {
              // Behind the last stage this loads what nobody uses, while it may be overwritten.
              if (half == 1) load_fields();
              load_chunks(1 - half);
            }
          }
          if (batch == 0 && half == 1) {
            // These products have read what the last loads of the stage brought.
            __syncwarp();
            if (ptx::ElectOne()) ptx::MbarrierArrive(read_stage_empty);
          }
          ptx::WgmmaCommitGroup();
          ptx::WgmmaWaitGroup<1>();
          if (batch == 0 && (slot > 0 || pair > 0)) {
            // The last batch of the half before has just ended.
            const uint32_t empty =
                shared.decoded_empty((slot + kDecodedStages - 1) % kDecodedStages);
            if (ptx::ElectOne()) ptx::MbarrierArrive(empty);
          }
        }
      }
      ++pair;
    }
    // Derived again rather than kept through the main loop.
    schedule.Locate(ptx::Kept(number), part);
    const uint32_t again = ptx::Kept(thread);
    const int first_row = FirstRow(again), q = again % 4, consumer = again / 128;
    if (part.end < params.num_pairs) {
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
    StoreTile<Output>(params, factors, part.row, part.output, first_row, q, sums);
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
      ptx::MbarrierInit(shared.empty(i), kConsumerWarps + kStageTasks);
    }
    for (int i = 0; i < kDecodedStages; ++i) {
      ptx::MbarrierInit(shared.decoded_full(i), kStageTasks / 2);
      ptx::MbarrierInit(shared.decoded_empty(i), kConsumerWarps);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();

  const TileSchedule schedule(params, has_wide, Decoder::kIsFallback);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, as compilers can see
  // Budgets of 128 threads each, 4 * 128 registers a lane in all: 2 * 40 + 2 * 216. The decoders
  // just fit; the consumers use all they get to load ahead.
  if (warpgroup < 2) {
    ptx::SetMaxNRegDec<40>();
    if (threadIdx.x < 32 * kDecoderWarps) {
      DecodeW<Decoder>(shared, params, schedule, threadIdx.x);
    } else if (threadIdx.x == 32 * kDecoderWarps) {
      Produce(shared, params, &x_map, &w_map, schedule);
    }
  } else {
    ptx::SetMaxNRegInc<216>();
    Consume<Decoder, Output>(shared, params, schedule, threadIdx.x - 256);
  }
#elif defined(__CUDA_ARCH__)
  __trap();  // built for another architecture: an error, not an array that nobody wrote
#endif
}

}  // namespace jax_pcie::cuda::mxfp8
