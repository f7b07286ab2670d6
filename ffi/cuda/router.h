// The router's targets on GPUs, for the module to register.
#pragma once

#include "../module.h"

namespace jax_pcie::cuda {

Targets RouterTargets();

}  // namespace jax_pcie::cuda
