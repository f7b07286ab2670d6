"""Packed weights, and the products that users call.

Owns their checks, which look at shapes and static facts only, so that they run at trace
time. `gradient` and `kernels` have the arithmetic, `storage` the operand that arrives
in slices.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_pcie import _ffi
from jax_pcie.checks import as_array, as_int, check_dtype
from jax_pcie.mxfp8.checks import (
    check_float,
    check_is,
    check_scale_group,
    not_differentiable,
)
from jax_pcie.mxfp8.format import (
    GROUP,
    ONE_SCALE,
    TILE,
    Operand,
    as_bytes,
    pad_to,
    realign,
)
from jax_pcie.mxfp8.gradient import quantize_weight, straight_through
from jax_pcie.mxfp8.kernels import multiply
from jax_pcie.mxfp8.storage import StagedInput

E4M3 = jnp.float8_e4m3fn
E8M0 = jnp.float8_e8m0fnu


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "realign_error"),
    meta_fields=("shape", "scale_group"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A quantised weight; made by `pack_weight`.

    Attributes:
        values: float8_e4m3fn [N, K], both padded to multiples of 128 by 0.
        scales: float8_e8m0fnu [N, K / 32], padded likewise by 127 (1.0).
        shape: (N, K) without padding.
        scale_group: 32 or 128.
        realign_error: float32 scalar, the largest absolute error that moving an E4M3
            weight to 128 x 128 scales made, 0 if it lost no bit; None if not moved.
    """

    values: Array
    scales: Array
    realign_error: Array | None
    shape: tuple[int, int]
    scale_group: int


def pack_weight(
    w: ArrayLike, scale: ArrayLike | None = None, *, scale_group: int = 32
) -> PackedWeight:
    """Quantises a weight to MXFP8, or takes one that is, once, at load time.

    With ``scale_group=32`` each row has a scale per 32 columns. With 128 the weight has
    a scale per tile of 128 rows x 128 columns, which is what cuBLASLt's block-scaled
    fp8 product takes beside inputs of one scale per row and 128 columns; an E4M3 weight
    is moved to the largest scale of each tile, and ``realign_error`` bounds the loss.

    Args:
        w: bfloat16, float16 or float32 [N, K]; or float8_e4m3fn [N, K] with `scale`.
            K is a multiple of 32.
        scale: float8_e8m0fnu [N, K / 32], only with float8_e4m3fn.
        scale_group: 32 or 128.

    Returns:
        The packed weight. It is a constant to gradients: differentiating with respect
        to `w` raises; train through ``mm(x, w)`` with a raw `w`.

    Raises:
        ValueError: a shape or `scale_group` does not fit.
        TypeError: a dtype does not fit (all at trace time).

    Source: OCP Microscaling Formats 1.0; the scale is rounded up instead of down.

    Example:
        >>> pack_weight(jnp.ones((132, 64), jnp.bfloat16)).shape
        (132, 64)
    """
    check_scale_group("pack_weight", scale_group)
    if getattr(w, "dtype", None) == E4M3:
        operand, error = _prequantized(jnp.asarray(w), scale, scale_group)
    elif scale is not None:
        raise TypeError(
            f"pack_weight takes a scale only with a float8_e4m3fn w, and w is "
            f"{as_array('pack_weight', 'w', w).dtype.name}"
        )
    else:
        w = check_float("pack_weight", "w", w)
        _check_weight_shape("pack_weight", w.shape)
        w = not_differentiable(
            w, "pack_weight has no gradient: train through mm(x, w) with the raw w"
        )
        operand, error = quantize_weight(w, scale_group), None
    values = pad_to(operand.values, TILE, TILE)
    scales = pad_to(operand.scales, TILE, TILE // GROUP, ONE_SCALE)
    return PackedWeight(
        lax.bitcast_convert_type(values, E4M3),
        lax.bitcast_convert_type(scales, E8M0),
        error,
        operand.values.shape,
        scale_group,
    )


def _prequantized(
    w: Array, scale: ArrayLike | None, scale_group: int
) -> tuple[Operand, Array | None]:
    if scale is None:
        raise ValueError("pack_weight needs the scale of a float8_e4m3fn w")
    scale = as_array("pack_weight", "scale", scale)
    if scale.dtype != E8M0:
        raise TypeError(f"scale must be float8_e8m0fnu, not {scale.dtype.name}")
    _check_weight_shape("pack_weight", w.shape)
    num_rows, num_columns = w.shape
    if scale.shape != (num_rows, num_columns // GROUP):
        raise ValueError(
            f"scale has shape {scale.shape}; a w of shape {w.shape} needs "
            f"{(num_rows, num_columns // GROUP)}, one per row and {GROUP} columns"
        )
    operand = Operand(as_bytes(w), as_bytes(scale))
    return (operand, None) if scale_group == GROUP else realign(operand)


def mm(
    x: ArrayLike,
    weight: ArrayLike | PackedWeight,
    *,
    bias: ArrayLike | None = None,
    scale_group: int = 32,
    dtype: DTypeLike | None = None,
) -> Array:
    """Quantises `x`, and `weight` if it is raw, and multiplies: ``y = x w^T + bias``.

    Products of the decoded operands are summed in fp32, the bias is added in fp32, and
    the result is rounded once. Gradients take quantisation for the identity:
    ``dx = g decode(w)``, ``dw = g^T decode(x)``; a packed weight has none.

    Args:
        x: bfloat16, float16 or float32 [..., K], K a multiple of 32.
        weight: a packed weight, or bfloat16, float16 or float32 [N, K].
        bias: bfloat16, float16 or float32 [N].
        scale_group: 32 or 128, that of a packed weight too; see `pack_weight`.
        dtype: bfloat16, float16 or float32; default that of `x`.

    Returns:
        [..., N]. A row depends on its own row of `x` only.

    Raises:
        ValueError: shapes or scale groups do not fit.
        TypeError: a dtype does not fit (all at trace time).
        NotImplementedError: differentiated with respect to a packed weight.

    Example:
        >>> mm(jnp.ones((2, 3, 64)), jnp.ones((132, 64))).shape
        (2, 3, 132)
    """
    check_scale_group("mm", scale_group)
    x = check_float("mm", "x", x)
    dtype = check_dtype("mm's dtype", x.dtype if dtype is None else dtype)
    if not x.ndim:
        raise ValueError("x is a scalar; mm takes [..., K]")
    if isinstance(weight, PackedWeight):
        num_outputs, num_columns = weight.shape
        _check_same_group("mm's scale_group", scale_group, weight)
        w = _packed_operand("mm", weight)
    else:
        w = check_float("mm", "weight", weight)
        num_outputs, num_columns = _check_weight_shape("mm", w.shape)
    if x.shape[-1] != num_columns:
        raise ValueError(
            f"x has {x.shape[-1]} columns, and the weight has {num_columns}: "
            "it is [outputs, K]"
        )
    bias = _check_bias("mm", bias, num_outputs)
    *leading, _ = x.shape
    rows = x.reshape(math.prod(leading), num_columns)
    y = straight_through(
        *_ffi.vary_alike((rows, w, bias)), num_outputs, scale_group, dtype
    )
    return y.reshape(*leading, num_outputs)


def mm_quantized(
    storage: StagedInput,
    weight: PackedWeight,
    *,
    tokens: int | None = None,
    bias: ArrayLike | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> Array:
    """Multiplies what was staged: ``y = decode(storage)[:tokens] w^T + bias``.

    Bit for bit what `mm` gives for the concatenation of the slices.

    Args:
        storage: with every slice written.
        weight: from `pack_weight`, with the storage's K and scale group.
        tokens: number of rows; default the capacity. Other rows may hold anything.
        bias: bfloat16, float16 or float32 [N].
        dtype: bfloat16, float16 or float32.

    Returns:
        [tokens, N].

    Raises:
        ValueError: shapes or scale groups do not fit, or columns were never written
            (the storage may not know: then they give NaN).
        TypeError: a dtype does not fit (all at trace time).
        NotImplementedError: differentiated; train through `mm`.

    Example:
        >>> storage = empty_input(16, 256)
        >>> for i in range(2):
        ...     storage = quantize_input_slice(x[i], storage, column=128 * i)
        >>> mm_quantized(storage, weight, tokens=16).dtype
        dtype(bfloat16)
    """
    tokens = _check_product("mm_quantized", storage, weight, tokens)
    dtype = check_dtype("mm_quantized's dtype", dtype)
    bias = _check_bias("mm_quantized", bias, weight.shape[0])
    return _product("mm_quantized", storage, weight, tokens, bias, dtype)


def mm_quantized_into(
    storage: StagedInput,
    weight: PackedWeight,
    out: Array,
    *,
    tokens: int | None = None,
    bias: ArrayLike | None = None,
) -> Array:
    """`mm_quantized`, written to the first `tokens` rows of `out`.

    Args:
        storage, weight, tokens, bias: as for `mm_quantized`.
        out: bfloat16, float16 or float32 [rows, N], rows >= `tokens`; donate it to
            write in place.

    Returns:
        `out` with the rows written; the rows below are untouched, bit for bit.

    Raises:
        ValueError, TypeError, NotImplementedError: as for `mm_quantized`, and if `out`
            does not fit.

    Example:
        >>> step = jax.jit(mm_quantized_into, donate_argnums=2)
        >>> out = step(storage, weight, out)
    """
    tokens = _check_product("mm_quantized_into", storage, weight, tokens)
    out = check_float("mm_quantized_into", "out", out)
    num_outputs = weight.shape[0]
    if out.ndim != 2 or out.shape[1] != num_outputs or out.shape[0] < tokens:
        raise ValueError(
            f"out has shape {out.shape}; {tokens} tokens of this weight need at least "
            f"{(tokens, num_outputs)}"
        )
    bias = _check_bias("mm_quantized_into", bias, num_outputs)
    return _product("mm_quantized_into", storage, weight, tokens, bias, out.dtype, out)


def _product(
    op: str,
    storage: StagedInput,
    weight: PackedWeight,
    tokens: int,
    bias: Array | None,
    dtype: np.dtype,
    out: Array | None = None,
) -> Array:
    message = f"{op} has no gradient: train through mm"
    values, scales, bias, out = not_differentiable(
        (storage.values, storage.scales, bias, out), message
    )
    rows = Operand(as_bytes(values), as_bytes(scales))
    rows, columns, bias, out = _ffi.vary_alike(
        (rows, _packed_operand(op, weight), bias, out)
    )
    return multiply(
        rows,
        columns,
        num_tokens=tokens,
        num_outputs=weight.shape[0],
        scale_group=weight.scale_group,
        dtype=dtype,
        bias=bias,
        out=out,
    )


def _packed_operand(op: str, weight: PackedWeight) -> Operand:
    values, scales = not_differentiable(
        (weight.values, weight.scales),
        f"{op} has no gradient with respect to a packed weight: pass the raw one to mm",
    )
    return Operand(as_bytes(values), as_bytes(scales))


# --- Checks


def _check_same_group(name: str, scale_group: int, weight: PackedWeight) -> None:
    if scale_group != weight.scale_group:
        raise ValueError(
            f"{name} is {scale_group}, and the weight was packed with "
            f"{weight.scale_group}: both operands must agree"
        )


def _check_weight_shape(op: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"{op}: the weight has shape {shape}, and must be [N, K]")
    if shape[1] == 0 or shape[1] % GROUP:
        raise ValueError(
            f"{op}: the weight has {shape[1]} columns, not a positive multiple of "
            f"{GROUP}"
        )
    return shape


def _check_bias(op: str, bias: ArrayLike | None, num_outputs: int) -> Array | None:
    """The bias as float32."""
    if bias is None:
        return None
    bias = check_float(op, "bias", bias)
    if bias.shape != (num_outputs,):
        raise ValueError(f"bias has shape {bias.shape}, and must be {(num_outputs,)}")
    return bias.astype(jnp.float32)


def _check_product(
    op: str, storage: StagedInput, weight: PackedWeight, tokens: int | None
) -> int:
    """The number of tokens, once everything fits."""
    check_is(op, "storage from empty_input", storage, StagedInput)
    check_is(op, "a weight from pack_weight", weight, PackedWeight)
    _check_same_group("the storage's scale_group", storage.scale_group, weight)
    if storage.num_columns != weight.shape[1]:
        raise ValueError(
            f"the storage has {storage.num_columns} columns, and the weight has "
            f"{weight.shape[1]}: it is [outputs, K]"
        )
    if tokens is None:
        tokens = storage.max_tokens
    tokens = as_int("tokens", tokens)
    if not 0 <= tokens <= storage.max_tokens:
        raise ValueError(
            f"tokens is {tokens}, and the storage holds 0 to {storage.max_tokens}"
        )
    if storage.missing:
        spans = ", ".join(f"{first}:{end}" for first, end in storage.missing)
        raise ValueError(
            f"{op}: columns {spans} were never written since empty_input or reset()"
        )
    return tokens
