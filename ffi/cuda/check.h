// CUDA's errors as ours, and kernels that are loaded before anything waits.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

#include "../error.h"

namespace jax_pcie::cuda {

// Throws an `Error` that names the call, CUDA's words and, if given, what to do about it.
inline void CheckCuda(cudaError_t status, const char* call, const char* hint = "") {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call would report it again
  throw Error(Concat(call, ": ", cudaGetErrorString(status), *hint ? "; " : "", hint));
}

inline int CurrentDevice() {
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Loads a kernel on the current device. CUDA would do it at the first launch, and then wait until
// nothing runs on the device: behind a kernel that waits for a peer, perhaps for ever.
template <class Kernel>
void LoadKernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  CheckCuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
            "cudaFuncGetAttributes", "was jax_pcie built for this GPU's architecture?");
}

// Something to do once on every device. For statics, which threads can outlive: make it with `new`.
class OncePerDevice {
 public:
  template <class Body>
  void operator()(Body&& body) {
    const int device = CurrentDevice();
    const std::lock_guard lock(mutex_);
    if (done_.contains(device)) return;
    body();
    done_.insert(device);
  }

 private:
  std::mutex mutex_;
  std::set<int> done_;
};

}  // namespace jax_pcie::cuda
