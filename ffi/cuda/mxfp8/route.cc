// The choice of a kernel, and the one place that launches any of them.
#include "route.h"

#include "../../error.h"
#include "../check.h"
#include "cublaslt.h"
#include "gemm_sm90.h"
#include "quantize.h"
#include "small.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int kHopper = 90;
constexpr int kBlackwell = 100;

Choice ChooseOnHopper(const Shape& shape, int scale_group) {
  const auto& [m, n, k, output, has_bias] = shape;
  if (SmallSupports(m, n, k)) {
    return {Route::kSmall, 0, "few tokens: the weight streams once, exact products, fp32 sums"};
  }
  const Choice exact{Route::kGemm, GemmSm90WorkspaceBytes(m, n, k),
                     "decoded to 16 bits in the kernel, exact products, fp32 sums"};
  if (scale_group != kTile || !BlockScaledSupports(m, n, k)) return exact;
  std::string why_not;
  if (!BlockScaledAvailable(&why_not)) {
    return {exact.route, exact.workspace_bytes, exact.reason + "; " + why_not};
  }
  return {Route::kBlockScaled, BlockScaledWorkspaceBytes(m, n, k, output, has_bias),
          "cuBLASLt's fp8 product with one scale per 128 columns"};
}

Choice ChooseOnBlackwell(const Shape& shape) {
  const auto& [m, n, k, output, has_bias] = shape;
  std::string why_not = "cuBLASLt takes outputs in multiples of 4 only";
  if (Mxfp8NativeSupports(m, n, k) && Mxfp8NativeAvailable(&why_not)) {
    return {Route::kNative, Mxfp8NativeWorkspaceBytes(m, n, k, output, has_bias),
            "cuBLASLt's MXFP8 product on block-scaled tensor cores"};
  }
  return {Route::kNone, 0, why_not};
}

}  // namespace

Choice ChooseRoute(int compute_capability, const Shape& shape, int scale_group) {
  if (compute_capability == kHopper) return ChooseOnHopper(shape, scale_group);
  if (compute_capability >= kBlackwell) return ChooseOnBlackwell(shape);
  return {Route::kNone, 0,
          Concat("no kernel for compute capability ", compute_capability / 10, ".",
                 compute_capability % 10)};
}

void LoadKernels() {
  static auto& once = *new OncePerDevice;
  once([] {
    int major = 0;
    CheckCuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, CurrentDevice()),
              "cudaDeviceGetAttribute");
    LoadQuantizeKernels();
    LoadCublasLtKernels();
    if (major != kHopper / 10) return;
    LoadGemmSm90Kernels();
    LoadSmallKernels();
  });
}

void Prepare(Route route, const MultiplyCall& call, void* workspace, int64_t workspace_bytes) {
  if (route == Route::kBlockScaled) PrepareBlockScaled(call, workspace, workspace_bytes);
  if (route == Route::kNative) PrepareMxfp8Native(call, workspace, workspace_bytes);
}

void Launch(Route route, const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
            cudaStream_t stream) {
  switch (route) {
    case Route::kSmall:
      return LaunchSmall(call, stream);
    case Route::kGemm:
      return LaunchGemmSm90(call, workspace, workspace_bytes, stream);
    case Route::kBlockScaled:
      return LaunchBlockScaled(call, workspace, workspace_bytes, stream);
    case Route::kNative:
      return LaunchMxfp8Native(call, workspace, workspace_bytes, stream);
    case Route::kNone:
      break;
  }
  throw Error(Concat("route ", int(route), " of an MXFP8 product has no kernel"));
}

}  // namespace jax_pcie::cuda::mxfp8
