"""The product of MXFP8 operands in plain JAX, which any platform can run.

One fp32 product of decoded operands; a platform's kernels take its place (`kernels`).
The one surprise: groups whose decoded values leave fp32's normal range are added one by
one, with the operands' scales combined first, so that 2^-127 times 2^127 is 1 although
XLA:CPU flushes subnormals.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_pcie.mxfp8.format import (
    GROUP,
    NAN_SCALE,
    Operand,
    payload,
    scale_factor,
    scaled,
    times_power_of_two,
)

# Whether a scale byte takes E4M3 values, 2^-9 to 448, out of fp32's normal range; 255
# is NaN either way. A table: XLA:CPU takes one to four seconds to compile comparisons.
_BYTES = np.arange(256)
_FAR = (_BYTES < 127 - 126 + 9) | ((_BYTES > 127 + 127 - 8) & (_BYTES != NAN_SCALE))


def _is_far(scales: Array) -> Array:
    return jnp.asarray(_FAR).at[scales].get(mode="promise_in_bounds")


def _near(operand: Operand) -> Array:
    factors = jnp.where(_is_far(operand.scales), 0, scale_factor(operand.scales))
    return scaled(operand.values, factors)


def dot(a: Array, b: Array) -> Array:
    """float32 [rows of a, rows of b]: sums over the columns of both."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@partial(jax.jit, inline=True)
def multiply(x: Operand, w: Operand) -> Array:
    """float32 [M, N]: ``y[m, n] = sum_k decode(x)[m, k] * decode(w)[n, k]``.

    Sums are fp32. A row depends on its own row of `x` only, and its bits on where the
    operands came from not at all.
    """
    if 0 in (x.values.shape[0], w.values.shape[0]):
        return jnp.zeros((x.values.shape[0], w.values.shape[0]), jnp.float32)
    # What made the operands must not change how the product is compiled.
    x, w = lax.optimization_barrier((x, w))
    far_x, far_w = _is_far(x.scales), _is_far(w.scales)
    is_far = jnp.any(far_x, axis=0) | jnp.any(far_w, axis=0)  # [groups]
    (num_groups,) = is_far.shape
    index = lax.iota(jnp.int32, num_groups)

    def next_far_group(group: int | Array) -> Array:
        return jnp.min(jnp.where(is_far & (index > group), index, num_groups))

    def add_far_group(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        group, sums = carry

        def column(groups: Array) -> Array:  # [rows, 1]
            return lax.dynamic_slice_in_dim(groups, group, 1, axis=1)

        def part(values: Array) -> Array:  # [rows, 32]
            return payload(lax.dynamic_slice_in_dim(values, group * GROUP, GROUP, 1))

        byte_x, byte_w = column(x.scales), column(w.scales)
        exponent = byte_x.astype(jnp.int32) + byte_w.astype(jnp.int32).T - 254
        term = dot(part(x.values), part(w.values))  # payloads: 2^-18 to 2^23
        term = times_power_of_two(term, exponent)
        far = column(far_x) | column(far_w).T
        return next_far_group(group), jnp.where(far, sums + term, sums)

    # A loop of no steps rather than a branch: under `vmap` a branch runs both sides.
    near = dot(_near(x), _near(w))
    _, sums = lax.while_loop(
        lambda carry: carry[0] < num_groups, add_far_group, (next_far_group(-1), near)
    )
    return sums


def decode(operand: Operand) -> Array:
    """float32 [rows, K], a finite value clamped to the largest of fp32."""
    groups = payload(operand.values).reshape(*operand.scales.shape, GROUP)
    exponent = operand.scales.astype(jnp.int32)[..., None] - 127
    decoded = times_power_of_two(groups, exponent)
    decoded = jnp.where((operand.scales == NAN_SCALE)[..., None], jnp.nan, decoded)
    decoded = decoded.reshape(operand.values.shape)
    largest = jnp.finfo(jnp.float32).max
    return jnp.clip(decoded, -largest, largest)
