// Prepares the scales of both operands in one launch, before the product. The values are read only
// where a scale's range makes it matter whether its group is all zero: such a group's scale is a
// convention, and must not make its row wide.
#include "../../codec.h"
#include "../launch.h"
#include "scales.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int kWarps = 16;  // of a CTA; each takes every 16th word of a row
// Of a row and warp, kept from one pass to the next: rows of up to 24576 columns are read once.
constexpr int kKeptWords = 12;
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

struct Range {
  int lowest = 256, highest = -1;  // of the scale bytes, a NaN's left out
  bool has_nan = false;

  __device__ void Include(int byte) {
    if (byte == kNanScale) {
      has_nan = true;
      return;
    }
    lowest = min(lowest, byte);
    highest = max(highest, byte);
  }
  __device__ void IncludeAll(uint32_t bytes) {
    for (int i = 0; i < 4; ++i) Include(bytes >> (8 * i) & 0xff);
  }
};

// A lane is a row: the warp writes one word of 32 rows at a time.
__global__ void __launch_bounds__(32 * kWarps)
    PrepareScalesKernel(const Side x, const Side w, int x_blocks, int num_columns, uint32_t* flags,
                        int num_flags) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < num_flags; i += blockDim.x) flags[i] = 0;
  }
  const bool is_x = blockIdx.x < x_blocks;
  const Side side = is_x ? x : w;
  const int block = is_x ? blockIdx.x : blockIdx.x - x_blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = block * kBlockRows + lane;
  const int num_groups = num_columns / kGroup;
  const int num_words = static_cast<int>(NumScaleWords(num_columns));
  const bool exists = row < side.operand.rows;
  const int64_t first = exists ? int64_t{row} * side.operand.stride : 0;
  const uint8_t* const values = side.operand.values + first;
  const uint8_t* const scales = side.operand.scales + first / kGroup;

  __shared__ int shared_lowest[kBlockRows], shared_highest[kBlockRows];
  __shared__ int shared_class[kBlockRows], shared_has_nan[kBlockRows];
  if (warp == 0) {
    shared_has_nan[lane] = 0;
    shared_lowest[lane] = 256;
    shared_highest[lane] = -1;
    shared_class[lane] = 0;
  }
  __syncthreads();

  // --- The largest and the smallest scale of each row.
  uint32_t kept[kKeptWords];
#pragma unroll
  for (int i = 0; i < kKeptWords; ++i) {
    const int word = warp + i * kWarps;
    if (exists && word < num_words) kept[i] = ScaleWord(scales, word, num_groups);
  }
  Range range;
  if (exists) {
#pragma unroll
    for (int i = 0; i < kKeptWords; ++i) {
      if (warp + i * kWarps < num_words) range.IncludeAll(kept[i]);
    }
    for (int word = warp + kKeptWords * kWarps; word < num_words; word += kWarps) {
      range.IncludeAll(ScaleWord(scales, word, num_groups));
    }
    atomicMin(&shared_lowest[lane], range.lowest);
    atomicMax(&shared_highest[lane], range.highest);
    if (range.has_nan) shared_has_nan[lane] = 1;
  }
  __syncthreads();
  range = {shared_lowest[lane], shared_highest[lane], shared_has_nan[lane] != 0};
  const bool is_plain = !range.has_nan && range.highest - range.lowest < kReferenceField &&
                        range.highest >= kMinReference && range.highest <= kMaxReference;
  const bool needs_values = exists && !is_plain;
  const bool any_needs_values = __syncthreads_or(needs_values);

  // --- Rows that look wide may owe it to groups of zeros, whose scale is only a convention.
  if (any_needs_values) {
    if (warp == 0 && needs_values) shared_highest[lane] = -1;
    __syncthreads();
  }
  if (needs_values) {
    Range live;
    for (int word = warp; word < num_words; word += kWarps) {
      const uint32_t bytes = ScaleWord(scales, word, num_groups);
      for (int i = 0; i < 4; ++i) {
        const int byte = bytes >> (8 * i) & 0xff;
        if (byte > live.highest && !IsZeroGroup(values, 4 * word + i, num_groups)) {
          live.Include(byte);
        }
      }
    }
    atomicMax(&shared_highest[lane], live.highest);
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
  const uint32_t references = reference * 0x01010101u;
  const uint32_t top = (is_near ? kReferenceField : kReferenceExponent) * 0x01010101u;
  const uint32_t reach = (is_near ? kReferenceField - 1 : kWideOctaves) * 0x01010101u;
  const auto store = [&](int word, uint32_t bytes) {
    if (!exists) bytes = references;
    // Groups of zeros may be out of reach on either side: any multiplier will do for them.
    const uint32_t down = __vminu4(__vsubus4(references, bytes), reach);
    side.prepared.words[int64_t{word} * side.prepared.rows + row] =
        is_near ? top - down : (top - down) | __vcmpeq4(bytes, 0x01010101u * kNanScale);
  };
#pragma unroll
  for (int i = 0; i < kKeptWords; ++i) {
    if (warp + i * kWarps < num_words) store(warp + i * kWarps, kept[i]);
  }
  for (int word = warp + kKeptWords * kWarps; word < num_words; word += kWarps) {
    store(word, exists ? ScaleWord(scales, word, num_groups) : 0);
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
