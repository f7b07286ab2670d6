// Routes one row by a CTA: scores, groups, selection and weights, with the arithmetic of `topk.h`.
//
// Selection sorts nothing. The row's places are cut into 64 sets; the k-th largest of the sets'
// maxima is a bound that at least k keys reach, and for random scores few more. Those few are
// ranked by counting. Keys are integers and all differ, so the result is that of a stable sort.
#pragma once

#include "../topk.h"
#include "rows.cuh"

namespace jax_pcie::cuda {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kSetsPerWarp = 4;
constexpr int kSets = kRouteWarps * kSetsPerWarp;
static_assert(kSets >= kMaxChosen);
constexpr int kThreadsPerSet = kRouteThreads / kSets;  // that rank it, or a candidate

// The row's places: a power of two of them, experts first. Shared memory, or global for long rows.
struct RowMemory {
  uint64_t* keys;
  uint64_t* candidates;
  float* u;  // what the experts weigh, if chosen
};

template <int kPlaces>
struct SharedRow {
  uint64_t keys[kPlaces], candidates[kPlaces];
  float u[kPlaces];
  __device__ RowMemory memory() { return {keys, candidates, u}; }
};

constexpr int64_t kRowBytesPerPlace =
    sizeof(SharedRow<1>::keys) + sizeof(SharedRow<1>::candidates) + sizeof(SharedRow<1>::u);

struct RouteShared {
  uint64_t maxima[kSets];
  uint64_t bound;
  int chosen[kMaxChosen];
  float chosen_u[kMaxChosen];
  float largest[kRouteWarps];
  float sum;
  int num_candidates;
};

// The sum of a warp's values in the order of a tree: the upper half is added to the lower half
// until one is left. All lanes get it: partners add the same two values, and addition commutes.
__device__ __forceinline__ float WarpTreeSum(float v) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) v = AddRn(v, __shfl_xor_sync(kFullWarp, v, half));
  return v;
}

// Places are a constant where they fit in shared memory, so that loops over them unroll.
template <class Places>
class RowRouter {
 public:
  __device__ RowRouter(const RouteRule& rule, RowMemory memory, Places places, RouteShared& shared)
      : rule_(rule),
        memory_(memory),
        places_(places),
        shared_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  // Before the first `Accept`, with a barrier in between. What it writes, no thread that returned
  // from the last `Choose` reads any more; what `Accept` writes, one warp may still read.
  __device__ void Begin() {
    for (int place = rule_.num_experts + thread_; place < places_; place += kRouteThreads) {
      memory_.keys[place] = EmptyKey(place);
    }
    if (thread_ == 0) shared_.num_candidates = 0;
  }

  __device__ void Accept(int id, float logit, float bias) {
    if (rule_.scoring == Scoring::kSoftmax) {
      memory_.u[id] = logit;  // scored when the whole row is there
    } else {
      SetScore(id, IsFinite(logit) && IsFinite(bias), Sigmoid(logit), bias);
    }
  }

  // After all experts were accepted, with a barrier in between; by all threads.
  __device__ void Choose(const float* bias, float* weights, int32_t* ids) {
    if (rule_.scoring == Scoring::kSoftmax) Softmax(bias);
    if (rule_.num_kept_groups < rule_.num_groups) KeepBestGroups();
    Select();
    if (warp_ == 0) Weigh(weights, ids);
  }

 private:
  // The places of this thread; their number is a multiple of the threads'.
  template <class Body>
  __device__ void ForEachPlace(Body&& body) const {
#pragma unroll
    for (int i = 0; i < places_ / kRouteThreads; ++i) body(thread_ + i * kRouteThreads);
  }

  __device__ void SetScore(int id, bool eligible, float u, float bias) {
    memory_.u[id] = eligible ? u : 0.f;
    memory_.keys[id] = KeyOf(eligible ? SelectionScore(u, bias) : kLowest, id);
  }

  __device__ void Softmax(const float* bias) {
    const int num = rule_.num_experts;
    float* const tree = reinterpret_cast<float*>(memory_.candidates);
    float largest = kLowest;
    for (int id = thread_; id < num; id += kRouteThreads) {
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
      for (int i = thread_; i < half; i += kRouteThreads) tree[i] = AddRn(tree[i], tree[i + half]);
      __syncthreads();
    }
    if (warp_ == 0) {
      const float sum = WarpTreeSum(tree[lane_]);
      if (lane_ == 0) shared_.sum = sum;
    }
    __syncthreads();
    for (int id = thread_; id < num; id += kRouteThreads) {
      const float e = memory_.u[id];
      const float b = bias ? bias[id] : 0.f;
      SetScore(id, e >= 0.f && IsFinite(b), e > 0.f ? DivRn(e, shared_.sum) : 0.f, b);
    }
    __syncthreads();
  }

  // A warp scores a group; then every expert counts the groups above its own.
  __device__ void KeepBestGroups() {
    const int size = rule_.group_experts();
    uint64_t* const groups = memory_.candidates;
    for (int group = warp_; group < rule_.num_groups; group += kRouteWarps) {
      float best = kLowest, second = kLowest;
      for (int i = lane_; i < size; i += 32) {
        const float score = ScoreOf(memory_.keys[group * size + i]);
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
        groups[group] = KeyOf(rule_.scores_groups_by_two() ? AddRn(best, second) : best, group);
      }
    }
    __syncthreads();
    for (int id = thread_; id < rule_.num_experts; id += kRouteThreads) {
      const uint64_t own = groups[id / size];
      int above = 0;
      for (int group = 0; group < rule_.num_groups; ++group) above += groups[group] > own;
      if (above >= rule_.num_kept_groups) SetScore(id, false, 0.f, 0.f);
    }
    __syncthreads();
  }

  // How many of `count` keys are above `own`; by all threads, of which `kThreadsPerSet` in turn ask
  // for the same key and share the work.
  __device__ int CountAbove(const uint64_t* keys, int count, uint64_t own) const {
    constexpr int kInFlight = kSets / kThreadsPerSet;  // loads of a thread; mostly all it needs
    int above = 0;
#pragma unroll 1
    for (int i = thread_ % kThreadsPerSet; i < count; i += kSets) {
      uint64_t others[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int place = i + j * kThreadsPerSet;
        others[j] = place < count ? keys[place] : 0;
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) above += others[j] > own;
    }
#pragma unroll
    for (int half = kThreadsPerSet / 2; half > 0; half /= 2) {
      above += __shfl_xor_sync(kFullWarp, above, half);
    }
    return above;
  }

  // Leaves the best k experts in order in `chosen`.
  __device__ void Select() {
    const int k = rule_.num_chosen;
    uint64_t largest = 0;
    ForEachPlace([&](int place) { largest = max(largest, memory_.keys[place]); });
#pragma unroll
    for (int half = 16; half >= kSetsPerWarp; half /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, half));
    }
    if (lane_ < kSetsPerWarp) shared_.maxima[warp_ * kSetsPerWarp + lane_] = largest;
    __syncthreads();

    const uint64_t own = shared_.maxima[thread_ / kThreadsPerSet];
    if (CountAbove(shared_.maxima, kSets, own) == k - 1) shared_.bound = own;
    __syncthreads();

    ForEachPlace([&](int place) {
      const uint64_t key = memory_.keys[place];
      if (key >= shared_.bound) memory_.candidates[atomicAdd(&shared_.num_candidates, 1)] = key;
    });
    __syncthreads();

    const int num = shared_.num_candidates;
    for (int first = 0; first < num; first += kSets) {
      const int i = first + thread_ / kThreadsPerSet;
      const uint64_t candidate = i < num ? memory_.candidates[i] : 0;
      const int id = IdOf(candidate);
      const float u = i < num ? memory_.u[id] : 0.f;
      const int better = CountAbove(memory_.candidates, num, candidate);
      if (i < num && better < k && thread_ % kThreadsPerSet == 0) {
        shared_.chosen[better] = id;
        shared_.chosen_u[better] = u;
      }
    }
    __syncthreads();
  }

  __device__ void Weigh(float* weights, int32_t* ids) const {
    const bool is_chosen = lane_ < rule_.num_chosen;
    const int id = is_chosen ? shared_.chosen[lane_] : 0;
    const float u = is_chosen ? shared_.chosen_u[lane_] : 0.f;
    float weight = u;
    if (rule_.renormalize) weight = MulRn(u, Normaliser(WarpTreeSum(u)));
    if (is_chosen) {
      weights[lane_] = MulRn(weight, rule_.factor);
      ids[lane_] = id;
    }
  }

  const RouteRule& rule_;
  const RowMemory memory_;
  const Places places_;
  RouteShared& shared_;
  const int thread_, warp_, lane_;
};

}  // namespace jax_pcie::cuda
