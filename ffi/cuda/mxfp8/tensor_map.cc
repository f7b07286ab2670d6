// Tensor maps are made by the driver, on the host, at each launch: they hold addresses.
#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include "../../error.h"
#include "../check.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

// Through the runtime, so that the module needs no driver library to be imported.
auto EncodeTiled() {
  using Function = decltype(&cuTensorMapEncodeTiled);
  static const Function function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CheckCuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                               cudaEnableDefault, &found),
              "cudaGetDriverEntryPointByVersion");
    Require(found == cudaDriverEntryPointSuccess,
            "the CUDA driver has no cuTensorMapEncodeTiled: ", "it is older than 12.0");
    return reinterpret_cast<Function>(entry);
  }();
  return function;
}

}  // namespace

CUtensorMap MapOfBytes(const void* base, int64_t rows, int64_t columns, int64_t stride_bytes,
                       int box_rows) {
  const cuuint64_t extent[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride_bytes)};
  const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      EncodeTiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), extent,
                    strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  Require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with CUresult ", int(result),
          " for a matrix of ", rows, " x ", columns, " bytes, stride ", stride_bytes);
  return map;
}

}  // namespace jax_pcie::cuda::mxfp8
