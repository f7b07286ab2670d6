// Where cuBLASLt expects the scales of a block-scaled operand: pure functions, host and device.
//
// Source: NVIDIA, "cuBLAS Library", sections "1D Block Scaling Factors Layout" and "Scaling factors
// layouts" (https://docs.nvidia.com/cuda/cublas).
#pragma once

#include "../../codec.h"
#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

// E8M0 on Blackwell: tiles of 128 rows x 4 groups, 512 bytes each, row-major among themselves. A
// tile interleaves its rows: 32 chunks of 16 bytes, each with rows r, r + 32, r + 64 and r + 96.
struct SwizzledScales {
  static constexpr int kTileRows = 128;
  static constexpr int kTileGroups = 4;
  static constexpr int kTileBytes = kTileRows * kTileGroups;
  static constexpr int kChunkBytes = 16;

  static constexpr int64_t NumBytes(int64_t rows, int64_t num_groups) {
    return CeilDiv(rows, kTileRows) * CeilDiv(num_groups, kTileGroups) * kTileBytes;
  }
  HD static constexpr int64_t Offset(int64_t row, int64_t group, int64_t tiles_per_row) {
    return (row / kTileRows * tiles_per_row + group / kTileGroups) * kTileBytes +
           row % 32 * kChunkBytes + row % kTileRows / 32 * kTileGroups + group % kTileGroups;
  }

  // Whose scales a chunk holds: four groups from `first_group` on of rows `row`, `row` + 32, ...
  struct Chunk {
    int64_t row, first_group;
  };
  HD static constexpr Chunk ChunkAt(int64_t index, int64_t tiles_per_row) {
    constexpr int kTileChunks = kTileBytes / kChunkBytes;
    const int64_t tile = index / kTileChunks;
    return {tile / tiles_per_row * kTileRows + index % kTileChunks,
            tile % tiles_per_row * kTileGroups};
  }
};
// `ChunkAt` undoes `Offset`, byte by byte.
constexpr bool ChunksAreWhereTheyBelong(int64_t row_tiles, int64_t tiles_per_row) {
  const int64_t bytes = row_tiles * tiles_per_row * SwizzledScales::kTileBytes;
  for (int64_t byte = 0; byte < bytes; ++byte) {
    const auto chunk = SwizzledScales::ChunkAt(byte / SwizzledScales::kChunkBytes, tiles_per_row);
    const int64_t in_chunk = byte % SwizzledScales::kChunkBytes;
    const int64_t row = chunk.row + in_chunk / 4 * 32, group = chunk.first_group + in_chunk % 4;
    if (SwizzledScales::Offset(row, group, tiles_per_row) != byte) return false;
  }
  return true;
}
static_assert(ChunksAreWhereTheyBelong(2, 3));
static_assert(SwizzledScales::Offset(5, 2, 2) == 82 && SwizzledScales::Offset(5, 5, 2) == 593);
static_assert(SwizzledScales::Offset(127, 3, 1) == 511 &&
              SwizzledScales::Offset(128, 0, 3) == 1536);
static_assert(SwizzledScales::NumBytes(129, 5) == 4 * 512);

// fp32 on Hopper: a matrix of [scale rows, K tiles] with these steps (in floats) between rows and
// between tiles. Rows and tiles are padded to multiples of 4.
struct FloatScaleLayout {
  int64_t rows, tiles;                // that exist
  int64_t padded_rows, padded_tiles;  // that are stored
  int64_t row_step, tile_step;

  // One scale per row and 128 columns (VEC128_32F): rows are contiguous.
  static constexpr FloatScaleLayout PerRow(int64_t rows, int64_t k) {
    const int64_t padded = RoundUp(rows, 4), tiles = CeilDiv(k, kTile);
    return {rows, tiles, padded, tiles, 1, padded};
  }
  // One per 128 rows x 128 columns (BLK128x128_32F): tiles are contiguous.
  static constexpr FloatScaleLayout PerTile(int64_t rows, int64_t k) {
    const int64_t scale_rows = CeilDiv(rows, kTile), tiles = CeilDiv(k, kTile);
    return {scale_rows, tiles, scale_rows, RoundUp(tiles, 4), RoundUp(tiles, 4), 1};
  }
  constexpr int64_t NumBytes() const {
    return padded_rows * padded_tiles * static_cast<int64_t>(sizeof(float));
  }
};
static_assert(FloatScaleLayout::PerRow(17, 384).NumBytes() == 20 * 3 * 4);
static_assert(FloatScaleLayout::PerTile(132, 384).NumBytes() == 2 * 4 * 4);

}  // namespace jax_pcie::cuda::mxfp8
