#include <mutex>

#include "../../error.h"
#include "../launch.h"
#include "gemm_sm90.cuh"
#include "gemm_sm90.h"
#include "tensor_map.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

int64_t RoundUpTo(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

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

}  // namespace

int64_t GemmSm90WorkspaceBytes(int64_t rows, int64_t num_outputs, int64_t num_columns) {
  return PreparedScales::WorkspaceBytes(RoundUpTo(rows, kTileRows), num_columns) +
         PreparedScales::WorkspaceBytes(RoundUpTo(num_outputs, kTileOutputs), num_columns);
}

void LaunchGemmSm90(const MultiplyCall& call, void* workspace, cudaStream_t stream) {
  if (call.x.rows == 0 || call.w.rows == 0) return;
  const int64_t k = call.num_columns;
  const int64_t rows = RoundUpTo(call.x.rows, kTileRows);
  const int64_t outputs = RoundUpTo(call.w.rows, kTileOutputs);
  const int64_t tiles = (rows / kTileRows) * (outputs / kTileOutputs);
  Require(rows <= INT32_MAX && outputs <= INT32_MAX && k <= INT32_MAX && tiles <= INT32_MAX,
          "an MXFP8 product of ", call.x.rows, " x ", call.w.rows, " x ", k, " is too large");
  void* const w_workspace = static_cast<char*>(workspace) + PreparedScales::WorkspaceBytes(rows, k);
  const GemmParams params{call,
                          PreparedScales::At(workspace, rows, k),
                          PreparedScales::At(w_workspace, outputs, k),
                          static_cast<int>(RoundUpTo(k, kTile) / kTile),
                          static_cast<int>(rows / kTileRows),
                          static_cast<int>(outputs / kTileOutputs)};
  LaunchPrepareScales(call.x, params.x, call.w, params.w, k, stream);

  int device = 0, num_sms = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  CheckCuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
            "cudaDeviceGetAttribute");
  const int num_ctas = static_cast<int>(std::min<int64_t>(tiles, num_sms));
  const CUtensorMap x_map = MapOfBytes(call.x.values, call.x.rows, k, call.x.stride, kTileRows);
  const CUtensorMap w_map = MapOfBytes(call.w.values, call.w.rows, k, call.w.stride, kTileOutputs);
  switch (call.output) {
    case OutputType::kBf16:
      return LaunchBoth<__nv_bfloat16>(x_map, w_map, params, num_ctas, stream);
    case OutputType::kF16:
      return LaunchBoth<__half>(x_map, w_map, params, num_ctas, stream);
    case OutputType::kF32:
      return LaunchBoth<float>(x_map, w_map, params, num_ctas, stream);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
