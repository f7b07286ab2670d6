// A warp takes a few units of 256 consecutive values of a row, eight a lane, so that loads are 16
// bytes wide and a group of 32 is four lanes. Bound by memory: 3 bytes a value from bf16.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "../../codec.h"
#include "../../error.h"
#include "../check.h"
#include "../ptx_sm90.cuh"
#include "quantize.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int kLaneValues = 8;
constexpr int kUnitValues = 32 * kLaneValues;
constexpr int kThreads = 256;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kOneScale = 127, kNanScale = 255;

// Eight values as they are in memory: a lane holds several before it looks at any.
struct Raw16 {
  uint4 words;
};
struct Raw32 {
  float4 low, high;
};

// Ordinary loads: with those for streaming (`__ldcs`) the whole takes 7 % longer.
__device__ __forceinline__ Raw16 Load(const __nv_bfloat16* x) {
  return {*reinterpret_cast<const uint4*>(x)};
}
__device__ __forceinline__ Raw16 Load(const __half* x) {
  return {*reinterpret_cast<const uint4*>(x)};
}
__device__ __forceinline__ Raw32 Load(const float* x) {
  return {reinterpret_cast<const float4*>(x)[0], reinterpret_cast<const float4*>(x)[1]};
}

// The same as fp32, widened exactly.
struct Lane {
  float values[kLaneValues];
};

template <class Input>
__device__ __forceinline__ Lane Widened(const Raw16& raw) {
  const uint32_t words[] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
  Lane lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if constexpr (std::is_same_v<Input, __half>) {
      pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    } else {
      pair = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000)};
    }
    lane.values[2 * i] = pair.x;
    lane.values[2 * i + 1] = pair.y;
  }
  return lane;
}

template <class Input>
__device__ __forceinline__ Lane Widened(const Raw32& raw) {
  return {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
          raw.high.x, raw.high.y, raw.high.z, raw.high.w};
}

// The smallest power of two with which `amax` (fp32 bits, finite) fits into 448, as a scale byte.
__device__ __forceinline__ uint32_t ScaleByte(uint32_t amax) {
  // 448 is 1.75 * 2^8: a larger fraction than .75 carries into the next octave.
  const int octave = static_cast<int>((amax + 0x1fffff) >> 23);
  return amax == 0 ? kOneScale : max(octave - 8, 0);
}

// Two E4M3 bytes of finite values or NaN, which becomes 0x7f.
__device__ __forceinline__ uint32_t E4m3Pair(float first, float second) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  return ptx::CvtE4m3x2F32(first, second);
#else
  const auto encode = [](float v) { return uint32_t{IsNan(v) ? kE4m3Nan : E4m3FromFloat(v)}; };
  return encode(first) | encode(second) << 8;
#endif
}

// Four lanes share a scale byte, and with groups of 128 sixteen do; all lanes of a warp call this.
template <int kScaleGroup>
__device__ __forceinline__ uint2 Encoded(Lane lane, uint32_t* scale) {
  uint32_t amax = 0;
#pragma unroll
  for (float value : lane.values) amax = max(amax, __float_as_uint(value) & 0x7fffffff);
  if (__any_sync(0xffffffff, amax >= kInfinity)) {  // rare: non-finite values become NaN in place
    amax = 0;
#pragma unroll
    for (float& value : lane.values) {
      const uint32_t magnitude = __float_as_uint(value) & 0x7fffffff;
      if (magnitude >= kInfinity) {
        value = __uint_as_float(0x7fffffff);
      } else {
        amax = max(amax, magnitude);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kScaleGroup / kLaneValues; step *= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffff, amax, step));
  }
  *scale = ScaleByte(amax);
  const float inverse = __uint_as_float((254 - *scale) << 23);  // 2^(127 - scale), at least 2^-120
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = E4m3Pair(lane.values[2 * i] * inverse, lane.values[2 * i + 1] * inverse);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// `kUnits` consecutive units of a row a warp; their scale bytes, which are 8 a unit, are collected
// and stored together, because bytes stored unit by unit cost as much as the values.
template <class Input, int kScaleGroup, int kUnits>
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const Input* __restrict__ x, QuantizeCall call, uint32_t warps_per_row) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const uint32_t row = warp / warps_per_row;
  if (row >= call.rows) return;
  const uint32_t first = (warp - row * warps_per_row) * (kUnits * kUnitValues);
  const auto num_columns = static_cast<uint32_t>(call.columns);
  const Input* const from = x + int64_t{row} * num_columns + first + lane * kLaneValues;

  decltype(Load(x)) raw[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    raw[i] = {};
    if (first + i * kUnitValues + lane * kLaneValues < num_columns) {
      raw[i] = Load(from + i * kUnitValues);
    }
  }
  int64_t start = call.first_column;
  bool is_misplaced = false;
  if (start < 0) {
    const int32_t column = __ldg(call.device_column);
    is_misplaced = column < 0;
    start = is_misplaced ? ~column : column;
  }
  const int64_t at = int64_t{row} * call.stride + start + first;
  uint8_t* const values = call.values + at + lane * kLaneValues;
  uint32_t own_scale = 0;  // lane 8 u + g: group g of unit u
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    uint32_t scale;
    const uint2 bytes = Encoded<kScaleGroup>(Widened<Input>(raw[i]), &scale);
    if (first + i * kUnitValues + lane * kLaneValues < num_columns) {
      *reinterpret_cast<uint2*>(values + i * kUnitValues) = bytes;
    }
    scale = __shfl_sync(0xffffffff, scale, lane % 8 * 4);
    if (lane / 8 == i) own_scale = scale;
  }
  if (lane < 8 * kUnits && first + lane * kGroup < num_columns) {
    call.scales[at / kGroup + lane] = static_cast<uint8_t>(is_misplaced ? kNanScale : own_scale);
  }
}

template <class Input>
void LoadInput() {
  LoadKernel(QuantizeKernel<Input, kGroup, 1>);
  LoadKernel(QuantizeKernel<Input, kGroup, 4>);
  LoadKernel(QuantizeKernel<Input, kTile, 1>);
  LoadKernel(QuantizeKernel<Input, kTile, 4>);
}

template <class Input, int kScaleGroup>
void LaunchGroup(const QuantizeCall& call, cudaStream_t stream) {
  const auto launch = [&]<int kUnits>() {
    constexpr int64_t kWarpValues = kUnits * kUnitValues, kWarps = kThreads / 32;
    const int64_t warps_per_row = CeilDiv(call.columns, kWarpValues);
    const int64_t num_ctas = CeilDiv(call.rows * warps_per_row, kWarps);
    Require(num_ctas * kWarps <= UINT32_MAX && call.columns <= INT32_MAX, "an array of ", call.rows,
            " x ", call.columns, " is more than one call can quantise");
    QuantizeKernel<Input, kScaleGroup, kUnits>
        <<<static_cast<unsigned>(num_ctas), kThreads, 0, stream>>>(
            static_cast<const Input*>(call.x), call, static_cast<uint32_t>(warps_per_row));
  };
  // Four loads in flight a lane where there is work for all; few rows are spread as thinly as can
  // be.
  constexpr int64_t kManyValues = int64_t{132} * 64 * 4 * kUnitValues;
  if (call.rows * call.columns >= kManyValues) {
    launch.template operator()<4>();
  } else {
    launch.template operator()<1>();
  }
  CheckCuda(cudaGetLastError(), "QuantizeKernel");
}

template <class Input>
void LaunchInput(const QuantizeCall& call, cudaStream_t stream) {
  if (call.scale_group == kGroup) return LaunchGroup<Input, kGroup>(call, stream);
  LaunchGroup<Input, kTile>(call, stream);
}

}  // namespace

void LoadQuantizeKernels() {
  LoadInput<__nv_bfloat16>();
  LoadInput<__half>();
  LoadInput<float>();
}

void LaunchQuantize(const QuantizeCall& call, cudaStream_t stream) {
  if (call.rows == 0 || call.columns == 0) return;
  Require(call.scale_group == kGroup || call.scale_group == kTile, "a scale group of ",
          call.scale_group, " columns is not one of ", kGroup, " and ", kTile);
  // (A column in device memory is checked where it is computed.)
  const int64_t first_column = std::max<int64_t>(call.first_column, 0);
  Require((call.columns | call.stride | first_column) % kGroup == 0, "a slice of ", call.columns,
          " columns at column ", first_column, " of ", call.stride, " is not of whole groups of ",
          kGroup);
  const auto addresses =
      reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.values);
  Require(addresses % 16 == 0, "an MXFP8 array at ", call.x, " or ", call.values,
          " is not aligned to 16 bytes");
  switch (call.input) {
    case ElementType::kBf16:
      return LaunchInput<__nv_bfloat16>(call, stream);
    case ElementType::kF16:
      return LaunchInput<__half>(call, stream);
    case ElementType::kF32:
      return LaunchInput<float>(call, stream);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
