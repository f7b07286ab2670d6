// The router's kernels: gathers of rows, the same with the choice of experts, and the choice alone.
//
// A gather is cut into tiles, one to a CTA. In the fused kernel the first tiles are rows of logits,
// each of which its CTA chooses from while other CTAs copy the latent; so a call takes one crossing
// of the link and one selection, whatever its batch is, until there are more tiles than SMs.
#include <algorithm>
#include <type_traits>

#include "../error.h"
#include "gather_topk.h"
#include "launch.h"
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
  uint32_t call_site;
};

struct RouteArgs {
  RouteCall route;
  std::byte* scratch;
  int num_places;
};

__global__ void __launch_bounds__(kPacketThreads, 1)
    GatherKernel(const __grid_constant__ GroupView group, const __grid_constant__ GatherArgs args) {
  __shared__ Claim claim;
  PacketMailbox mailbox(group, args.call_site, claim);
  int64_t number = 0;
  for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, ++number) {
    const bool is_first = tile < args.first_tiles;
    ExchangeTile(mailbox, args.arrays[is_first ? 0 : 1], is_first ? tile : tile - args.first_tiles,
                 number);
  }
  mailbox.Release(number);
}

// A packet of logits on its way: of which experts, and what it takes to score them.
template <class Element>
struct LogitsPacket {
  static constexpr int kExperts = kPacketData / sizeof(Element);
  int distance;  // 0 is this rank's own; the others are sent to the rank after, received from
                 // before
  int first_id, count;
  PacketLine line;
  uint64_t data;
  float bias[kExperts];
};

template <class Element>
__device__ LogitsPacket<Element> PrepareLogits(const PacketMailbox& mailbox,
                                               const GatherTopkArgs& args, int row, int item) {
  using Packet = LogitsPacket<Element>;
  const PacketRows& logits = args.logits;
  const float* const bias = args.route.bias;
  Packet packet = {};
  packet.distance = logits.row_packets.Quotient(item);
  const int index = item - packet.distance * logits.row_packets.value();
  packet.data = LoadPacket(logits, PlaceInRow(logits, row, index));
  const int source = mailbox.group().rank - packet.distance;
  const int skipped = index * Packet::kExperts;  // of the source's experts
  packet.first_id =
      (source < 0 ? source + mailbox.group().world_size : source) * args.rank_experts + skipped;
  packet.count = min(Packet::kExperts, args.rank_experts - skipped);
#pragma unroll
  for (int i = 0; i < Packet::kExperts; ++i) {
    packet.bias[i] = bias && i < packet.count ? bias[packet.first_id + i] : 0.f;
  }
  if (packet.distance > 0) packet.line = mailbox.LineOf(packet.distance, index);
  return packet;
}

// The experts of one packet, as they arrive.
template <class Element, class Places>
__device__ void AcceptPacket(RowRouter<Places>& router, const LogitsPacket<Element>& packet) {
  using Bits = decltype(Element::bits);
#pragma unroll
  for (int i = 0; i < LogitsPacket<Element>::kExperts; ++i) {
    const Element logit{static_cast<Bits>(packet.data >> (8 * sizeof(Element) * i))};
    if (i < packet.count) router.Accept(packet.first_id + i, Widen(logit), packet.bias[i]);
  }
}

// Exchanges a row of logits and chooses its experts; the CTA's tile number `number`.
template <class Element, class Places>
__device__ void SelectTile(PacketMailbox& mailbox, RowRouter<Places>& router,
                           const GatherTopkArgs& args, int row, int64_t number) {
  // A thread's items are the packets of all ranks. One each, but for a few.
  const int num_items = mailbox.group().world_size * args.logits.row_packets.value();
  int item = threadIdx.x;
  LogitsPacket<Element> packet = {};
  if (item < num_items) packet = PrepareLogits<Element>(mailbox, args, row, item);
  router.Begin();
  bool ok = mailbox.Enter(number);
  for (; ok && item < num_items; item += kPacketThreads) {
    if (item >= kPacketThreads) packet = PrepareLogits<Element>(mailbox, args, row, item);
    if (packet.distance > 0) {
      mailbox.Send(packet.line, packet.data);
      ok = mailbox.Receive(packet.line, packet.data);
    }
    if (ok) AcceptPacket(router, packet);
  }
  const int k = args.route.rule.num_chosen;
  float* const weights = args.route.weights + int64_t{row} * k;
  int32_t* const ids = args.route.ids + int64_t{row} * k;
  if (mailbox.Leave(ok)) {
    router.Choose(args.route.bias, weights, ids);
  } else if (static_cast<int>(threadIdx.x) < k) {
    weights[threadIdx.x] = QuietNan();
    ids[threadIdx.x] = -1;
  }
}

template <class Element>
__global__ void __launch_bounds__(kPacketThreads, 1)
    GatherTopkKernel(const __grid_constant__ GroupView group,
                     const __grid_constant__ GatherTopkArgs args) {
  __shared__ Claim claim;
  __shared__ SharedRow<kFusedExperts> row;
  __shared__ RouteShared shared;
  PacketMailbox mailbox(group, args.call_site, claim);
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
  RowRouter router(route.rule, memory, places, shared);
  router.Begin();
#pragma unroll 2
  for (int id = threadIdx.x; id < num; id += kRouteThreads) {
    router.Accept(id, Widen(logits[id]), route.bias ? route.bias[id] : 0.f);
  }
  __syncthreads();
  const int k = route.rule.num_chosen;
  router.Choose(route.bias, route.weights + row * k, route.ids + row * k);
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
  auto* const keys = reinterpret_cast<uint64_t*>(row);
  RouteRow<Element>(args, {keys, keys + places, reinterpret_cast<float*>(keys + 2 * places)},
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

int NumPlaces(int num_experts) { return std::max(TreePlaces(num_experts), kFusedExperts); }

}  // namespace

void LoadRouterKernels() {
  Load(GatherKernel);
  LoadKernelsOf<Bf16>();
  LoadKernelsOf<F16>();
  LoadKernelsOf<F32>();
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
  GatherKernel<<<NumCtas(group, args.num_tiles), kPacketThreads, 0, stream>>>(group, args);
  CheckCuda(cudaGetLastError(), "GatherKernel");
}

template <class Element>
void LaunchGatherTopk(const GroupView& group, const GatherCall& latent, const RouteCall& route,
                      uint32_t call_site, cudaStream_t stream) {
  const int num_experts = route.rule.num_experts;
  Require(num_experts <= kFusedExperts, num_experts, " experts; the fused kernel chooses from ",
          kFusedExperts);
  const int64_t rank_bytes = num_experts / group.world_size * int64_t{sizeof(Element)};
  GatherTopkArgs args = {};
  args.latent = RowsOf(latent, group.world_size);
  args.logits = RowsOf({route.logits, nullptr, route.num_rows, rank_bytes}, group.world_size);
  args.route = route;
  args.num_tiles = static_cast<int>(route.num_rows) + NumTiles(args.latent);
  args.rank_experts = num_experts / group.world_size;
  args.call_site = call_site;
  GatherTopkKernel<Element>
      <<<NumCtas(group, args.num_tiles), kPacketThreads, 0, stream>>>(group, args);
  CheckCuda(cudaGetLastError(), "GatherTopkKernel");
}

int64_t RouteScratchBytes(int num_experts) {
  return num_experts > kFusedExperts ? NumPlaces(num_experts) * kRowBytesPerPlace : 0;
}

template <class Element>
void LaunchRoute(const RouteCall& route, void* scratch, cudaStream_t stream) {
  Require(route.num_rows <= INT32_MAX, route.num_rows, " rows are more than one call can route");
  const int num_experts = route.rule.num_experts;
  const RouteArgs args{route, static_cast<std::byte*>(scratch), NumPlaces(num_experts)};
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
