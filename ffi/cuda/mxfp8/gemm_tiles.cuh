// Which tiles a CTA of the exact product has, and how a tile's sums become outputs.
//
// Owns the split of tiles over CTAs, the sums of split tiles, and the epilogue; the main loop is in
// `gemm_sm90.cuh`. The one surprise: CTAs wait for each other where a tile is split.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../numerics.h"
#include "../ptx_sm90.cuh"
#include "call.h"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kTileRows = 256;
inline constexpr int kTileOutputs = 128;
// Tiles in flight share x and w through L2: eight tiles of rows by 16 of outputs is nearly square.
inline constexpr int kGroupTiles = 8;

// How tiles are spread over CTAs. Whole tiles come first, one each in turn. What is left would keep
// only some CTAs busy, for the time of a whole tile: instead its stages, tile after tile, are cut
// into equal parts, one for each CTA. A part that does not end its tile leaves its sums in the
// workspace for the CTA that does. The cut depends on shapes only, so results are the same from run
// to run.
struct TileSplit {
  int whole_tiles;     // the first tiles
  int split_tiles;     // those after them
  int num_ctas;        // of the grid
  int part_pairs;      // a CTA's part, in pairs of stages: so many
  int longer_parts;    // and one more for so many CTAs, the first ones
  float4* partials;    // [num_ctas, kConsumers, 32, 128] sums, if tiles are split
  uint32_t* are_here;  // [num_ctas, kConsumers]: 1 when the sums are; 0 when the kernel starts

  // Where CTA `cta`'s part of the split tiles begins; it ends where the next begins.
  HD int PartBegin(int cta) const {
    return cta * part_pairs + (cta < longer_parts ? cta : longer_parts);
  }
};

inline constexpr int kConsumers = 2;              // warpgroups that multiply
inline constexpr int kPartialVectors = 32 * 128;  // float4 of a consumer's sums

struct GemmParams {
  MultiplyCall call;
  PreparedScales x, w;
  int num_pairs;  // of stages of a tile
  int row_tiles, output_tiles;
  TileSplit split;
};

// Blocks of 32 rows that are not near make their whole tile go through the fallback.
__device__ __forceinline__ bool AnyWide(const RowClass* classes, int first, int count) {
  bool any = false;
  for (int i = 0; i < count; ++i) any |= classes[first + i] != RowClass::kNear;
  return any;
}

// This thread's part of the question whether any block is not near.
__device__ __forceinline__ bool AnyBlockIsWide(const GemmParams& params) {
  bool any = false;
  for (int i = threadIdx.x; i < params.x.rows / kBlockRows; i += blockDim.x) {
    any |= params.x.classes[i] != RowClass::kNear;
  }
  for (int i = threadIdx.x; i < params.w.rows / kBlockRows; i += blockDim.x) {
    any |= params.w.classes[i] != RowClass::kNear;
  }
  return any;
}

// A tile, or a part of its stages.
struct TilePart {
  int row, output;  // of the tile's first value
  int begin, end;   // pairs of stages
  int split_begin;  // where the tile begins among the pairs of split tiles
};

// The parts of one CTA, by number; every role of it walks the same ones. All is derived from the
// number, so that a role has to remember nothing else beside its main loop.
class TileSchedule {
 public:
  __device__ TileSchedule(const GemmParams& params, bool has_wide, bool is_fallback)
      : params_(params), has_wide_(has_wide), is_fallback_(is_fallback) {}

  // Finds the first part from `number` on that is this kernel's.
  __device__ bool Find(int& number, TilePart& part) const {
    for (; Locate(number, part); ++number) {
      const bool is_empty = part.begin >= part.end;
      if (!is_empty && (!has_wide_ || IsWide(part) == is_fallback_)) return true;
    }
    return false;
  }

  // Of a CTA's two parts of split tiles, the one that others wait for comes first: the beginning of
  // the second tile. So nobody waits for a CTA that is waiting.
  __device__ bool Locate(int number, TilePart& part) const {
    const TileSplit& split = params_.split;
    const int num_pairs = params_.num_pairs;
    const int cta = blockIdx.x;
    int tile = cta + number * split.num_ctas;
    part.begin = 0;
    part.end = num_pairs;
    if (tile >= split.whole_tiles) {
      // Whole tiles are as many for each CTA, if there are others.
      const int split_number = (tile - split.whole_tiles) / split.num_ctas;
      if (split.split_tiles == 0 || split_number > 1) return false;
      const int first = split.PartBegin(cta), last = split.PartBegin(cta + 1);
      const int split_tile = first / num_pairs + (split_number == 0 ? 1 : 0);
      part.split_begin = split_tile * num_pairs;
      part.begin = max(first - part.split_begin, 0);
      part.end = min(last - part.split_begin, num_pairs);
      if (part.begin >= part.end) return true;  // empty: there may be no such tile
      tile = split.whole_tiles + split_tile;
    }
    // Divisions take as long as some products.
    const uint32_t band_tiles = kGroupTiles * params_.output_tiles;
    const uint32_t band = tile / band_tiles, within = tile - band * band_tiles;
    const int height = min(params_.row_tiles - static_cast<int>(band) * kGroupTiles, kGroupTiles);
    const uint32_t column = height == kGroupTiles ? within / kGroupTiles : within / height;
    part.row = static_cast<int>(band * kGroupTiles + within - column * height) * kTileRows;
    part.output = static_cast<int>(column) * kTileOutputs;
    return true;
  }

  // The first CTA with a part of this split tile: all up to this one have some.
  __device__ int FirstCta(const TilePart& part) const {
    int cta = blockIdx.x;
    while (params_.split.PartBegin(cta) > part.split_begin) --cta;
    return cta;
  }

 private:
  __device__ bool IsWide(const TilePart& part) const {
    return AnyWide(params_.x.classes, part.row / kBlockRows, kTileRows / kBlockRows) ||
           AnyWide(params_.w.classes, part.output / kBlockRows, kTileOutputs / kBlockRows);
  }

  const GemmParams& params_;
  bool has_wide_, is_fallback_;
};

// --- Sums of split tiles

// Leaves a consumer's sums for the CTA that ends the tile.
__device__ __forceinline__ void LeavePartial(const TileSplit& split, int consumer, int thread,
                                             const float (&sums)[2][64]) {
  const int slot = blockIdx.x * kConsumers + consumer;
  float4* const partial = split.partials + int64_t{slot} * kPartialVectors + thread;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float* const s = sums[i / 16] + i % 16 * 4;
    __stcg(partial + i * 128, float4{s[0], s[1], s[2], s[3]});
  }
  __threadfence();
  ptx::BarrierSync(2 + consumer, 128);
  if (thread == 0) ptx::StoreReleaseGpu(split.are_here + slot, 1);  // pairs with AddPartial
}

// Adds what CTA `cta` left. That CTA has a lower number, so it was dispatched before this one, and
// it leaves its part before it waits for anybody's: the wait ends whatever else the GPU runs.
__device__ __forceinline__ void AddPartial(const TileSplit& split, int cta, int consumer,
                                           int thread, float (&sums)[2][64]) {
  const int slot = cta * kConsumers + consumer;
  if (thread == 0) {
    while (ptx::LoadAcquireGpu(split.are_here + slot) == 0) __nanosleep(64);
  }
  ptx::BarrierSync(2 + consumer, 128);
  const float4* const partial = split.partials + int64_t{slot} * kPartialVectors + thread;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float4 other = __ldcg(partial + i * 128);
    float* const s = sums[i / 16] + i % 16 * 4;
    s[0] += other.x;
    s[1] += other.y;
    s[2] += other.z;
    s[3] += other.w;
  }
}

// --- Outputs

template <class Output>
__device__ __forceinline__ Output Rounded(float value) {
  if constexpr (sizeof(Output) == sizeof(float)) {
    return value;
  } else if constexpr (std::is_same_v<Output, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

__device__ __forceinline__ uint32_t RoundedPair(__half, float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t RoundedPair(__nv_bfloat16, float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Lane q of a quad has word q of four blocks of four words; afterwards it has block q whole. So a
// quad stores 64 bytes in a row instead of 16 in four.
__device__ __forceinline__ uint4 TransposedInQuad(const uint32_t (&words)[4], int q) {
  const bool is_upper = q & 2, is_odd = q & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffff, is_upper ? words[0] : words[2], 2);
  const uint32_t b = __shfl_xor_sync(0xffffffff, is_upper ? words[1] : words[3], 2);
  // Blocks 2 (q / 2) and the next, at the even and at the odd lane's position of both lane pairs.
  const uint32_t first_low = is_upper ? a : words[0], second_low = is_upper ? b : words[1];
  const uint32_t first_high = is_upper ? words[2] : a, second_high = is_upper ? words[3] : b;
  const uint32_t c = __shfl_xor_sync(0xffffffff, is_odd ? first_low : second_low, 1);
  const uint32_t d = __shfl_xor_sync(0xffffffff, is_odd ? first_high : second_high, 1);
  if (is_odd) return {c, second_low, d, second_high};
  return {first_low, c, first_high, d};
}

// Powers of two that undo the rows' multipliers, for a thread's rows and outputs: loaded while the
// last products are on their way.
struct TileFactors {
  float rows[4], outputs[16][2];

  __device__ __forceinline__ TileFactors(const GemmParams& params, int tile_row, int tile_output,
                                         int first_row, int q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tile_row + first_row + i / 2 * 64 + i % 2 * 8;
      rows[i] = FactorOf(params.x.references[row]);
    }
    const auto* const pairs =
        reinterpret_cast<const uint32_t*>(params.w.references + tile_output + 2 * q);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint32_t pair = pairs[4 * j];
      outputs[j][0] = FactorOf(pair);
      outputs[j][1] = FactorOf(pair >> 16);
    }
  }

  // Has the first-level cache hold what the constructor will load.
  __device__ static void Prefetch(const GemmParams& params, int tile_row, int tile_output,
                                  int thread) {
    constexpr int kLine = 64;  // references
    const uint16_t* line = nullptr;
    if (thread < kTileRows / kLine) {
      line = params.x.references + tile_row + thread * kLine;
    } else if (thread < (kTileRows + kTileOutputs) / kLine) {
      line = params.w.references + tile_output + thread * kLine - kTileRows;
    }
    if (line != nullptr) ptx::PrefetchL1(line);
  }
};

// Stores a thread's sums: d[4 j + 2 h + i] of block b is row first_row + 64 b + 8 h of the tile,
// output 8 j + 2 q + i. Whole tiles without a branch, so that chunks hide each other's shuffles,
// and with or without a bias in the same instructions: the first tile waits for them to be fetched.
template <class Output, bool kIsWhole>
__device__ __forceinline__ void StoreSums(const GemmParams& params, const TileFactors& factors,
                                          int tile_row, int tile_output, int first_row, int q,
                                          const float (&sums)[2][64]) {
  const int64_t num_rows = params.call.x.rows, num_outputs = params.call.w.rows;
  const float* const bias = params.call.bias;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {  // 32 outputs
    const int output = tile_output + quarter * 32;
    float biases[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = output + j * 8 + 2 * q + c;
        const bool has_bias = bias != nullptr && (kIsWhole || column < num_outputs);
        biases[j][c] = has_bias ? __ldg(bias + column) : -0.f;  // adds nothing, not even to -0
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = tile_row + first_row + i / 2 * 64 + i % 2 * 8;
      Output* const out = static_cast<Output*>(params.call.y) + row * num_outputs + output;
      float values[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // Both factors first: a power of two that is exact even where it is not normal.
          values[j][c] =
              __fmaf_rn(sums[i / 2][(quarter * 4 + j) * 4 + i % 2 * 2 + c],
                        factors.rows[i] * factors.outputs[quarter * 4 + j][c], biases[j][c]);
        }
      }
      if constexpr (kIsWhole && sizeof(Output) == 2) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = RoundedPair(Output{}, values[j][0], values[j][1]);
        }
        const uint4 chunk = TransposedInQuad(words, q);
        // Nobody here reads it: L2 is better kept for x and w.
        if (row < num_rows) __stcs(reinterpret_cast<uint4*>(out) + q, chunk);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kIsWhole) {
            if (row < num_rows) {
              reinterpret_cast<float2*>(out)[4 * j + q] = {values[j][0], values[j][1]};
            }
          } else {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int column = j * 8 + 2 * q + c;
              if (row < num_rows && output + column < num_outputs) {
                out[column] = Rounded<Output>(values[j][c]);
              }
            }
          }
        }
      }
    }
  }
}

template <class Output>
__device__ __forceinline__ void StoreTile(const GemmParams& params, const TileFactors& factors,
                                          int tile_row, int tile_output, int first_row, int q,
                                          const float (&sums)[2][64]) {
  const int64_t num_outputs = params.call.w.rows;
  if (num_outputs % 8 == 0 && tile_output + kTileOutputs <= num_outputs) {
    StoreSums<Output, true>(params, factors, tile_row, tile_output, first_row, q, sums);
  } else {
    StoreSums<Output, false>(params, factors, tile_row, tile_output, first_row, q, sums);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
