// The floating-point control word of a thread: read it, or set it for the length of a scope.
//
// XLA:CPU runs its programs with subnormals flushed to zero; our arithmetic keeps them. So work
// done on XLA's threads runs under `Standard`, and XLA's continuations, which run on our threads,
// under the word of the thread that they came from: otherwise a subnormal that the program computes
// next would be zero on one rank and not on another.
#pragma once

#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_pcie::cpu {

class FloatControl {
 public:
#if defined(__SSE2__)
  static FloatControl OfThisThread() { return FloatControl(_mm_getcsr()); }
  static FloatControl Standard() { return FloatControl(0x1f80); }  // nearest, no FTZ, no DAZ
  void Install() const { _mm_setcsr(static_cast<unsigned>(word_)); }
#elif defined(__aarch64__)
  static FloatControl OfThisThread() {
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return FloatControl(word);
  }
  static FloatControl Standard() { return FloatControl(0); }
  void Install() const { asm volatile("msr fpcr, %0" : : "r"(word_)); }
#else
#error "jax_pcie does not know how to keep subnormals on this processor"
#endif

 private:
  explicit FloatControl(uint64_t word) : word_(word) {}
  uint64_t word_;
};

// Installs a control word, and puts the old one back at the end of the scope.
class FloatScope {
 public:
  explicit FloatScope(FloatControl control) : saved_(FloatControl::OfThisThread()) {
    control.Install();
  }
  ~FloatScope() { saved_.Install(); }
  FloatScope(const FloatScope&) = delete;
  FloatScope& operator=(const FloatScope&) = delete;

 private:
  FloatControl saved_;
};

}  // namespace jax_pcie::cpu
