// The PTX instructions that CUDA C++ has no name for, one function each, named after them.
#pragma once

#include <cstdint>

namespace jax_pcie::ptx {

__device__ __forceinline__ uint64_t LoadAcquireSys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreRelaxedSys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void FenceAcqRelSys() {
  asm volatile("fence.acq_rel.sys;" : : : "memory");
}

// Mailbox loads: relaxed, so that neither the non-coherent path nor an old L1 line serves them.
__device__ __forceinline__ uint4 LoadRelaxedSys(const uint4* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 LoadRelaxedSys(const uint2* address) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t LoadRelaxedSys(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace jax_pcie::ptx
