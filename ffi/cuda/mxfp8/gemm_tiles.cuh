// Which tiles a CTA of the exact product has, and how a tile's sums become outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx_sm90.cuh"
#include "call.h"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {

inline constexpr int kTileRows = 256;
inline constexpr int kTileOutputs = 128;
// Tiles in flight share x and w through L2: 16 tiles of rows by eight of outputs is nearly square.
inline constexpr int kGroupTiles = 16;

struct GemmParams {
  MultiplyCall call;
  PreparedScales x, w;
  int num_words;  // ceil(K / 128)
  int row_tiles, output_tiles;
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

// Every role of a CTA walks the same tiles. Where some are for the other kernel, CTAs take turns at
// those that are left: a fixed stride would give all of a row of tiles to a few CTAs.
class TileSchedule {
 public:
  __device__ TileSchedule(const GemmParams& params, bool has_wide, bool is_fallback)
      : params_(params), has_wide_(has_wide), is_fallback_(is_fallback) {}

  __device__ bool Next() {
    const int num_tiles = params_.row_tiles * params_.output_tiles;
    if (!has_wide_) {
      tile_ = tile_ < 0 ? blockIdx.x : tile_ + gridDim.x;
      if (tile_ >= num_tiles) return false;
      Locate();
      return true;
    }
    while (++tile_ < num_tiles) {
      Locate();
      const bool is_wide =
          AnyWide(params_.x.classes, row_ / kBlockRows, kTileRows / kBlockRows) ||
          AnyWide(params_.w.classes, output_ / kBlockRows, kTileOutputs / kBlockRows);
      if (is_wide != is_fallback_) continue;
      const bool is_mine = turn_ == blockIdx.x;
      turn_ = turn_ + 1 == gridDim.x ? 0 : turn_ + 1;
      if (is_mine) return true;
    }
    return false;
  }

  __device__ int row() const { return row_; }
  __device__ int output() const { return output_; }

 private:
  __device__ void Locate() {
    const int band_tiles = kGroupTiles * params_.output_tiles;
    const int band = tile_ / band_tiles, within = tile_ % band_tiles;
    const int height = min(params_.row_tiles - band * kGroupTiles, kGroupTiles);
    row_ = (band * kGroupTiles + within % height) * kTileRows;
    output_ = within / height * kTileOutputs;
  }

  const GemmParams& params_;
  bool has_wide_, is_fallback_;
  int tile_ = -1, row_ = 0, output_ = 0;
  unsigned turn_ = 0;
};

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

// Powers of two that undo a near row's f16 multipliers, for a thread's rows and outputs: loaded
// while the last products are on their way.
struct TileFactors {
  float rows[4], outputs[16][2];

  __device__ __forceinline__ TileFactors(const GemmParams& params, int tile_row, int tile_output,
                                         int first_row, int q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tile_row + first_row + i / 2 * 64 + i % 2 * 8;
      rows[i] = Factor(params.x.references[row]);
    }
    const auto* const pairs =
        reinterpret_cast<const uint32_t*>(params.w.references + tile_output + 2 * q);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint32_t pair = pairs[4 * j];
      outputs[j][0] = Factor(pair);
      outputs[j][1] = Factor(pair >> 16);
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

  __device__ static float Factor(uint32_t reference) {
    constexpr int kUndo = 7;  // a reference's multiplier is 2^7
    return __uint_as_float(((reference & 0xff) - kUndo) << 23);
  }
};

// Stores a thread's sums: d[4 j + 2 h + i] of block b is row first_row + 64 b + 8 h of the tile,
// output 8 j + 2 q + i.
template <bool kIsFallback, class Output>
__device__ __forceinline__ void StoreTile(const GemmParams& params, const TileFactors& factors,
                                          int tile_row, int tile_output, int first_row, int q,
                                          const float (&sums)[2][64]) {
  const int64_t num_rows = params.call.x.rows, num_outputs = params.call.w.rows;
  const float* const bias = params.call.bias;
  auto* const y = static_cast<Output*>(params.call.y);
  const bool is_whole = num_outputs % 8 == 0 && tile_output + kTileOutputs <= num_outputs;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {  // 32 outputs
    float biases[4][2] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int output = tile_output + quarter * 32 + j * 8 + 2 * q + i;
          biases[j][i] = output < num_outputs ? __ldg(bias + output) : 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = tile_row + first_row + i / 2 * 64 + i % 2 * 8;
      float values[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float value = sums[i / 2][(quarter * 4 + j) * 4 + i % 2 * 2 + c];
          if constexpr (!kIsFallback) {
            value = value * factors.rows[i] * factors.outputs[quarter * 4 + j][c];
          }
          values[j][c] = bias != nullptr ? value + biases[j][c] : value;
        }
      }
      const int output = tile_output + quarter * 32;
      Output* const out = y + row * num_outputs + output;
      if constexpr (sizeof(Output) == 2) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = RoundedPair(Output{}, values[j][0], values[j][1]);
        }
        if (is_whole) {
          const uint4 chunk = TransposedInQuad(words, q);
          if (row < num_rows) reinterpret_cast<uint4*>(out)[q] = chunk;
          continue;
        }
      } else if (is_whole) {
        if (row < num_rows) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            reinterpret_cast<float2*>(out)[4 * j + q] = {values[j][0], values[j][1]};
          }
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
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

}  // namespace jax_pcie::cuda::mxfp8
