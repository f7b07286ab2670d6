// Expert selection: the rule, its elementary functions and the order of (score, expert).
//
// Scalar arithmetic only, the same source and the same bits for CPU and CUDA: explicit fused
// multiply-adds and correctly rounded divisions, never a library's exp. Loops over a row's experts
// belong to the backends (`cpu/route.h`, `cuda/select.cuh`). Surprising fact: selection compares
// integers only, and all keys of a row differ, so every way to find the largest k agrees.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "error.h"
#include "numerics.h"

namespace jax_pcie {

enum class Scoring : int32_t { kSigmoid = 0, kSoftmax = 1 };

constexpr int kMaxChosen = 32;       // experts a row may choose: one for each lane of a warp
constexpr int kFusedExperts = 1024;  // that the fused kernel can choose from
constexpr float kTiny = 1e-20f;      // keeps the normalising division finite
constexpr float kLowest = -std::numeric_limits<float>::infinity();  // score of who cannot be chosen

// How the k experts of a row are chosen and weighed.
struct RouteRule {
  int num_experts;
  int num_chosen;  // k
  Scoring scoring;
  int num_groups;  // of consecutive experts, equally many in each
  int num_kept_groups;
  bool has_bias;
  bool renormalize;
  float factor;
  int group_experts = 0;  // in each group, once the rule is complete

  // A group is worth its two best experts if there is a bias, else its best one.
  HD bool scores_groups_by_two() const { return has_bias && group_experts > 1; }

  // Checks what it was made of and adds what follows from it.
  void Complete() {
    Require(num_chosen >= 1 && num_chosen <= kMaxChosen && num_chosen <= num_experts, "k is ",
            num_chosen, "; it must be from 1 to ", kMaxChosen, " and at most the ", num_experts,
            " experts");
    Require(scoring == Scoring::kSigmoid || scoring == Scoring::kSoftmax, "scoring ", int(scoring),
            " is not known");
    Require(num_groups >= 1 && num_experts % num_groups == 0, num_experts, " experts do not make ",
            num_groups, " equal groups");
    Require(num_kept_groups >= 1 && num_kept_groups <= num_groups, "topk_group is ",
            num_kept_groups, "; it must be from 1 to ", num_groups);
    group_experts = num_experts / num_groups;
  }
};

// exp(x + tail) for x <= 0 and a tail far below x, within 1.1 ulp; 0 below -104, where the true
// value rounds to 0. x = n ln 2 + r, then Taylor's polynomial on |r| <= ln 2 / 2, whose remainder
// is below 2^-27.
HD float ExpOfNonPositive(float x, float tail = 0.f) {
  // No branch, so that a GPU's thread works on two at once: exp(-104.5) rounds to 0, as do all
  // below -104, and a NaN becomes it.
  x = Max(x, -104.5f);
  // Next to 1.5 * 2^23 the last mantissa bit is 1, so the addition rounds to the nearest integer.
  const float shifted = FmaRn(x, 0x1.715476p+0f, 12582912.f);
  const float n = AddRn(shifted, -12582912.f);
  float r = FmaRn(n, -0x1.62e4p-1f, x);  // ln 2 in two parts; the first product is exact
  r = FmaRn(n, -0x1.7f7d1cp-20f, r);
  r = AddRn(r, tail);
  float p = 0x1.a01a02p-13f;         // 1/7!
  p = FmaRn(p, r, 0x1.6c16c2p-10f);  // 1/6!
  p = FmaRn(p, r, 0x1.111112p-7f);   // 1/5!
  p = FmaRn(p, r, 0x1.555556p-5f);   // 1/4!
  p = FmaRn(p, r, 0x1.555556p-3f);   // 1/3!
  p = FmaRn(p, r, 0.5f);             // 1/2!
  const float y = AddRn(1.f, FmaRn(MulRn(r, r), p, r));
  // 2^n in two halves, because n goes down to -151; only the second product can round.
  const int exponent = static_cast<int>(n);
  const int half = exponent / 2;
  const float first = FloatOf(static_cast<uint32_t>(127 + half) << 23);
  const float second = FloatOf(static_cast<uint32_t>(127 + exponent - half) << 23);
  return MulRn(MulRn(y, first), second);
}

// exp(x - largest). The difference is rounded, by up to 2^-18 where it is below -64; its tail (what
// the rounding took, by Knuth's two-sum) is as exact as the exponential needs it.
HD float ExpOfDifference(float x, float largest) {
  const float difference = AddRn(x, -largest);
  const float from_largest = AddRn(difference, -x);
  const float tail =
      AddRn(AddRn(x, -AddRn(difference, -from_largest)), AddRn(-largest, -from_largest));
  // Of a difference that overflowed the tail is a NaN.
  return ExpOfNonPositive(difference, difference >= -104.f ? tail : 0.f);
}

// e / (1 + e) for e from 0 to 1, correctly rounded. On GPUs by the steps of their own division less
// its test for extreme operands and the branch behind it: a divisor from 1 to 2 is not extreme, and
// it is 1 where e is tiny. All e were compared with `DivRn`, also with reciprocals that are off by
// an ulp either way.
HD float ShareOfOne(float e) {
  const float divisor = AddRn(1.f, e);
#ifdef __CUDA_ARCH__
  float reciprocal = __fdividef(1.f, divisor);
  reciprocal = FmaRn(FmaRn(-divisor, reciprocal, 1.f), reciprocal, reciprocal);
  float q = MulRn(e, reciprocal);
  q = FmaRn(FmaRn(-divisor, q, e), reciprocal, q);
  return FmaRn(FmaRn(-divisor, q, e), reciprocal, q);
#else
  return DivRn(e, divisor);
#endif
}

// 1 / (1 + exp(-x)), within 2 ulp also where it is tiny (0.5 tanh(x / 2) + 0.5 is not). With
// q = e / (1 + e), e = exp(-|x|), it is 1 - q for positive x; for negative x it is q, written as
// e - e q, which takes the rounding of 1 + e out again.
HD float Sigmoid(float x) {
  const float e = ExpOfNonPositive(-Abs(x));
  const float q = ShareOfOne(e);
  return x < 0.f ? FmaRn(-e, q, e) : AddRn(1.f, -q);
}

// A score that orders and is compared exactly: -0 becomes +0.
HD float SelectionScore(float u, float bias) { return AddRn(AddRn(u, bias), 0.f); }

// --- Keys: unsigned integers in the order of (score descending, id ascending), larger is better.

HD uint32_t OrderedBits(float score) {
  const uint32_t bits = BitsOf(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
HD float ScoreOfBits(uint32_t ordered) {
  return FloatOf(ordered >> 31 ? ordered & kAbsMask : ~ordered);
}
HD uint64_t KeyOf(uint32_t ordered, int id) {
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(id);
}
HD int IdOf(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
HD float ScoreOf(uint64_t key) { return ScoreOfBits(static_cast<uint32_t>(key >> 32)); }

// --- Weights.

// What the chosen experts' weights are multiplied with, given their sum.
HD float Normaliser(float sum) { return DivRn(1.f, AddRn(sum, kTiny)); }

// Sums are trees: padded with zeros to a power of two, then the upper half is added to the lower.
// Adding a zero changes nothing, so any larger power gives the same bits.
constexpr int TreePlaces(int count) {
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)));
}
static_assert(TreePlaces(896) == 1024 && TreePlaces(1) == 1 && TreePlaces(32) == 32);

}  // namespace jax_pcie
