// A warp takes a few units of 256 consecutive values of a row, eight a lane, so that loads are 16
// bytes wide and a group of 32 is four lanes. Bound by memory: 3 bytes a value from bf16.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../codec.h"
#include "../../error.h"
#include "../launch.h"
#include "../ptx_sm90.cuh"
#include "quantize.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int kLaneValues = 8;
constexpr int kUnitValues = 32 * kLaneValues;
constexpr int kThreads = 256;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kOneScale = 127, kNanScale = 255;

// Eight values as fp32, widened exactly.
struct Lane {
  float values[kLaneValues];
};

__device__ __forceinline__ Lane Widened(const __nv_bfloat16* x) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(x));
  const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
  Lane lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lane.values[2 * i] = __uint_as_float(words[i] << 16);
    lane.values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
  }
  return lane;
}

__device__ __forceinline__ Lane Widened(const __half* x) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(x));
  const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
  Lane lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    lane.values[2 * i] = pair.x;
    lane.values[2 * i + 1] = pair.y;
  }
  return lane;
}

__device__ __forceinline__ Lane Widened(const float* x) {
  const float4 low = __ldcs(reinterpret_cast<const float4*>(x));
  const float4 high = __ldcs(reinterpret_cast<const float4*>(x) + 1);
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

// The smallest power of two with which `amax` (fp32 bits, finite) fits into 448, as a scale byte.
__device__ __forceinline__ uint32_t ScaleByte(uint32_t amax) {
  if (amax == 0) return kOneScale;
  // 448 is 1.75 * 2^8: a larger fraction than .75 carries into the next octave.
  const int octave = static_cast<int>((amax + 0x1fffff) >> 23);
  return max(octave - 8, 0);
}

// Two E4M3 bytes of finite values or NaN, which becomes 0x7f.
__device__ __forceinline__ uint32_t E4m3Pair(float first, float second) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  return ptx::CvtE4m3x2F32(first, second);
#else
  const auto encode = [](float v) { return IsNan(v) ? kE4m3Nan : E4m3FromFloat(v); };
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

template <class Input, int kScaleGroup, int kUnits>
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const Input* __restrict__ x, QuantizeCall call, int units_per_row) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int64_t first_unit = warp * kUnits;
  int64_t row = first_unit / units_per_row;
  int unit = static_cast<int>(first_unit % units_per_row);
  if (row >= call.rows) return;

  int64_t rows[kUnits];
  int columns[kUnits];
  Lane lanes[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    rows[i] = row;
    columns[i] = unit * kUnitValues + lane * kLaneValues;
    const bool exists = row < call.rows && columns[i] < call.columns;
    lanes[i] = exists ? Widened(x + row * call.columns + columns[i]) : Lane{};
    if (!exists) columns[i] = -1;
    if (++unit == units_per_row) {
      unit = 0;
      ++row;
    }
  }
  int64_t start = call.first_column;
  bool is_misplaced = false;
  if (start < 0) {
    const int32_t column = __ldg(call.device_column);
    is_misplaced = column < 0;
    start = is_misplaced ? ~column : column;
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    uint32_t scale;
    const uint2 bytes = Encoded<kScaleGroup>(lanes[i], &scale);
    if (columns[i] < 0) continue;
    const int64_t at = rows[i] * call.stride + start + columns[i];
    *reinterpret_cast<uint2*>(call.values + at) = bytes;
    if (lane % 4 == 0) {
      call.scales[at / kGroup] = static_cast<uint8_t>(is_misplaced ? kNanScale : scale);
    }
  }
}

template <class Input, int kScaleGroup>
void LaunchGroup(const QuantizeCall& call, cudaStream_t stream) {
  const int64_t units_per_row = (call.columns + kUnitValues - 1) / kUnitValues;
  const int64_t num_units = call.rows * units_per_row;
  constexpr int kWarps = kThreads / 32;
  const auto launch = [&]<int kUnits>() {
    const int64_t num_ctas = (num_units + kUnits * kWarps - 1) / (kUnits * kWarps);
    Require(num_ctas <= INT32_MAX, "an array of ", call.rows, " x ", call.columns,
            " is more than one call can quantise");
    QuantizeKernel<Input, kScaleGroup, kUnits>
        <<<static_cast<unsigned>(num_ctas), kThreads, 0, stream>>>(
            static_cast<const Input*>(call.x), call, static_cast<int>(units_per_row));
  };
  // Four loads in flight a lane where there is work for all; few rows are spread as thinly as can
  // be.
  constexpr int64_t kManyUnits = 132 * 64 * 4;
  if (num_units >= kManyUnits) {
    launch.template operator()<sizeof(Input) == 2 ? 4 : 2>();
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

void LaunchQuantize(const QuantizeCall& call, cudaStream_t stream) {
  if (call.rows == 0 || call.columns == 0) return;
  switch (call.input) {
    case InputType::kBf16:
      return LaunchInput<__nv_bfloat16>(call, stream);
    case InputType::kF16:
      return LaunchInput<__half>(call, stream);
    case InputType::kF32:
      return LaunchInput<float>(call, stream);
  }
}

}  // namespace jax_pcie::cuda::mxfp8
