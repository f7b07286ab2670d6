// Prepares the scales of both operands in one launch, before the product. The values are read only
// where a scale's range makes it matter whether its group is all zero: such a group's scale is a
// convention, and must not make its row wide.
#include <cuda_pipeline.h>

#include "../../codec.h"
#include "../check.h"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int kWarps = 16;  // of a CTA
constexpr int kChunkWords = 4;
// Of a row, in shared memory at a time: rows of up to 43520 columns are read once. A thread of
// eight, each with a row, finds its 16 bytes in banks of its own, as the number of chunks is odd.
constexpr int kKeptChunks = 85;
static_assert(kKeptChunks % 2 == 1);
constexpr int kKeptWords = kKeptChunks * kChunkWords;
constexpr int kOneScale = 127;

struct Side {
  Operand operand;
  PreparedScales prepared;
};

// The four scale bytes of 128 columns. Those past the last column repeat the row's first: values
// there are zero, and stay so unless it is a NaN, which the row has then anyway.
__device__ uint32_t ScaleWord(const uint8_t* scales, int word, int num_groups) {
  const int group = 4 * word;
  if (group + 4 <= num_groups && reinterpret_cast<uintptr_t>(scales + group) % 4 == 0) {
    return __ldg(reinterpret_cast<const uint32_t*>(scales + group));
  }
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = scales[group + i < num_groups ? group + i : 0];
    bytes |= byte << (8 * i);
  }
  return bytes;
}

__device__ bool IsZeroGroup(const uint8_t* values, int group, int num_groups) {
  if (group >= num_groups) return true;
  uint32_t any = 0;
  for (int i = 0; i < kGroup / 4; ++i) {
    any |= __ldg(reinterpret_cast<const uint32_t*>(values + group * kGroup) + i);
  }
  return (any & 0x7f7f7f7f) == 0;
}

// The largest and the smallest of some bytes, which are the upper ones of 16-bit values.
struct Range {
  uint32_t highest = 0, lowest = ~0u;

  __device__ void Include(uint32_t bytes) {
    highest = __vimax3_u16x2(highest, bytes, bytes << 8);
    lowest = __vimin3_u16x2(lowest, bytes, bytes << 8);
  }
  __device__ int Highest() const { return max(highest >> 24, highest >> 8 & 0xff); }
  __device__ int Lowest() const { return min(lowest >> 24, lowest >> 8 & 0xff); }
};

// A CTA has 32 rows. Memory is read along them and written across them, a word of each at a time,
// with shared memory between: the bytes are used twice, and loads must not wait for what is done
// with them.
__global__ void __launch_bounds__(32 * kWarps, 3)
    PrepareScalesKernel(const Side x, const Side w, int x_blocks, int num_columns, uint32_t* flags,
                        int num_flags) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < num_flags; i += blockDim.x) flags[i] = 0;
  }
  const bool is_x = blockIdx.x < x_blocks;
  const Side side = is_x ? x : w;
  const int block = is_x ? blockIdx.x : blockIdx.x - x_blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = block * kBlockRows + lane;  // of this thread, once they are in shared memory
  const int num_groups = num_columns / kGroup;
  const int num_words = static_cast<int>(NumScaleWords(num_columns));
  const int64_t scale_stride = side.operand.stride / kGroup;
  const bool exists = row < side.operand.rows;
  const uint8_t* const values = side.operand.values + (exists ? row * side.operand.stride : 0);
  const uint8_t* const scales = side.operand.scales + (exists ? row * scale_stride : 0);

  __shared__ uint4 kept[kBlockRows][kKeptChunks];
  __shared__ int shared_lowest[kBlockRows], shared_highest[kBlockRows], shared_class[kBlockRows];
  if (warp == 0) {
    shared_lowest[lane] = 256;
    shared_highest[lane] = -1;
    shared_class[lane] = 0;
  }

  const bool is_aligned =
      reinterpret_cast<uintptr_t>(side.operand.scales) % 16 == 0 && scale_stride % 16 == 0;
  // Words from `begin` on, by all threads of the CTA; a warp takes every 16th row.
  const auto keep = [&](int begin) {
    const int count = min(kKeptWords, num_words - begin);
    for (int r = warp; r < kBlockRows; r += kWarps) {
      const int64_t from_row = int64_t{block} * kBlockRows + r;
      if (from_row >= side.operand.rows) {
        for (int i = lane; i < CeilDiv(count, kChunkWords); i += 32) {
          const uint32_t ones = kOneScale * 0x01010101u;
          kept[r][i] = {ones, ones, ones, ones};
        }
        continue;
      }
      const uint8_t* const from = side.operand.scales + from_row * scale_stride;
      const int num_chunks = is_aligned ? min(count, num_groups / 4 - begin) / kChunkWords : 0;
      for (int i = lane; i < num_chunks; i += 32) {
        __pipeline_memcpy_async(&kept[r][i], from + 4 * begin + 16 * i, 16);
      }
      auto* const words = reinterpret_cast<uint32_t*>(kept[r]);
      for (int i = num_chunks * kChunkWords + lane; i < count; i += 32) {
        words[i] = ScaleWord(from, begin + i, num_groups);
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
  };
  // Each of this thread's words and its number: it takes every 16th chunk of its row.
  const auto visit_kept = [&](int begin, auto&& visit) {
    const int count = min(kKeptWords, num_words - begin);
    for (int i = warp; i < CeilDiv(count, kChunkWords); i += kWarps) {
      const uint4 chunk = kept[lane][i];
      const int word = i * kChunkWords;
      visit(begin + word, chunk.x);
      if (word + 1 < count) visit(begin + word + 1, chunk.y);
      if (word + 2 < count) visit(begin + word + 2, chunk.z);
      if (word + 3 < count) visit(begin + word + 3, chunk.w);
    }
  };

  // --- The largest and the smallest scale of each row.
  Range range;
  for (int begin = 0; begin < num_words; begin += kKeptWords) {
    if (begin > 0) __syncthreads();
    keep(begin);
    visit_kept(begin, [&](int /*word*/, uint32_t bytes) { range.Include(bytes); });
  }
  if (exists) {
    atomicMin(&shared_lowest[lane], range.Lowest());
    atomicMax(&shared_highest[lane], range.Highest());
  }
  __syncthreads();
  // A NaN's scale, 255, is too high.
  const bool is_plain = shared_highest[lane] - shared_lowest[lane] < kReferenceField &&
                        shared_highest[lane] >= kMinReference &&
                        shared_highest[lane] <= kMaxReference;
  const bool needs_values = exists && !is_plain;
  const bool any_needs_values = __syncthreads_or(needs_values);

  // --- Rows that look wide may owe it to groups of zeros, whose scale is only a convention.
  if (any_needs_values) {
    if (warp == 0 && needs_values) shared_highest[lane] = -1;
    __syncthreads();
  }
  if (needs_values) {
    int live = -1;
    for (int word = warp; word < num_words; word += kWarps) {
      const uint32_t bytes = ScaleWord(scales, word, num_groups);
      for (int i = 0; i < 4; ++i) {
        const int byte = bytes >> (8 * i) & 0xff;
        if (byte != kNanScale && byte > live && !IsZeroGroup(values, 4 * word + i, num_groups)) {
          live = byte;
        }
      }
    }
    atomicMax(&shared_highest[lane], live);
  }
  if (any_needs_values) __syncthreads();
  const int highest = shared_highest[lane];
  const int reference = highest < 0 ? kOneScale : highest;  // -1: nothing but zeros, or NaN scales

  // --- What the row is.
  const bool has_factor = reference >= kMinReference && reference <= kMaxReference;
  auto class_of = [&](int byte, int group) {
    if (byte == kNanScale) return RowClass::kWide;
    const int down = reference - byte;  // less than 0 only where all is zero
    if (has_factor && down >= 0 && down < kReferenceField) return RowClass::kNear;
    if (IsZeroGroup(values, group, num_groups)) return RowClass::kNear;
    return has_factor && down <= kWideOctaves ? RowClass::kWide : RowClass::kFar;
  };
  RowClass row_class = RowClass::kNear;
  if (needs_values) {
    for (int word = warp; word < num_words; word += kWarps) {
      const uint32_t bytes = ScaleWord(scales, word, num_groups);
      for (int i = 0; i < 4; ++i) {
        const RowClass found = class_of(bytes >> (8 * i) & 0xff, 4 * word + i);
        if (found > row_class) row_class = found;
      }
    }
    atomicMax(&shared_class[lane], static_cast<int>(row_class));
  }
  if (any_needs_values) __syncthreads();
  row_class = static_cast<RowClass>(shared_class[lane]);
  const auto block_class =
      static_cast<RowClass>(__reduce_max_sync(0xffffffff, static_cast<unsigned>(row_class)));
  if (warp == 0) {
    side.prepared.references[row] = static_cast<uint16_t>(
        reference | (row_class == RowClass::kFar ? PreparedScales::kFarRow : 0));
    if (lane == 0) side.prepared.classes[block] = block_class;
  }

  // --- The words.
  const bool is_near = block_class == RowClass::kNear;
  const int top = is_near ? kReferenceField : kReferenceExponent;
  uint32_t* const to = side.prepared.words + row;
  for (int begin = 0; begin < num_words; begin += kKeptWords) {
    if (num_words > kKeptWords) {
      __syncthreads();
      keep(begin);
    }
    if (!any_needs_values) {
      visit_kept(begin, [&](int word, uint32_t bytes) {
        to[word * side.prepared.rows] = PlainFields(bytes, reference, top);
      });
    } else {
      visit_kept(begin, [&](int word, uint32_t bytes) {
        to[word * side.prepared.rows] =
            Fields(bytes, reference, top, is_near ? kReferenceField - 1 : kWideOctaves);
      });
    }
  }
}

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, 256); }

}  // namespace

int64_t PreparedScales::WorkspaceBytes(int64_t rows, int64_t num_columns) {
  return Aligned(rows * NumScaleWords(num_columns) * sizeof(uint32_t)) +
         Aligned(rows * sizeof(uint16_t)) + Aligned(rows / kBlockRows);
}

PreparedScales PreparedScales::At(void* workspace, int64_t rows, int64_t num_columns) {
  auto* const bytes = static_cast<char*>(workspace);
  const int64_t references = Aligned(rows * NumScaleWords(num_columns) * sizeof(uint32_t));
  const int64_t classes = references + Aligned(rows * sizeof(uint16_t));
  return {reinterpret_cast<uint32_t*>(bytes), reinterpret_cast<uint16_t*>(bytes + references),
          reinterpret_cast<RowClass*>(bytes + classes), rows};
}

void LoadScaleKernels() { LoadKernel(PrepareScalesKernel); }

void LaunchPrepareScales(const Operand& x, const PreparedScales& prepared_x, const Operand& w,
                         const PreparedScales& prepared_w, int64_t num_columns, uint32_t* flags,
                         int num_flags, cudaStream_t stream) {
  const int x_blocks = static_cast<int>(prepared_x.rows / kBlockRows);
  const int w_blocks = static_cast<int>(prepared_w.rows / kBlockRows);
  PrepareScalesKernel<<<x_blocks + w_blocks, 32 * kWarps, 0, stream>>>(
      {x, prepared_x}, {w, prepared_w}, x_blocks, static_cast<int>(num_columns), flags, num_flags);
  CheckCuda(cudaGetLastError(), "PrepareScalesKernel");
}

}  // namespace jax_pcie::cuda::mxfp8
