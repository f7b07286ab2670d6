// Which kernel serves a product: a function of its shape and the GPU, so that programs decide when
// they are lowered, and what users are told is what runs.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"

namespace jax_pcie::cuda::mxfp8 {

enum class Route : int32_t {
  kNone = 0,         // no kernel of ours: plain XLA
  kSmall = 1,        // few tokens on Hopper: the weight streams at memory rate
  kGemm = 2,         // Hopper, decoded to 16 bits inside the kernel
  kBlockScaled = 3,  // Hopper, cuBLASLt's fp8 product with a scale per 128 columns
  kNative = 4,       // Blackwell, cuBLASLt's MXFP8 product
};

struct Shape {
  int64_t num_tokens, num_outputs, num_columns;
  ElementType output;
  bool has_bias;
};

struct Choice {
  Route route;
  int64_t workspace_bytes;
  std::string reason;
};

// `compute_capability` is major * 10 + minor.
Choice ChooseRoute(int compute_capability, const Shape& shape, int scale_group);

// Once per device: loads every kernel of the staged linear that can run on it.
void LoadKernels();

// Does what the first `Launch` of a call would wait for: chooses and loads a library's kernel.
// Neither reads nor writes the call's arrays.
void Prepare(Route route, const MultiplyCall& call, void* workspace, int64_t workspace_bytes);

void Launch(Route route, const MultiplyCall& call, void* workspace, int64_t workspace_bytes,
            cudaStream_t stream);

}  // namespace jax_pcie::cuda::mxfp8
