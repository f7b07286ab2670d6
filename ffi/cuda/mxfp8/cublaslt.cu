// The two problems, the kernels around the library call (scales before, bias and rounding after)
// and the workspace that holds what passes between them.
#include <algorithm>
#include <cstddef>

#include "../../error.h"
#include "../../numerics.h"
#include "../check.h"
#include "cublaslt.h"
#include "cublaslt_product.h"
#include "scale_layout.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

using cublaslt::DataType;
using cublaslt::ScaleMode;

// --- The two problems: what differs between them.

struct BlockScaled {
  static constexpr ScaleMode kXMode = ScaleMode::kVec128F32;
  static constexpr ScaleMode kWMode = ScaleMode::kBlock128x128F32;
  static constexpr int64_t kMinVersion = 120900;
  static constexpr const char* kNeeds = "compute capability 9.x";
  static constexpr bool Runs(int major) { return major == 9; }

  // M and N are the library's N and M: "must be multiples of 4" (Scaling factors layouts).
  static constexpr bool Supports(int64_t m, int64_t n, int64_t k) {
    return m % 4 == 0 && n % 4 == 0 && k % kTile == 0;
  }
  static constexpr int64_t XScaleBytes(int64_t m, int64_t k) {
    return FloatScaleLayout::PerRow(m, k).NumBytes();
  }
  static constexpr int64_t WScaleBytes(int64_t n, int64_t k) {
    return FloatScaleLayout::PerTile(n, k).NumBytes();
  }
  static void LaunchScales(const MultiplyCall& call, void* x_scales, void* w_scales,
                           cudaStream_t stream);
};

struct Native {
  static constexpr ScaleMode kXMode = ScaleMode::kVec32Ue8m0;
  static constexpr ScaleMode kWMode = ScaleMode::kVec32Ue8m0;
  static constexpr int64_t kMinVersion = 120800;
  static constexpr const char* kNeeds = "compute capability 10.0 or higher";
  static constexpr bool Runs(int major) { return major >= 10; }

  // fp8 needs "16-byte alignment" of what is contiguous: k of x and w, and n of an fp32 y.
  static constexpr bool Supports(int64_t m, int64_t n, int64_t k) {
    return m > 0 && n % 4 == 0 && k % kGroup == 0;
  }
  static constexpr int64_t XScaleBytes(int64_t m, int64_t k) {
    return SwizzledScales::NumBytes(m, k / kGroup);
  }
  static constexpr int64_t WScaleBytes(int64_t n, int64_t k) {
    return SwizzledScales::NumBytes(n, k / kGroup);
  }
  static void LaunchScales(const MultiplyCall& call, void* x_scales, void* w_scales,
                           cudaStream_t stream);
};

template <class Problem>
bool Supports(int64_t m, int64_t n, int64_t k) {
  const bool in_range = std::min({m, n, k}) > 0 && std::max({m, n, k}) <= INT32_MAX;
  return in_range && Problem::Supports(m, n, k);
}

template <class Problem>
bool Available(std::string* why_not) {
  const cublaslt::Library& library = cublaslt::TheLibrary();
  if (!library.error.empty()) {
    *why_not = library.error;
    return false;
  }
  if (library.version < Problem::kMinVersion) {
    *why_not = Concat("cuBLASLt ", library.version, " was loaded, ", Problem::kMinVersion,
                      " or newer is needed");
    return false;
  }
  int device = 0, major = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  CheckCuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
            "cudaDeviceGetAttribute");
  if (!Problem::Runs(major)) {
    *why_not = Concat("GPU ", device, " has compute capability ", major, ".x, needed is ",
                      Problem::kNeeds);
    return false;
  }
  return true;
}

// --- Scales.

struct FloatScales {
  FloatScaleLayout layout;
  const uint8_t* bytes;
  int64_t byte_step;  // between scale rows
  float* scales;
};

constexpr int kThreads = 128;
constexpr int kTilesPerThread = 8;  // their bytes share a sector of 32

// One thread a scale row, 8 K tiles each: loads are spread, stores of x's scales are contiguous.
__device__ __forceinline__ void ConvertScales(const FloatScales& operand) {
  const FloatScaleLayout& layout = operand.layout;
  const int64_t num_row_blocks = CeilDiv(layout.padded_rows, kThreads);
  const int64_t row = blockIdx.x % num_row_blocks * kThreads + threadIdx.x;
  const int64_t first_tile = blockIdx.x / num_row_blocks * kTilesPerThread;
  if (row >= layout.padded_rows) return;
  const uint8_t* bytes = operand.bytes + row * operand.byte_step;
  float scales[kTilesPerThread];  // all loads before the first store, which could alias them
#pragma unroll
  for (int i = 0; i < kTilesPerThread; ++i) {
    const int64_t tile = first_tile + i;
    const bool exists = row < layout.rows && tile < layout.tiles;
    scales[i] = exists ? Mxfp8::Value(bytes[tile * (kTile / kGroup)]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kTilesPerThread; ++i) {
    const int64_t tile = first_tile + i;
    if (tile >= layout.padded_tiles) break;
    operand.scales[row * layout.row_step + tile * layout.tile_step] = scales[i];
  }
}

__global__ void __launch_bounds__(kThreads) ScalesToFloatKernel(FloatScales x, FloatScales w) {
  if (blockIdx.y == 0) {
    ConvertScales(x);
  } else {
    ConvertScales(w);
  }
}

void BlockScaled::LaunchScales(const MultiplyCall& call, void* x_scales, void* w_scales,
                               cudaStream_t stream) {
  const FloatScales x{FloatScaleLayout::PerRow(call.x.rows, call.num_columns), call.x.scales,
                      call.x.stride / kGroup, static_cast<float*>(x_scales)};
  const FloatScales w{FloatScaleLayout::PerTile(call.w.rows, call.num_columns), call.w.scales,
                      call.w.stride / kGroup * kTile, static_cast<float*>(w_scales)};
  const auto num_ctas = [](const FloatScaleLayout& layout) {
    return CeilDiv(layout.padded_rows, kThreads) * CeilDiv(layout.padded_tiles, kTilesPerThread);
  };
  const int64_t ctas = std::max(num_ctas(x.layout), num_ctas(w.layout));
  ScalesToFloatKernel<<<dim3(static_cast<unsigned>(ctas), 2), kThreads, 0, stream>>>(x, w);
  CheckCuda(cudaGetLastError(), "ScalesToFloatKernel");
}

constexpr uint32_t kPaddingWord = 0x7f7f7f7fu;  // four scales of 1

// Four scale bytes of one row, from group `first` on; 127 for those that do not exist.
__device__ __forceinline__ uint32_t ScaleWord(const Operand& operand, int64_t row, int64_t first,
                                              int64_t num_groups) {
  if (row >= operand.rows) return kPaddingWord;
  const uint8_t* bytes = operand.scales + row * (operand.stride / kGroup) + first;
  if (first + 4 <= num_groups && reinterpret_cast<uintptr_t>(bytes) % sizeof(uint32_t) == 0) {
    return *reinterpret_cast<const uint32_t*>(bytes);
  }
  uint32_t word = kPaddingWord;
  for (int i = 0; i < 4 && first + i < num_groups; ++i) {
    word = (word & ~(0xffu << (8 * i))) | (uint32_t{bytes[i]} << (8 * i));
  }
  return word;
}

// One thread a chunk of 16 bytes: four rows, 32 apart, of one K tile.
__global__ void __launch_bounds__(kThreads)
    SwizzleScalesKernel(Operand operand, int64_t num_groups, int64_t num_chunks,
                        uint4* __restrict__ swizzled) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= num_chunks) return;
  const int64_t tiles_per_row = CeilDiv(num_groups, SwizzledScales::kTileGroups);
  const auto [row, first] = SwizzledScales::ChunkAt(index, tiles_per_row);
  swizzled[index] = make_uint4(ScaleWord(operand, row, first, num_groups),
                               ScaleWord(operand, row + 32, first, num_groups),
                               ScaleWord(operand, row + 64, first, num_groups),
                               ScaleWord(operand, row + 96, first, num_groups));
}

void Native::LaunchScales(const MultiplyCall& call, void* x_scales, void* w_scales,
                          cudaStream_t stream) {
  LaunchSwizzleScales(call.x, call.num_columns, static_cast<uint8_t*>(x_scales), stream);
  LaunchSwizzleScales(call.w, call.num_columns, static_cast<uint8_t*>(w_scales), stream);
}

// --- The end of a product whose sums were kept in fp32.

template <class Element>
struct alignas(4 * sizeof(Element)) Quad {
  Element elements[4];
};

// y = round(sums + bias). `sums` may be y. Threads keep four columns and walk down the rows.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(const float4* sums, const float* __restrict__ bias, Quad<Element>* y, int64_t m,
                 int64_t num_quads) {
  const int64_t quad = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (quad >= num_quads) return;
  float added[4] = {0.f, 0.f, 0.f, 0.f};
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) added[i] = bias[4 * quad + i];
  }
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    const float4 sum = sums[row * num_quads + quad];
    y[row * num_quads + quad] = {
        {Narrow<Element>(AddRn(sum.x, added[0])), Narrow<Element>(AddRn(sum.y, added[1])),
         Narrow<Element>(AddRn(sum.z, added[2])), Narrow<Element>(AddRn(sum.w, added[3]))}};
  }
}

template <class Element>
void LaunchFinish(const float* sums, const MultiplyCall& call, cudaStream_t stream) {
  constexpr int64_t kMaxRowCtas = 2048;
  const int64_t num_quads = call.w.rows / 4;
  const dim3 grid(static_cast<unsigned>(CeilDiv(num_quads, kThreads)),
                  static_cast<unsigned>(std::min(call.x.rows, kMaxRowCtas)));
  FinishKernel<Element>
      <<<grid, kThreads, 0, stream>>>(reinterpret_cast<const float4*>(sums), call.bias,
                                      static_cast<Quad<Element>*>(call.y), call.x.rows, num_quads);
  CheckCuda(cudaGetLastError(), "FinishKernel");
}

template <class Visitor>
void VisitOutput(ElementType output, Visitor&& visit) {
  switch (output) {
    case ElementType::kBf16:
      return visit.template operator()<Bf16>(DataType::kBf16);
    case ElementType::kF16:
      return visit.template operator()<F16>(DataType::kF16);
    case ElementType::kF32:
      return visit.template operator()<F32>(DataType::kF32);
  }
  throw Error(Concat("output type ", static_cast<int>(output), " is not one of 0, 1, 2"));
}

// --- The product.

// Where the sums go. The library's bias has y's type, which loses bits of an fp32 bias, and rows of
// y must lie a multiple of 16 bytes apart: otherwise fp32 sums first, then FinishKernel.
struct SumsPlace {
  bool in_workspace;  // else in y
  bool finish;

  static constexpr SumsPlace For(int64_t n, ElementType output, bool has_bias) {
    if (output == ElementType::kF32) return {false, has_bias};
    const bool separate = has_bias || n * 2 % cublaslt::kAlignment != 0;
    return {separate, separate};
  }
};

struct WorkspaceLayout {
  int64_t x_scales, w_scales, sums, scratch, total_bytes;

  template <class Problem>
  static constexpr WorkspaceLayout For(int64_t m, int64_t n, int64_t k, const SumsPlace& place) {
    constexpr int64_t kAlign = 256;
    WorkspaceLayout layout{};
    layout.w_scales = layout.x_scales + RoundUp(Problem::XScaleBytes(m, k), kAlign);
    layout.sums = layout.w_scales + RoundUp(Problem::WScaleBytes(n, k), kAlign);
    const int64_t sums_bytes = place.in_workspace ? m * n * int64_t{sizeof(float)} : 0;
    layout.scratch = layout.sums + RoundUp(sums_bytes, kAlign);
    layout.total_bytes = layout.scratch + cublaslt::kScratchBytes;
    return layout;
  }
};

template <class Problem>
int64_t WorkspaceBytes(int64_t m, int64_t n, int64_t k, ElementType output, bool has_bias) {
  return WorkspaceLayout::For<Problem>(m, n, k, SumsPlace::For(n, output, has_bias)).total_bytes;
}

void RequireAligned(const void* pointer, uintptr_t alignment, const char* name) {
  Require(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, name, " is at ", pointer,
          ", not at a multiple of ", alignment, " bytes");
}

// A call as the library is asked for it.
struct LibraryCall {
  SumsPlace place;
  std::byte* x_scales;
  std::byte* w_scales;
  cublaslt::Product product;
  cublaslt::ProductPointers pointers;
};

DataType TypeOf(ElementType type) {
  DataType found{};
  VisitOutput(type, [&]<class Element>(DataType data_type) { found = data_type; });
  return found;
}

template <class Problem>
LibraryCall Checked(const MultiplyCall& call, void* workspace, int64_t workspace_bytes) {
  const int64_t m = call.x.rows, n = call.w.rows, k = call.num_columns;
  Require(Supports<Problem>(m, n, k), "cuBLASLt cannot multiply x [", m, ", ", k, "] by w [", n,
          ", ", k, "]");
  const SumsPlace place = SumsPlace::For(n, call.output, call.bias != nullptr);
  const WorkspaceLayout layout = WorkspaceLayout::For<Problem>(m, n, k, place);
  Require(workspace_bytes >= layout.total_bytes, "the workspace has ", workspace_bytes,
          " bytes, needed are ", layout.total_bytes);
  RequireAligned(workspace, 256, "the workspace");
  RequireAligned(call.x.values, cublaslt::kAlignment, "x");
  RequireAligned(call.w.values, cublaslt::kAlignment, "w");
  RequireAligned(call.y, cublaslt::kAlignment, "y");

  auto* const base = static_cast<std::byte*>(workspace);
  std::byte* const x_scales = base + layout.x_scales;
  std::byte* const w_scales = base + layout.w_scales;
  void* const sums = place.in_workspace ? base + layout.sums : call.y;
  const DataType sums_type = place.in_workspace ? DataType::kF32 : TypeOf(call.output);
  return {place,
          x_scales,
          w_scales,
          {m, n, k, call.x.stride, call.w.stride, n, sums_type, Problem::kXMode, Problem::kWMode},
          {call.x.values, x_scales, call.w.values, w_scales, sums, base + layout.scratch}};
}

template <class Problem>
void PrepareCall(const MultiplyCall& call, void* workspace, int64_t workspace_bytes) {
  const LibraryCall checked = Checked<Problem>(call, workspace, workspace_bytes);
  cublaslt::Prepare(checked.product, checked.pointers);
}

template <class Problem>
void LaunchCall(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                cudaStream_t stream) {
  const LibraryCall checked = Checked<Problem>(call, workspace, workspace_bytes);
  Problem::LaunchScales(call, checked.x_scales, checked.w_scales, stream);
  cublaslt::Multiply(checked.product, checked.pointers, stream);
  if (!checked.place.finish) return;
  VisitOutput(call.output, [&]<class Element>(DataType) {
    LaunchFinish<Element>(static_cast<const float*>(checked.pointers.y), call, stream);
  });
}

}  // namespace

bool BlockScaledAvailable(std::string* why_not) { return Available<BlockScaled>(why_not); }
bool Mxfp8NativeAvailable(std::string* why_not) { return Available<Native>(why_not); }

bool BlockScaledSupports(int64_t m, int64_t n, int64_t k) { return Supports<BlockScaled>(m, n, k); }
bool Mxfp8NativeSupports(int64_t m, int64_t n, int64_t k) { return Supports<Native>(m, n, k); }

int64_t BlockScaledWorkspaceBytes(int64_t m, int64_t n, int64_t k, ElementType output,
                                  bool has_bias) {
  return WorkspaceBytes<BlockScaled>(m, n, k, output, has_bias);
}
int64_t Mxfp8NativeWorkspaceBytes(int64_t m, int64_t n, int64_t k, ElementType output,
                                  bool has_bias) {
  return WorkspaceBytes<Native>(m, n, k, output, has_bias);
}

void LoadCublasLtKernels() {
  LoadKernel(ScalesToFloatKernel);
  LoadKernel(SwizzleScalesKernel);
  LoadKernel(FinishKernel<Bf16>);
  LoadKernel(FinishKernel<F16>);
  LoadKernel(FinishKernel<F32>);
}

void PrepareBlockScaled(const MultiplyCall& call, void* workspace, int64_t workspace_bytes) {
  PrepareCall<BlockScaled>(call, workspace, workspace_bytes);
}
void PrepareMxfp8Native(const MultiplyCall& call, void* workspace, int64_t workspace_bytes) {
  PrepareCall<Native>(call, workspace, workspace_bytes);
}

void LaunchBlockScaled(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                       cudaStream_t stream) {
  LaunchCall<BlockScaled>(call, workspace, workspace_bytes, stream);
}
void LaunchMxfp8Native(const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
                       cudaStream_t stream) {
  LaunchCall<Native>(call, workspace, workspace_bytes, stream);
}

void LaunchSwizzleScales(const Operand& operand, int64_t num_columns, uint8_t* swizzled,
                         cudaStream_t stream) {
  RequireAligned(swizzled, SwizzledScales::kChunkBytes, "the swizzled scales");
  const int64_t num_groups = num_columns / kGroup;
  const int64_t num_chunks =
      SwizzledScales::NumBytes(operand.rows, num_groups) / SwizzledScales::kChunkBytes;
  if (num_chunks == 0) return;
  SwizzleScalesKernel<<<static_cast<unsigned>(CeilDiv(num_chunks, kThreads)), kThreads, 0,
                        stream>>>(operand, num_groups, num_chunks,
                                  reinterpret_cast<uint4*>(swizzled));
  CheckCuda(cudaGetLastError(), "SwizzleScalesKernel");
}

}  // namespace jax_pcie::cuda::mxfp8
