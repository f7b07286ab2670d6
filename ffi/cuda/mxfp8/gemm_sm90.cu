// Launches of the exact product: scales are prepared, near tiles multiplied from f16, and the wide
// ones, if there are any, from bf16. Owns the layout of the workspace.
#include <algorithm>

#include "../../codec.h"
#include "../../error.h"
#include "../check.h"
#include "gemm_sm90.cuh"
#include "gemm_sm90.h"
#include "tensor_map.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

template <class Decoder, class Output>
void LaunchKernel(const CUtensorMap& x_map, const CUtensorMap& w_map, const GemmParams& params,
                  int num_ctas, cudaStream_t stream) {
  const auto kernel = GemmSm90Kernel<Decoder, Output>;
  constexpr int kSharedBytes = sizeof(GemmShared) + 1024;  // room to align it
  CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "cudaFuncSetAttribute(GemmSm90Kernel)");
  kernel<<<num_ctas, kThreads, kSharedBytes, stream>>>(x_map, w_map, params);
  CheckCuda(cudaGetLastError(), "GemmSm90Kernel");
}

template <class Output>
void LaunchBoth(const CUtensorMap& x_map, const CUtensorMap& w_map, const GemmParams& params,
                int num_ctas, cudaStream_t stream) {
  LaunchKernel<DecodeF16, Output>(x_map, w_map, params, num_ctas, stream);
  LaunchKernel<DecodeBf16, Output>(x_map, w_map, params, num_ctas, stream);  // the wide tiles
}

template <class Output>
void LoadBoth() {
  LoadKernel(GemmSm90Kernel<DecodeF16, Output>);
  LoadKernel(GemmSm90Kernel<DecodeBf16, Output>);
}

// Shapes without a GPU at hand: the workspace must be known when a program is lowered.
constexpr int kMaxCtas = 144;
constexpr int kMinPartPairs = 3;  // of stages that are worth leaving and adding sums

struct Tiles {
  int64_t padded_rows, padded_outputs, row_tiles, output_tiles, num_pairs;

  Tiles(int64_t rows, int64_t num_outputs, int64_t num_columns)
      : padded_rows(RoundUp(rows, kTileRows)),
        padded_outputs(RoundUp(num_outputs, kTileOutputs)),
        row_tiles(padded_rows / kTileRows),
        output_tiles(padded_outputs / kTileOutputs),
        num_pairs(NumScaleWords(num_columns) / 2) {}

  int64_t count() const { return row_tiles * output_tiles; }
};

// Splits what whole waves leave, unless that is nothing, nearly a wave, or too little work.
TileSplit SplitTiles(const Tiles& tiles, int num_sms) {
  const auto count = static_cast<int>(tiles.count());
  const int left = count % num_sms;
  const bool worth = left > 0 && left <= num_sms * 15 / 16 &&
                     left * tiles.num_pairs >= int64_t{num_sms} * kMinPartPairs;
  if (!worth) return {count, 0, std::min(count, num_sms), 0, 0, nullptr, nullptr};
  const auto left_pairs = static_cast<int>(left * tiles.num_pairs);
  return {count - left,         left,    num_sms, left_pairs / num_sms,
          left_pairs % num_sms, nullptr, nullptr};
}

constexpr int64_t kFlagBytes = 2048;
static_assert(kMaxCtas * kConsumers * sizeof(uint32_t) <= kFlagBytes);
constexpr int64_t kPartialBytes = int64_t{kMaxCtas} * kConsumers * kPartialVectors * sizeof(float4);

// Where the parts of the workspace lie, in bytes from its start, where the flags are.
struct WorkspaceLayout {
  int64_t partials, x_scales, w_scales, total_bytes;

  static WorkspaceLayout For(const Tiles& tiles, int64_t num_columns) {
    WorkspaceLayout layout{};
    layout.partials = kFlagBytes;
    layout.x_scales = layout.partials + kPartialBytes;
    layout.w_scales =
        layout.x_scales + PreparedScales::WorkspaceBytes(tiles.padded_rows, num_columns);
    layout.total_bytes =
        layout.w_scales + PreparedScales::WorkspaceBytes(tiles.padded_outputs, num_columns);
    return layout;
  }
};

}  // namespace

int64_t GemmSm90WorkspaceBytes(int64_t rows, int64_t num_outputs, int64_t num_columns) {
  return WorkspaceLayout::For({rows, num_outputs, num_columns}, num_columns).total_bytes;
}

void LoadGemmSm90Kernels() {
  LoadScaleKernels();
  LoadBoth<__nv_bfloat16>();
  LoadBoth<__half>();
  LoadBoth<float>();
}

void LaunchGemmSm90(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                    cudaStream_t stream) {
  if (call.x.rows == 0 || call.w.rows == 0) return;
  const int64_t k = call.num_columns;
  const Tiles tiles(call.x.rows, call.w.rows, k);
  Require(tiles.padded_rows <= INT32_MAX && tiles.padded_outputs <= INT32_MAX &&
              k <= INT32_MAX - kTile && tiles.count() <= INT32_MAX / 2,
          "an MXFP8 product of ", call.x.rows, " x ", call.w.rows, " x ", k, " is too large");
  const auto layout = WorkspaceLayout::For(tiles, k);
  Require(workspace_bytes >= layout.total_bytes, "a workspace of ", workspace_bytes,
          " bytes where ", layout.total_bytes, " are needed");
  int device = 0, num_sms = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  CheckCuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
            "cudaDeviceGetAttribute");
  num_sms = std::min(num_sms, kMaxCtas);

  auto* const flags = static_cast<uint32_t*>(workspace);
  char* const base = static_cast<char*>(workspace);
  TileSplit split = SplitTiles(tiles, num_sms);
  split.partials = reinterpret_cast<float4*>(base + layout.partials);
  split.are_here = flags;
  const GemmParams params{call,
                          PreparedScales::At(base + layout.x_scales, tiles.padded_rows, k),
                          PreparedScales::At(base + layout.w_scales, tiles.padded_outputs, k),
                          static_cast<int>(tiles.num_pairs),
                          static_cast<int>(tiles.row_tiles),
                          static_cast<int>(tiles.output_tiles),
                          split};
  LaunchPrepareScales(call.x, params.x, call.w, params.w, k, flags, kMaxCtas * kConsumers, stream);

  const int num_ctas = split.num_ctas;
  const CUtensorMap x_map = MapOfBytes(call.x.values, call.x.rows, k, call.x.stride, kTileRows);
  const CUtensorMap w_map = MapOfBytes(call.w.values, call.w.rows, k, call.w.stride, kTileOutputs);
  switch (call.output) {
    case ElementType::kBf16:
      return LaunchBoth<__nv_bfloat16>(x_map, w_map, params, num_ctas, stream);
    case ElementType::kF16:
      return LaunchBoth<__half>(x_map, w_map, params, num_ctas, stream);
    case ElementType::kF32:
      return LaunchBoth<float>(x_map, w_map, params, num_ctas, stream);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
