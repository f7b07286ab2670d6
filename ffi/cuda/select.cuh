// Routes one row by a CTA: scores, groups, selection and weights, with the arithmetic of `topk.h`.
//
// Selection sorts nothing. The k-th largest of 64 sets' maxima is a bound that at least k experts
// reach, and for random scores few more. Those few are ranked by counting keys (score and id, which
// all differ), so the result is that of a stable sort.
//
// A row takes about as long as its longest chain of dependent steps, of which a barrier, a vote or
// a load from shared memory is about 30 clocks each. So there are few of them, and threads that
// share one count have several loads on the way at a time.
#pragma once

#include "../topk.h"
#include "rows.cuh"

namespace jax_pcie::cuda {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kSetsPerWarp = 4;
constexpr int kSets = kRouteWarps * kSetsPerWarp;
static_assert(kSets >= kMaxChosen && kSets == 64);
constexpr unsigned kManyCandidates = 128;  // from which on a second bound saves time

// By expert. Shared memory, or global for long rows.
struct RowMemory {
  uint64_t* candidates;
  uint32_t* scores;  // `OrderedBits`; read only if the choice waits for the whole row
  float* u;          // what the expert weighs, if chosen
};

template <int kPlaces>
struct SharedRow {
  alignas(16) uint64_t candidates[kPlaces];
  uint32_t scores[kPlaces];
  float u[kPlaces];
  __device__ RowMemory memory() { return {candidates, scores, u}; }
};

constexpr int64_t kRowBytesPerPlace = sizeof(uint64_t) + sizeof(uint32_t) + sizeof(float);
static_assert(sizeof(SharedRow<4>) == 4 * kRowBytesPerPlace);

// The largest keys of the sets, and one that as many of them reach as experts are chosen.
template <class Key>
struct Maxima {
  alignas(16) Key maxima[kSets];
  Key bound;
};

struct RouteShared {
  Maxima<uint32_t> scores;
  Maxima<uint64_t> keys;
  unsigned num_candidates;
  int chosen[kMaxChosen];
  float chosen_u[kMaxChosen];
  float largest[kRouteWarps];
  float sum;
};

// The sum of the first `kLanes` lanes' values in the order of a tree: the upper half is added to
// the lower half until one is left. All of them get it, and so does every such group of lanes:
// partners add the same two values, and addition commutes.
template <int kLanes = 32>
__device__ __forceinline__ float WarpTreeSum(float v) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    v = AddRn(v, __shfl_xor_sync(kFullWarp, v, half));
  }
  return v;
}

// Whether an expert's score needs its own logit only.
inline bool ScoresAtOnce(const RouteRule& rule) {
  return rule.scoring == Scoring::kSigmoid && rule.num_kept_groups == rule.num_groups;
}

// Places are a power of two of at least as many as experts; a constant where they fit in shared
// memory, so that loops over them unroll.
//
// A row is chosen from in one of two ways. With `ScoresAtOnce` the bound may be found from any
// experts that have come:
//   Begin, barrier, Accept some, FindBound, Collect them, Accept and Collect the others, barrier,
//   Finish.
// In any case: Begin, barrier, Accept all, barrier, Choose.
template <class Places>
class RowRouter {
 public:
  __device__ RowRouter(const RouteRule& rule, RowMemory memory, Places places, RouteShared& shared)
      : rule_(rule),
        memory_(memory),
        places_(places),
        shared_(shared),
        thread_(threadIdx.x),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

  // What it writes, no thread reads any more that has left the last row behind it.
  __device__ void Begin() {
    if (thread_ == 0) shared_.num_candidates = 0;
  }

  // Experts `first`, `first + stride`, …: N of them, but none from `end` on. Their scores, 0 where
  // they do not exist; not final unless `ScoresAtOnce`.
  template <int N>
  __device__ void Accept(int first, int stride, int end, const float (&logits)[N],
                         const float (&bias)[N], uint32_t (&scores)[N]) {
    float u[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float sigmoid = Sigmoid(logits[i]);
      const bool eligible = IsFinite(logits[i]) && IsFinite(bias[i]);
      const float score = eligible ? SelectionScore(sigmoid, bias[i]) : kLowest;
      u[i] = eligible ? sigmoid : 0.f;
      scores[i] = first + i * stride < end ? OrderedBits(score) : 0;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int id = first + i * stride;
      if (id >= end) continue;
      memory_.u[id] = rule_.scoring == Scoring::kSoftmax ? logits[i] : u[i];
      memory_.scores[id] = scores[i];
    }
  }

  // A score that k experts reach at least, from the largest that each thread has accepted (0 for
  // none); by all threads.
  __device__ uint32_t FindBound(uint32_t largest) { return BoundOfSets(largest, shared_.scores); }

  // Of experts as given to `Accept`, those that reach the bound.
  template <int N>
  __device__ void Collect(uint32_t bound, int first, int stride, int end,
                          const uint32_t (&scores)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int id = first + i * stride;
      if (id >= end || scores[i] < bound) continue;
      // Not `atomicAdd`, of which the compiler makes one addition a warp: few lanes add, and its
      // votes take longer than their additions.
      const unsigned place = atomicInc(&shared_.num_candidates, INT32_MAX);
      memory_.candidates[place] = KeyOf(scores[i], id);
    }
  }

  // After all experts were collected, with a barrier in between; by all threads.
  __device__ void Finish(float* weights, int32_t* ids) {
    uint64_t bound = 0;
    if (shared_.num_candidates > kManyCandidates) bound = BoundOfCandidates();
    RankCandidates(bound);
    __syncthreads();
    if (warp_ == 0) Weigh(weights, ids);
  }

  // After all experts were accepted, with a barrier in between; by all threads.
  __device__ void Choose(const float* bias, float* weights, int32_t* ids) {
    if (rule_.scoring == Scoring::kSoftmax) Softmax(bias);
    if (rule_.num_kept_groups < rule_.num_groups) KeepBestGroups();
    uint32_t largest = 0;
    ForEachExpert([&](int id) { largest = max(largest, memory_.scores[id]); });
    const uint32_t bound = FindBound(largest);
    ForEachExpert([&](int id) {
      const uint32_t score[] = {memory_.scores[id]};
      Collect(bound, id, /*stride=*/1, /*end=*/id + 1, score);
    });
    __syncthreads();
    Finish(weights, ids);
  }

 private:
  // The places of this thread; their number is a multiple of the threads'.
  template <class Body>
  __device__ void ForEachPlace(Body&& body) const {
#pragma unroll
    for (int i = 0; i < places_ / kRouteThreads; ++i) {
      body(static_cast<int>(thread_) + i * kRouteThreads);
    }
  }
  template <class Body>
  __device__ void ForEachExpert(Body&& body) const {
    ForEachPlace([&](int place) {
      if (place < rule_.num_experts) body(place);
    });
  }

  __device__ void SetScore(int id, bool eligible, float u, float bias) {
    memory_.u[id] = eligible ? u : 0.f;
    memory_.scores[id] = OrderedBits(eligible ? SelectionScore(u, bias) : kLowest);
  }

  // Over `kLanes` lanes in turn.
  template <uint32_t kLanes>
  __device__ static int SumOf(int value) {
#pragma unroll
    for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
      value += __shfl_xor_sync(kFullWarp, value, half);
    }
    return value;
  }

  __device__ void Softmax(const float* bias) {
    const int num = rule_.num_experts;
    float* const tree = reinterpret_cast<float*>(memory_.candidates);
    float largest = kLowest;
    for (int id = static_cast<int>(thread_); id < num; id += kRouteThreads) {
      if (IsFinite(memory_.u[id])) largest = Max(largest, memory_.u[id]);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
      largest = Max(largest, __shfl_xor_sync(kFullWarp, largest, half));
    }
    if (lane_ == 0) shared_.largest[warp_] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRouteWarps; ++i) largest = Max(largest, shared_.largest[i]);

    ForEachPlace([&](int place) {
      float e = 0.f;
      if (place < num) {
        const bool finite = IsFinite(memory_.u[place]);
        if (finite) e = ExpOfDifference(memory_.u[place], largest);
        memory_.u[place] = finite ? e : -1.f;
      }
      tree[place] = e;
    });
    __syncthreads();
    for (int half = places_ / 2; half >= 32; half /= 2) {
      for (int i = static_cast<int>(thread_); i < half; i += kRouteThreads) {
        tree[i] = AddRn(tree[i], tree[i + half]);
      }
      __syncthreads();
    }
    if (warp_ == 0) {
      const float sum = WarpTreeSum(tree[lane_]);
      if (lane_ == 0) shared_.sum = sum;
    }
    __syncthreads();
    for (int id = static_cast<int>(thread_); id < num; id += kRouteThreads) {
      const float e = memory_.u[id];
      const float b = bias ? bias[id] : 0.f;
      SetScore(id, e >= 0.f && IsFinite(b), e > 0.f ? DivRn(e, shared_.sum) : 0.f, b);
    }
    __syncthreads();
  }

  // A warp scores a group; then every expert counts the groups above its own.
  __device__ void KeepBestGroups() {
    const int size = rule_.group_experts;
    uint64_t* const groups = memory_.candidates;
    for (int group = static_cast<int>(warp_); group < rule_.num_groups; group += kRouteWarps) {
      float best = kLowest, second = kLowest;
      for (int i = static_cast<int>(lane_); i < size; i += 32) {
        const float score = ScoreOfBits(memory_.scores[group * size + i]);
        second = Max(second, Min(best, score));
        best = Max(best, score);
      }
#pragma unroll
      for (int half = 16; half > 0; half /= 2) {
        const float other = __shfl_xor_sync(kFullWarp, best, half);
        second = Max(Max(second, __shfl_xor_sync(kFullWarp, second, half)), Min(best, other));
        best = Max(best, other);
      }
      if (lane_ == 0) {
        const float score = rule_.scores_groups_by_two() ? AddRn(best, second) : best;
        groups[group] = KeyOf(OrderedBits(score), group);
      }
    }
    __syncthreads();
    for (int id = static_cast<int>(thread_); id < rule_.num_experts; id += kRouteThreads) {
      const uint64_t own = groups[id / size];
      int above = 0;
      for (int group = 0; group < rule_.num_groups; ++group) above += groups[group] > own;
      if (above >= rule_.num_kept_groups) SetScore(id, false, 0.f, 0.f);
    }
    __syncthreads();
  }

  // The k-th largest of the sets' maxima, or less by some of its last bits; by all threads.
  template <class Key>
  __device__ Key BoundOfSets(Key largest, Maxima<Key>& shared) {
#pragma unroll
    for (int half = 16; half >= kSetsPerWarp; half /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, half));
    }
    // The set's number instead of the last bits, so that no two maxima are equal.
    const int set = warp_ * kSetsPerWarp + lane_ % kSetsPerWarp;
    if (lane_ < kSetsPerWarp) shared.maxima[set] = largest / kSets * kSets + set;
    __syncthreads();
    constexpr uint32_t kShare = kRouteThreads / kSets;  // threads that count for one set
    const Key own = shared.maxima[thread_ / kShare];
    const Key* const others = shared.maxima + thread_ % kShare * (kSets / kShare);
    int above = 0;
#pragma unroll
    for (uint32_t i = 0; i < kSets / kShare; ++i) above += others[i] > own;
    above = SumOf<kShare>(above);
    if (above == rule_.num_chosen - 1 && thread_ % kShare == 0) shared.bound = own / kSets * kSets;
    __syncthreads();
    return shared.bound;
  }

  // A key that k candidates reach at least. All experts with the score that is the bound are
  // candidates, and they may be many: in rows of zeros, say, or where few are finite.
  __device__ uint64_t BoundOfCandidates() {
    uint64_t largest = 0;
#pragma unroll 1
    for (uint32_t i = thread_; i < shared_.num_candidates; i += kRouteThreads) {
      largest = max(largest, memory_.candidates[i]);
    }
    return BoundOfSets(largest, shared_.keys);
  }

  // Leaves the best k experts in order in `chosen`, which all have keys of at least `bound`. Eight
  // threads in turn count for one candidate.
  __device__ void RankCandidates(uint64_t bound) {
    constexpr uint32_t kShare = 8;
    constexpr int kPairs = 2;  // of keys that a thread loads at a time
    const uint32_t num = shared_.num_candidates;
    const uint64_t* const keys = memory_.candidates;
#pragma unroll 1
    for (uint32_t first = warp_ * (32 / kShare); first < num; first += kRouteThreads / kShare) {
      const uint32_t i = first + lane_ / kShare;
      const uint64_t own = keys[i];  // what lies past the last one is read, but not counted
      const bool is_candidate = i < num && own >= bound;
      if (!__any_sync(kFullWarp, is_candidate)) continue;
      const int id = is_candidate ? IdOf(own) : 0;
      const float u = memory_.u[id];
      int above = 0;
#pragma unroll 1
      for (uint32_t other = lane_ % kShare * 2; other < num; other += kPairs * 2 * kShare) {
        ulonglong2 pairs[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const uint32_t at = min(other + j * 2 * kShare, static_cast<uint32_t>(places_) - 2);
          pairs[j] = *reinterpret_cast<const ulonglong2*>(keys + at);
        }
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const uint32_t at = other + j * 2 * kShare;
          above += (at < num && pairs[j].x > own) + (at + 1 < num && pairs[j].y > own);
        }
      }
      above = SumOf<kShare>(above);
      if (is_candidate && above < rule_.num_chosen && lane_ % kShare == 0) {
        shared_.chosen[above] = id;
        shared_.chosen_u[above] = u;
      }
    }
  }

  // The sum of `chosen_u` as `WarpTreeSum` makes it. A shuffle takes as long as a load, and these
  // loads do not wait for one another.
  __device__ float SumOfChosen() const {
    constexpr int kLanes = 4;
    float tree[kMaxChosen / kLanes];
#pragma unroll
    for (int i = 0; i < kMaxChosen / kLanes; ++i) {
      const int place = i * kLanes + static_cast<int>(lane_) % kLanes;
      tree[i] = place < rule_.num_chosen ? shared_.chosen_u[place] : 0.f;
    }
#pragma unroll
    for (int half = kMaxChosen / kLanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) tree[i] = AddRn(tree[i], tree[i + half]);
    }
    return WarpTreeSum<kLanes>(tree[0]);
  }

  __device__ void Weigh(float* weights, int32_t* ids) const {
    const int lane = static_cast<int>(lane_);
    const float normaliser = rule_.renormalize ? Normaliser(SumOfChosen()) : 1.f;
    if (lane >= rule_.num_chosen) return;
    weights[lane] = MulRn(MulRn(shared_.chosen_u[lane], normaliser), rule_.factor);
    ids[lane] = shared_.chosen[lane];
  }

  const RouteRule& rule_;
  const RowMemory memory_;
  const Places places_;
  RouteShared& shared_;
  const uint32_t thread_, warp_, lane_;
};

}  // namespace jax_pcie::cuda
