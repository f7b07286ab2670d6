// The router's targets on CPU devices, for the module to register.
#pragma once

#include "../module.h"

namespace jax_pcie::cpu {

Targets RouterTargets();

}  // namespace jax_pcie::cpu
