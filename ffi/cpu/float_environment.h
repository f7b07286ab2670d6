// Standard floating point for the length of a scope.
//
// XLA:CPU runs host code with subnormals flushed to zero; our arithmetic keeps them. The control
// word is the thread's, so it is put back when the scope ends.
#pragma once

#include <cfenv>
#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_pcie::cpu {

class FloatEnvironment {
 public:
#if defined(__SSE2__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1f80;  // all exceptions masked, nearest, no FTZ/DAZ
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "jax_pcie does not know how to keep subnormals on this processor"
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace jax_pcie::cpu
