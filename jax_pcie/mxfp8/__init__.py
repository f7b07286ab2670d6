"""A linear layer whose input arrives in slices and is kept only as MXFP8.

Each slice is quantised into one retained operand as it appears, so that the wide
concatenation of the slices never exists.

`storage` has the operand that arrives, `linear` the weights and what multiplies them,
`gradient` what is differentiated, `kernels` the primitives, `route` which kernel serves
a product, `product` the multiplication in plain JAX, `format` the bits.
"""

from jax_pcie.mxfp8.format import swizzle_scales, swizzled_scale_offset
from jax_pcie.mxfp8.linear import (
    PackedWeight,
    mm,
    mm_quantized,
    mm_quantized_into,
    pack_weight,
)
from jax_pcie.mxfp8.route import Plan, Route, plan
from jax_pcie.mxfp8.storage import StagedInput, empty_input, quantize_input_slice

__all__ = [
    "PackedWeight",
    "Plan",
    "Route",
    "StagedInput",
    "empty_input",
    "mm",
    "mm_quantized",
    "mm_quantized_into",
    "pack_weight",
    "plan",
    "quantize_input_slice",
    "swizzle_scales",
    "swizzled_scale_offset",
]
