// The fused all-reduce kernels for arrays of Bf16.
#include "launch.cuh"

namespace jax_pcie::cuda {

template void LoadKernels<Bf16>();
template int64_t NumSegments<Bf16>(const GroupView&, CodecId, TopologyId, int64_t);
template void LaunchAllReduce<Bf16>(const GroupView&, const AllReduceLaunch&, cudaStream_t);

}  // namespace jax_pcie::cuda
