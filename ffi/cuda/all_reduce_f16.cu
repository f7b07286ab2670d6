// The fused all-reduce kernels for arrays of F16.
#include "launch.cuh"

namespace jax_pcie::cuda {

template void LoadKernels<F16>();
template int64_t NumSegments<F16>(const GroupView&, CodecId, TopologyId, int64_t);
template void LaunchAllReduce<F16>(const GroupView&, const AllReduceLaunch&, cudaStream_t);

}  // namespace jax_pcie::cuda
