// Defines `launch.h` for one element type; included by `all_reduce_*.cu` only.
#pragma once

#include "../collective.h"
#include "../error.h"
#include "check.h"
#include "fused.cuh"
#include "launch.h"

namespace jax_pcie::cuda {

// How a call is spread over channels: pieces are as small as gives every channel one, and no larger
// than a slot.
struct Grid {
  int64_t shard_values, piece_values, num_pieces, num_ctas;

  template <class Topology>
  static Grid For(const GroupView& group, int64_t count) {
    const SlabLayout& layout = group.layout;
    const int64_t shard_values = ShardValues(count, group.world_size, kSpanAlign);
    const int64_t even =
        RoundUp((shard_values + layout.num_channels - 1) / layout.num_channels, kUnitValues);
    const int64_t piece_values =
        std::clamp<int64_t>(even, kUnitValues, MaxPieceValues<Topology>(layout.slot_bytes));
    const int64_t num_pieces = (shard_values + piece_values - 1) / piece_values;
    Require(num_pieces <= INT32_MAX, count, " elements are more than one call can sum");
    return {shard_values, piece_values, num_pieces,
            std::min<int64_t>(num_pieces, layout.num_channels)};
  }
};

template <class Element>
void LoadKernels() {
  for (const CodecId codec : {CodecId::kRaw, CodecId::kInt8, CodecId::kE4m3, CodecId::kMxfp8}) {
    for (const TopologyId topology :
         {TopologyId::kRing, TopologyId::kAllToAll, TopologyId::kAllGather}) {
      VisitCollective<Element>(codec, topology, [&]<class Topology>() {
        int ctas_per_sm = 0;
        CheckCuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                      &ctas_per_sm, AllReduceKernel<Topology, Element>, kThreads, 0),
                  "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
                  "was jax_pcie built for this GPU's architecture?");
        Require(ctas_per_sm > 0, "a CTA of ", kThreads, " threads does not fit on an SM");
      });
    }
  }
}

template <class Element>
int64_t NumSegments(const GroupView& group, CodecId codec, TopologyId topology, int64_t count) {
  int64_t segments = 0;
  VisitCollective<Element>(codec, topology, [&]<class Topology>() {
    const Grid grid = Grid::For<Topology>(group, count);
    segments = (grid.num_pieces + grid.num_ctas - 1) / grid.num_ctas;
  });
  return segments;
}

template <class Element>
void LaunchAllReduce(const GroupView& group, const AllReduceLaunch& launch, cudaStream_t stream) {
  VisitCollective<Element>(launch.codec, launch.topology, [&]<class Topology>() {
    const Grid grid = Grid::For<Topology>(group, launch.count);
    const Call<Element> call{static_cast<const Element*>(launch.x),
                             static_cast<Element*>(launch.y),
                             launch.count,
                             grid.shard_values,
                             static_cast<int>(grid.piece_values),
                             static_cast<int>(grid.num_pieces),
                             launch.call_site};
    AllReduceKernel<Topology, Element>
        <<<static_cast<unsigned>(grid.num_ctas), kThreads, 0, stream>>>(group, call);
    CheckCuda(cudaGetLastError(), "AllReduceKernel");
  });
}

}  // namespace jax_pcie::cuda
