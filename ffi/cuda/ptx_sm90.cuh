// PTX around Hopper's asynchronous units, one function an instruction, named after it: mbarriers,
// bulk and tensor copies, register budgets, and what its kernels read and convert with. Warpgroup
// products are in `wgmma.cuh`, what every kernel uses in `ptx.cuh`.
//
// Most of it is for sm_90a only: kernels that call it do nothing but trap elsewhere.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx.cuh"

namespace jax_pcie::ptx {

// Shared memory is named by 32-bit addresses here: arithmetic on them is cheap, and a kernel that
// is short of registers does not derive them anew in its inner loop, as compilers do with pointers.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
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

__device__ __forceinline__ uint2 LoadShared64(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void StoreShared32(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(v) : "memory");
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

// Whether the phase of the given parity has completed; does not wait.
__device__ __forceinline__ bool MbarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      " mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      " selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// True for one lane of the warp, all of which call this; needs no register to remember a lane.
__device__ __forceinline__ bool ElectOne() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      " .reg .pred elected;\n"
      " elect.sync _|elected, 0xffffffff;\n"
      " selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
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

// Does not wait: pairs with others' `BarrierSync`.
__device__ __forceinline__ void BarrierArrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
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

__device__ __forceinline__ uint32_t MulF16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t CvtE4m3x2F32(float first, float second) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  return bytes;
}

// --- Clusters

__device__ __forceinline__ void BarrierClusterArrive() {
  asm volatile("barrier.cluster.arrive.release;" : : : "memory");
}

// Orders nothing: for threads that have seen the results of whatever must have happened.
__device__ __forceinline__ void BarrierClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" : : : "memory");
}

__device__ __forceinline__ void BarrierClusterWait() {
  asm volatile("barrier.cluster.wait.acquire;" : : : "memory");
}

// Where `rank` of the cluster has what this CTA has at `shared`.
__device__ __forceinline__ uint32_t Mapa(uint32_t shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

__device__ __forceinline__ uint32_t LoadCluster32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Stores that complete on an mbarrier of the same CTA. Pair with `MbarrierWaitCluster`.
__device__ __forceinline__ void StoreAsync128(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32"
      " [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void StoreAsync32(uint32_t address, uint32_t v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               :
               : "r"(address), "r"(v), "r"(barrier)
               : "memory");
}

// As `MbarrierWait`, for what other CTAs of the cluster have stored.
__device__ __forceinline__ void MbarrierWaitCluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      "again:\n"
      " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      " @done bra finished;\n"
      " bra again;\n"
      "finished:\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

}  // namespace jax_pcie::ptx
