// The fused all-reduce kernels for arrays of F32.
#include "launch.cuh"

namespace jax_pcie::cuda {

template void LoadKernels<F32>();
template int64_t NumSegments<F32>(const GroupView&, CodecId, TopologyId, int64_t);
template void LaunchAllReduce<F32>(const GroupView&, const AllReduceLaunch&, cudaStream_t);

}  // namespace jax_pcie::cuda
