"""The product that users differentiate: quantisation passed straight through.

``dx = g decode(w)`` and ``dw = g^T decode(x)``, with the decoded operands of the
forward pass, as if quantising were the identity.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_pcie.mxfp8 import format, kernels
from jax_pcie.mxfp8.format import GROUP, TILE, Operand
from jax_pcie.mxfp8.product import decode, dot


def quantize_weight(w: Array, scale_group: int) -> Operand:
    """A scale per row and 32 columns, or per tile of 128 rows and 128 columns."""
    if scale_group == GROUP:
        return kernels.quantize_rows(w, GROUP)
    return format.quantize(w, rows=TILE, columns=TILE)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def straight_through(
    x: Array,
    w: Array | Operand,
    bias: Array | None,
    num_outputs: int,
    scale_group: int,
    dtype: np.dtype,
) -> Array:
    """`dtype` [M, N] of raw `x`, a raw or packed weight, and a float32 bias [N]."""
    return _forward(x, w, bias, num_outputs, scale_group, dtype)[0]


def _forward(
    x: Array,
    w: Array | Operand,
    bias: Array | None,
    num_outputs: int,
    scale_group: int,
    dtype: np.dtype,
) -> tuple[Array, tuple[Operand, Operand, Array, Array | None, Array | None]]:
    is_packed = isinstance(w, Operand)
    rows = kernels.quantize_rows(x, scale_group)
    columns = w if is_packed else quantize_weight(w, scale_group)
    y = kernels.multiply(
        rows,
        columns,
        num_tokens=x.shape[0],
        num_outputs=num_outputs,
        scale_group=scale_group,
        dtype=dtype,
        bias=bias,
    )
    like_w = None if is_packed else w[:0]
    like_bias = None if bias is None else bias[:0]
    return y, (rows, columns, x[:0], like_w, like_bias)


def _backward(
    num_outputs: int,
    scale_group: int,
    dtype: np.dtype,
    saved: tuple[Operand, Operand, Array, Array | None, Array | None],
    cotangent: Array,
) -> tuple[Array, Array | None, Array | None]:
    rows, columns, like_x, like_w, like_bias = saved
    num_columns = rows.values.shape[1]
    used = Operand(
        columns.values[:num_outputs, :num_columns],
        columns.scales[:num_outputs, : num_columns // GROUP],
    )
    dx = _dot_decoded(cotangent, used).astype(like_x.dtype)
    dw = None
    if like_w is not None:
        dw = _dot_decoded(cotangent.T, rows).astype(like_w.dtype)
    dbias = None
    if like_bias is not None:
        dbias = jnp.sum(cotangent.astype(jnp.float32), axis=0)
    return dx, dw, dbias


def _dot_decoded(a: Array, operand: Operand) -> Array:
    """float32 ``a decode(operand)``, summed in fp32."""
    decoded = decode(operand)
    if a.dtype != jnp.bfloat16:
        return dot(a.astype(jnp.float32), decoded.T)
    # Decoded values are exact in bf16 as well, bar the far ends of the range, and GPUs
    # multiply it several times faster.
    largest = float(jnp.finfo(jnp.bfloat16).max)
    return lax.dot_general(
        a,
        jnp.clip(decoded, -largest, largest).astype(jnp.bfloat16),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


straight_through.defvjp(_forward, _backward)
