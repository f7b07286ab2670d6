// PTX of Hopper's asynchronous units, one function an instruction, named after it: mbarriers, bulk
// and tensor copies, warpgroup products, register budgets. Plain PTX is in `ptx.cuh`.
//
// Everything here is for sm_90a only: kernels that call it are compiled to an empty body elsewhere.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_pcie::ptx {

// Shared memory is named by 32-bit addresses here: arithmetic on them is cheap, and a kernel that
// is short of registers does not derive them anew in its inner loop, as compilers do with pointers.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The same value, which the compiler has to keep: it cannot know how to compute it again.
__device__ __forceinline__ uint32_t Kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ uint4 LoadShared128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t LoadShared32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t LoadShared8(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void StoreShared128(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// --- mbarriers

__device__ __forceinline__ void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engines.
__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ void MbarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void MbarrierArriveExpectTx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void MbarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      "again:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra finished;\n"
      " bra again;\n"
      "finished:\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

// --- Into the first-level cache.

__device__ __forceinline__ void PrefetchL1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" : : "l"(global) : "memory");
}

// --- Flags between CTAs of a GPU

__device__ __forceinline__ void StoreReleaseGpu(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t LoadAcquireGpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// --- Copies by the copy engines, which complete on an mbarrier.

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

__device__ __forceinline__ void CopyTensor2d(uint32_t shared, const CUtensorMap* map, int column,
                                             int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(shared), "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void CopyBulk(uint32_t shared, const void* global, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared), "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// --- Ordering between ordinary stores and what the tensor cores read.

__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// --- Register budgets of a warpgroup.

template <int kRegisters>
__device__ __forceinline__ void SetMaxNRegInc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void SetMaxNRegDec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// --- Barrier of the first `threads` threads that name it.

__device__ __forceinline__ void BarrierSync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// --- E4M3 conversions, two values at a time; the low byte is the first value.

__device__ __forceinline__ uint32_t CvtF16x2E4m3x2(uint32_t low_two_bytes) {
  uint32_t halves;
  asm("{\n"
      " .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %1;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}"
      : "=r"(halves)
      : "r"(low_two_bytes));
  return halves;
}

__device__ __forceinline__ uint32_t CvtF16x2E4m3x2High(uint32_t high_two_bytes) {
  uint32_t halves;
  asm("{\n"
      " .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %1;\n"
      " cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}"
      : "=r"(halves)
      : "r"(high_two_bytes));
  return halves;
}

__device__ __forceinline__ uint32_t CvtE4m3x2F32(float first, float second) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  return bytes;
}

// --- Warpgroup products.

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

__device__ __forceinline__ void WgmmaCommitGroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

template <int kPending>
__device__ __forceinline__ void WgmmaWaitGroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// d += a b: `a` are the fragments [64, 16] of a warpgroup, `b` describes [16, 128] in shared
// memory.
__device__ __forceinline__ void WgmmaM64N128K16F16(float (&d)[64], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "{\n"
      " .reg .pred accumulate;\n"
      " setp.eq.u32 accumulate, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      " %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void WgmmaM64N128K16Bf16(float (&d)[64], const uint32_t (&a)[4],
                                                    uint64_t b) {
  asm volatile(
      "{\n"
      " .reg .pred accumulate;\n"
      " setp.eq.u32 accumulate, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      " %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace jax_pcie::ptx
