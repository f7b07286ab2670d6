// The PTX instructions that CUDA C++ has no name for, one function each, named after them.
#pragma once

#include <cstdint>

namespace jax_pcie::ptx {

// The same value, which the compiler has to keep: it cannot know how to compute it again.
__device__ __forceinline__ uint32_t Kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

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

// Adds to a counter in shared memory, after everything that this thread has done or has seen.
__device__ __forceinline__ void AddReleaseCta(uint32_t* shared, uint32_t value) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;"
               :
               : "r"(address), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint32_t LoadAcquireCta(const uint32_t* shared) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// A barrier of the first `threads` threads that also tells whether `predicate` held for all.
__device__ __forceinline__ bool BarrierAnd(int barrier, int threads, bool predicate) {
  uint32_t all;
  asm volatile(
      "{\n"
      " .reg .pred in, out;\n"
      " setp.ne.u32 in, %3, 0;\n"
      " barrier.cta.red.and.pred out, %1, %2, in;\n"
      " selp.u32 %0, 1, 0, out;\n"
      "}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return all != 0;
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

// 16 bytes at once, never torn: one access of a 128-bit scalar, not four or two of a vector.
__device__ __forceinline__ ulonglong2 LoadRelaxedSysB128(const ulonglong2* address) {
  ulonglong2 v;
  asm volatile(
      "{\n"
      " .reg .b128 v;\n"
      " ld.relaxed.sys.global.b128 v, [%2];\n"
      " mov.b128 {%0, %1}, v;\n"
      "}"
      : "=l"(v.x), "=l"(v.y)
      : "l"(address)
      : "memory");
  return v;
}

__device__ __forceinline__ void StoreRelaxedSysB128(ulonglong2* address, ulonglong2 value) {
  asm volatile(
      "{\n"
      " .reg .b128 v;\n"
      " mov.b128 v, {%1, %2};\n"
      " st.relaxed.sys.global.b128 [%0], v;\n"
      "}"
      :
      : "l"(address), "l"(value.x), "l"(value.y)
      : "memory");
}

__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace jax_pcie::ptx
