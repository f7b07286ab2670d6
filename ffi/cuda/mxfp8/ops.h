// The staged MXFP8 linear as Python sees it: FFI targets, and which kernel serves a product.
#pragma once

#include "../../module.h"

namespace jax_pcie::cuda::mxfp8 {

Targets OpTargets();

void DefineRoute(nb::module_& m);

}  // namespace jax_pcie::cuda::mxfp8
