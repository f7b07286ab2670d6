// The router's kernels as the host sees them: load all of them, launch one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "../router_calls.h"
#include "group_view.h"

namespace jax_pcie::cuda {

// Once per device: loads every kernel of the router and checks that a CTA fits on an SM.
void LoadRouterKernels();

// How many tiles the busiest channel exchanges, one after another. `selected_rows` are rows whose
// experts are chosen in the same launch.
int64_t GatherSegments(const GroupView& group, int64_t selected_rows,
                       const std::vector<GatherCall>& arrays);

// At most `kMaxArrays` arrays.
void LaunchGather(const GroupView& group, const std::vector<GatherCall>& arrays, uint32_t call_site,
                  cudaStream_t stream);

// At most `kFusedExperts` experts; `route.logits` has this rank's part of each row.
template <class Element>
void LaunchGatherTopk(const GroupView& group, const GatherCall& latent, const RouteCall& route,
                      uint32_t call_site, cudaStream_t stream);

// Bytes of scratch memory that a row of `num_experts` needs; 0 where it fits in shared memory.
int64_t RouteScratchBytes(int num_experts);

// Whole rows of logits; `scratch` has `RouteScratchBytes` for each of them.
template <class Element>
void LaunchRoute(const RouteCall& route, void* scratch, cudaStream_t stream);

}  // namespace jax_pcie::cuda
