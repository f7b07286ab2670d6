// The part of cuBLASLt's C interface that block-scaled products need, found at run time.
//
// Own declarations of a stable ABI, so that building needs no cuBLAS headers and importing needs no
// library. Names, values and sizes: NVIDIA, "cuBLAS Library", chapter "Using the cuBLASLt API"
// (https://docs.nvidia.com/cuda/cublas), versions 12.8 to 13. Nothing here knows about MXFP8.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_pcie::cuda::cublaslt {

using Status = int;  // cublasStatus_t
inline constexpr Status kSuccess = 0;

// Opaque: cublasLtHandle_t, cublasLtMatmulDesc_t, ... point to these.
struct Context;
struct MatmulDesc;
struct MatrixLayout;
struct Preference;

struct Algo {  // cublasLtMatmulAlgo_t: plain data, valid for any call of the same problem
  uint64_t data[8];
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  Algo algo;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96 && offsetof(HeuristicResult, state) == 72);

enum class DataType : int { kF32 = 0, kF16 = 2, kBf16 = 14, kE4m3 = 28 };  // cudaDataType
enum class ComputeType : int { kF32 = 68 };                                // cublasComputeType_t
enum class ScaleMode : int32_t {  // cublasLtMatmulMatrixScale_t
  kVec32Ue8m0 = 2,                // E8M0 per 32 of a row, from 12.8
  kVec128F32 = 4,                 // fp32 per 128 of a row, from 12.9
  kBlock128x128F32 = 5,           // fp32 per 128 x 128, from 12.9
};
enum class DescAttribute : int {  // cublasLtMatmulDescAttributes_t
  kTransposeA = 3,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kFastAccumulation = 25,
  kAScaleMode = 31,
  kBScaleMode = 32,
};
enum class PreferenceAttribute : int {  // cublasLtMatmulPreferenceAttributes_t
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};
inline constexpr int32_t kTransposed = 1;             // CUBLAS_OP_T
inline constexpr uint32_t kReduceInComputeType = 2u;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE

struct Api {
  size_t (*get_version)();  // 10000 * major + 100 * minor + patch
  const char* (*get_status_name)(Status);
  Status (*create)(Context**);
  Status (*desc_create)(MatmulDesc**, ComputeType, DataType scale_type);
  Status (*desc_destroy)(MatmulDesc*);
  Status (*desc_set)(MatmulDesc*, DescAttribute, const void* value, size_t value_bytes);
  Status (*layout_create)(MatrixLayout**, DataType, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*layout_destroy)(MatrixLayout*);
  Status (*preference_create)(Preference**);
  Status (*preference_destroy)(Preference*);
  Status (*preference_set)(Preference*, PreferenceAttribute, const void* value, size_t value_bytes);
  Status (*get_heuristic)(Context*, MatmulDesc*, MatrixLayout* a, MatrixLayout* b, MatrixLayout* c,
                          MatrixLayout* d, Preference*, int num_requested, HeuristicResult*,
                          int* num_returned);
  Status (*matmul)(Context*, MatmulDesc*, const void* alpha, const void* a, MatrixLayout*,
                   const void* b, MatrixLayout*, const void* beta, const void* c, MatrixLayout*,
                   void* d, MatrixLayout*, const Algo*, void* workspace, size_t workspace_bytes,
                   cudaStream_t);
};

// The library as this process has it: `api` is complete if `error` is empty.
struct Library {
  Api api;
  int64_t version;
  std::string error;
};

// Loads it on the first call, from any thread.
const Library& TheLibrary();

}  // namespace jax_pcie::cuda::cublaslt
