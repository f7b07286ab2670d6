// The kernels as the host sees them: load all of them, launch one. Defined once per element type
// (`all_reduce_*.cu`), so that they compile in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../codec.h"
#include "../topology.h"
#include "group_view.h"

namespace jax_pcie::cuda {

struct AllReduceLaunch {
  const void* x;
  void* y;
  int64_t count;
  CodecId codec;
  TopologyId topology;
  uint32_t call_site;
};

// Loads every kernel of `Element` on the current device and checks that one CTA fits on an SM.
// Loading lazily behind a kernel that waits for a peer would deadlock.
template <class Element>
void LoadKernels();

// Pieces that the busiest channel of a call handles one after another.
template <class Element>
int64_t NumSegments(const GroupView& group, CodecId codec, TopologyId topology, int64_t count);

template <class Element>
void LaunchAllReduce(const GroupView& group, const AllReduceLaunch& launch, cudaStream_t stream);

}  // namespace jax_pcie::cuda
