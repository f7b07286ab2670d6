// The router's kernels: gathers of rows, the same with the choice of experts, and the choice alone.
//
// A gather is cut into tiles, one to a CTA. In the fused kernel the first tiles are rows of logits,
// each of which its CTA chooses from while other CTAs copy the latent; so a call takes one crossing
// of the link and one selection, whatever its batch is, until there are more tiles than SMs.
#include <algorithm>
#include <type_traits>

#include "../error.h"
#include "check.h"
#include "gather_topk.h"
#include "packets.cuh"
#include "select.cuh"

namespace jax_pcie::cuda {
namespace {

static_assert(kRouteThreads == kPacketThreads);

using FusedPlaces = std::integral_constant<int, kFusedExperts>;

struct GatherArgs {
  PacketRows arrays[kMaxArrays];
  int first_tiles;  // tiles of the first array
  int num_tiles;
  uint32_t call_site;
};

struct GatherTopkArgs {
  PacketRows latent;
  PacketRows logits;  // of which the result is not an array
  RouteCall route;
  int num_tiles;  // first the rows of logits, then the latent's
  int rank_experts;
  bool finds_bound_early;
  uint32_t call_site;
};

struct RouteArgs {
  RouteCall route;
  std::byte* scratch;
  int num_places;
  bool scores_at_once;
};

__global__ void __launch_bounds__(kPacketThreads, 1)
    GatherKernel(const __grid_constant__ PacketView view, const __grid_constant__ GatherArgs args) {
  __shared__ Claim claim;
  PacketMailbox mailbox(view, args.call_site, claim);
  int64_t number = 0;
  for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, ++number) {
    const bool is_first = tile < args.first_tiles;
    ExchangeTile(mailbox, args.arrays[is_first ? 0 : 1], is_first ? tile : tile - args.first_tiles,
                 number);
  }
  mailbox.Release(number);
}

__device__ __forceinline__ float BiasOf(const RouteCall& route, int id) {
  return route.bias ? __ldg(route.bias + id) : 0.f;
}

// Packet `index` of a row of logits, of the rank `distance` before this one.
template <class Element>
struct LogitsPacket {
  static constexpr int kExperts = kPacketData / sizeof(Element);
  int first_id, end_id;  // of its experts
  float bias[kExperts];

  __device__ LogitsPacket(const GatherTopkArgs& args, const PacketView& view, int distance,
                          int index) {
    const int source = view.rank - distance;
    const int first = (source < 0 ? source + view.world_size : source) * args.rank_experts;
    first_id = first + index * kExperts;
    end_id = min(first_id + kExperts, first + args.rank_experts);
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      bias[i] = first_id + i < end_id ? BiasOf(args.route, first_id + i) : 0.f;
    }
  }

  template <class Places>
  __device__ void Accept(RowRouter<Places>& router, uint64_t data, uint32_t (&scores)[kExperts]) {
    float logits[kExperts];
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      using Bits = decltype(Element::bits);
      logits[i] = Widen(Element{static_cast<Bits>(data >> (8 * sizeof(Element) * i))});
    }
    router.Accept(first_id, /*stride=*/1, end_id, logits, bias, scores);
  }
};

// Exchanges a row of logits and chooses its experts; the CTA's tile number `number`. What can be
// done with this rank's own experts is done while the others' are on their way.
template <class Element, class Places>
__device__ void SelectTile(PacketMailbox& mailbox, RowRouter<Places>& router,
                           const GatherTopkArgs& args, int row, int64_t number) {
  using Packet = LogitsPacket<Element>;
  const int thread = ThreadOfTile();
  const PacketView& view = mailbox.view();
  const PacketRows& logits = args.logits;
  const int rank_experts = args.rank_experts;
  // Packets to the peers, one a thread, and as many from them.
  const bool sends = thread < (view.world_size - 1) * logits.row_packets.value();
  int lane = 0, index = 0;
  PacketLine line = {};
  uint64_t data = 0;
  if (sends) {
    lane = logits.row_packets.Quotient(thread);
    index = thread - lane * logits.row_packets.value();
    data = LoadPacket(logits, {row, int64_t{index} * kPacketData});
    line = mailbox.LineOf(lane + 1, index);
  }
  router.Begin();
  bool ok = mailbox.Enter(number);
  if (ok && sends) mailbox.Send(line, data);

  // This rank's own: one a thread.
  const int first_own = view.rank * rank_experts, end_own = first_own + rank_experts;
  const int own = first_own + thread;
  float logit[1] = {}, bias[1] = {};
  uint32_t score[1];
  if (own < end_own) {
    logit[0] =
        Widen(reinterpret_cast<const Element*>(logits.x)[int64_t{row} * rank_experts + thread]);
    bias[0] = BiasOf(args.route, own);
  }
  Packet packet(args, view, lane + 1, index);
  router.Accept(own, /*stride=*/1, end_own, logit, bias, score);
  uint32_t bound = 0;
  if (args.finds_bound_early) {
    bound = router.FindBound(score[0]);
    router.Collect(bound, own, /*stride=*/1, end_own, score);
  }

  if (ok && sends) {
    ok = mailbox.Receive(line, data);
    uint32_t scores[Packet::kExperts];
    packet.Accept(router, data, scores);
    if (args.finds_bound_early) {
      router.Collect(bound, packet.first_id, /*stride=*/1, packet.end_id, scores);
    }
  }
  const int k = args.route.rule.num_chosen;
  float* const weights = args.route.weights + int64_t{row} * k;
  int32_t* const ids = args.route.ids + int64_t{row} * k;
  if (!mailbox.Leave(ok)) {
    if (thread < k) {
      weights[thread] = QuietNan();
      ids[thread] = -1;
    }
  } else if (args.finds_bound_early) {
    router.Finish(weights, ids);
  } else {
    router.Choose(args.route.bias, weights, ids);
  }
}

template <class Element>
__global__ void __launch_bounds__(kPacketThreads, 1)
    GatherTopkKernel(const __grid_constant__ PacketView view,
                     const __grid_constant__ GatherTopkArgs args) {
  __shared__ Claim claim;
  __shared__ SharedRow<kFusedExperts> row;
  __shared__ RouteShared shared;
  PacketMailbox mailbox(view, args.call_site, claim);
  RowRouter router(args.route.rule, row.memory(), FusedPlaces(), shared);
  const int num_rows = static_cast<int>(args.route.num_rows);
  int64_t number = 0;
  for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, ++number) {
    if (tile < num_rows) {
      SelectTile<Element>(mailbox, router, args, tile, number);
    } else {
      ExchangeTile(mailbox, args.latent, tile - num_rows, number);
    }
  }
  mailbox.Release(number);
}

template <class Element, class Places>
__device__ void RouteRow(const RouteArgs& args, RowMemory memory, Places places,
                         RouteShared& shared) {
  const RouteCall& route = args.route;
  const int num = route.rule.num_experts;
  const int64_t row = blockIdx.x;
  const auto* const logits = static_cast<const Element*>(route.logits) + row * num;
  const int k = route.rule.num_chosen;
  float* const weights = route.weights + row * k;
  int32_t* const ids = route.ids + row * k;
  RowRouter router(route.rule, memory, places, shared);
  router.Begin();
  constexpr int kHeld = kFusedExperts / kRouteThreads;  // experts that a thread has at a time
  static_assert(kHeld == 2);
  const int thread = threadIdx.x;
  uint32_t scores[kHeld] = {};
#pragma unroll 1
  for (int first = thread; first < num; first += kHeld * kRouteThreads) {
    float logit[kHeld] = {}, bias[kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int id = first + i * kRouteThreads;
      if (id >= num) continue;
      logit[i] = Widen(logits[id]);
      bias[i] = BiasOf(route, id);
    }
    router.Accept(first, kRouteThreads, num, logit, bias, scores);
  }
  if constexpr (std::is_same_v<Places, FusedPlaces>) {  // a thread has all of its experts
    if (args.scores_at_once) {
      const uint32_t bound = router.FindBound(max(scores[0], scores[1]));
      router.Collect(bound, thread, kRouteThreads, num, scores);
      __syncthreads();
      return router.Finish(weights, ids);
    }
  }
  __syncthreads();
  router.Choose(route.bias, weights, ids);
}

template <class Element>
__global__ void __launch_bounds__(kRouteThreads, 1)
    RouteKernel(const __grid_constant__ RouteArgs args) {
  __shared__ SharedRow<kFusedExperts> row;
  __shared__ RouteShared shared;
  RouteRow<Element>(args, row.memory(), FusedPlaces(), shared);
}

// For rows that do not fit in shared memory.
template <class Element>
__global__ void __launch_bounds__(kRouteThreads, 1)
    RouteLongRowKernel(const __grid_constant__ RouteArgs args) {
  __shared__ RouteShared shared;
  const int64_t places = args.num_places;
  std::byte* const row = args.scratch + blockIdx.x * places * kRowBytesPerPlace;
  auto* const candidates = reinterpret_cast<uint64_t*>(row);
  auto* const scores = reinterpret_cast<uint32_t*>(candidates + places);
  RouteRow<Element>(args, {candidates, scores, reinterpret_cast<float*>(scores + places)},
                    args.num_places, shared);
}

PacketRows RowsOf(const GatherCall& call, int world_size) {
  const int64_t per_row = (call.row_bytes + kPacketData - 1) / kPacketData;
  Require(call.num_rows * per_row * world_size <= INT32_MAX, "a gather of ", call.num_rows,
          " rows of ", call.row_bytes, " bytes from each rank is more than one call can move");
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.y);
  return {static_cast<const std::byte*>(call.x),
          static_cast<std::byte*>(call.y),
          call.row_bytes,
          Divisor(std::max(static_cast<int>(per_row), 1)),
          Divisor(kChannelPackets / world_size),
          static_cast<int>(call.num_rows * per_row),
          (addresses | static_cast<uintptr_t>(call.row_bytes)) % kPacketData == 0};
}

int NumTiles(const PacketRows& rows) {
  const int per_tile = rows.tile_packets.value();
  return (rows.num_packets + per_tile - 1) / per_tile;
}

// One CTA an SM at most: a grid that waits for peers must be resident as a whole.
unsigned NumCtas(const GroupView& group, int num_tiles) {
  return static_cast<unsigned>(std::min(num_tiles, group.layout.num_channels));
}

template <class Kernel>
void Load(Kernel* kernel) {
  int ctas_per_sm = 0;
  CheckCuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kernel, kPacketThreads, 0),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
            "was jax_pcie built for this GPU's architecture?");
  Require(ctas_per_sm > 0, "a CTA of ", kPacketThreads, " threads does not fit on an SM");
}

template <class Element>
void LoadKernelsOf() {
  Load(GatherTopkKernel<Element>);
  Load(RouteKernel<Element>);
  Load(RouteLongRowKernel<Element>);
}

// Whether a bound that one rank's experts make is good enough. Of each rank about k experts reach
// it, and more if they fill few sets (of eight threads): then it is quicker to find one from all
// ranks'.
bool FindsBoundEarly(const RouteRule& rule, int world_size) {
  return ScoresAtOnce(rule) && world_size * rule.num_chosen <= 64 &&
         rule.num_experts / world_size >= 16 * rule.num_chosen;
}

int NumPlaces(int num_experts) { return std::max(TreePlaces(num_experts), kFusedExperts); }

}  // namespace

void LoadRouterKernels() {
  static auto& once = *new OncePerDevice;
  once([] {
    Load(GatherKernel);
    LoadKernelsOf<Bf16>();
    LoadKernelsOf<F16>();
    LoadKernelsOf<F32>();
  });
}

int64_t GatherSegments(const GroupView& group, int64_t selected_rows,
                       const std::vector<GatherCall>& arrays) {
  int64_t num_tiles = selected_rows;
  for (const GatherCall& array : arrays) {
    num_tiles += NumTiles(RowsOf(array, group.world_size));
  }
  const int64_t num_ctas = std::min<int64_t>(num_tiles, group.layout.num_channels);
  return (num_tiles + num_ctas - 1) / num_ctas;
}

void LaunchGather(const GroupView& group, const std::vector<GatherCall>& arrays, uint32_t call_site,
                  cudaStream_t stream) {
  GatherArgs args = {};
  args.call_site = call_site;
  for (size_t i = 0; i < arrays.size(); ++i) {
    args.arrays[i] = RowsOf(arrays[i], group.world_size);
    args.num_tiles += NumTiles(args.arrays[i]);
    if (i == 0) args.first_tiles = args.num_tiles;
  }
  GatherKernel<<<NumCtas(group, args.num_tiles), kPacketThreads, 0, stream>>>(PacketView(group),
                                                                              args);
  CheckCuda(cudaGetLastError(), "GatherKernel");
}

template <class Element>
void LaunchGatherTopk(const GroupView& group, const GatherCall& latent, const RouteCall& route,
                      uint32_t call_site, cudaStream_t stream) {
  const int num_experts = route.rule.num_experts;
  Require(num_experts <= kFusedExperts, num_experts, " experts; the fused kernel chooses from ",
          kFusedExperts);
  const int n = group.world_size, rank_experts = num_experts / n;
  GatherTopkArgs args = {};
  args.latent = RowsOf(latent, n);
  args.logits =
      RowsOf({route.logits, nullptr, route.num_rows, rank_experts * int64_t{sizeof(Element)}}, n);
  args.route = route;
  args.num_tiles = static_cast<int>(route.num_rows) + NumTiles(args.latent);
  args.rank_experts = rank_experts;
  // A thread has one expert of its own rank, and one packet: true of every world of two or more.
  Require(
      rank_experts <= kPacketThreads && (n - 1) * args.logits.row_packets.value() <= kPacketThreads,
      num_experts, " experts of ", n, " ranks are too many for a CTA");
  args.finds_bound_early = FindsBoundEarly(route.rule, n);
  args.call_site = call_site;
  GatherTopkKernel<Element>
      <<<NumCtas(group, args.num_tiles), kPacketThreads, 0, stream>>>(PacketView(group), args);
  CheckCuda(cudaGetLastError(), "GatherTopkKernel");
}

int64_t RouteScratchBytes(int num_experts) {
  return num_experts > kFusedExperts ? NumPlaces(num_experts) * kRowBytesPerPlace : 0;
}

template <class Element>
void LaunchRoute(const RouteCall& route, void* scratch, cudaStream_t stream) {
  Require(route.num_rows <= INT32_MAX, route.num_rows, " rows are more than one call can route");
  const int num_experts = route.rule.num_experts;
  const RouteArgs args{route, static_cast<std::byte*>(scratch), NumPlaces(num_experts),
                       ScoresAtOnce(route.rule)};
  const auto grid = static_cast<unsigned>(route.num_rows);
  if (num_experts > kFusedExperts) {
    RouteLongRowKernel<Element><<<grid, kRouteThreads, 0, stream>>>(args);
  } else {
    RouteKernel<Element><<<grid, kRouteThreads, 0, stream>>>(args);
  }
  CheckCuda(cudaGetLastError(), "RouteKernel");
}

template void LaunchGatherTopk<Bf16>(const GroupView&, const GatherCall&, const RouteCall&,
                                     uint32_t, cudaStream_t);
template void LaunchGatherTopk<F16>(const GroupView&, const GatherCall&, const RouteCall&, uint32_t,
                                    cudaStream_t);
template void LaunchGatherTopk<F32>(const GroupView&, const GatherCall&, const RouteCall&, uint32_t,
                                    cudaStream_t);
template void LaunchRoute<Bf16>(const RouteCall&, void*, cudaStream_t);
template void LaunchRoute<F16>(const RouteCall&, void*, cudaStream_t);
template void LaunchRoute<F32>(const RouteCall&, void*, cudaStream_t);

}  // namespace jax_pcie::cuda
