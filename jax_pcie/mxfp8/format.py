"""The MXFP8 format on bits: E4M3 values, one E8M0 scale per group of 32 columns.

Encoding is integer arithmetic on fp32 bits throughout, so that every platform gives the
same bytes: XLA:CPU flushes subnormals to zero and library casts round scales to nearest
instead of up. Below the public API both parts are uint8, never float8, because XLA:CPU
converts a whole float8 array to a wider type and back to move a slice of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

GROUP = 32  # columns that share a scale byte in memory, whatever the scale group
TILE = 128  # alignment of slices, of packed weights and of the hardware's scale tiles
NAN = 0x7F
ONE_SCALE = 127  # 2^0, also the scale of an all-zero group
NAN_SCALE = 0xFF
_INFINITY = 0x7F800000
_E4M3_MIN_EXPONENT = -6
_FRACTION_DROPPED = 23 - 3  # fp32 fraction bits that a normal E4M3 does not have

Int = TypeVar("Int", int, Array)


class Operand(NamedTuple):
    """A quantised matrix: values uint8 [rows, K], scales uint8 [rows, K / 32]."""

    values: Array
    scales: Array


def as_bytes(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def float32_bits(x: Array) -> Array:
    """uint32 bits of `x` widened exactly, bfloat16 subnormals included."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def pad_to(x: Array, rows: int, columns: int, fill: int = 0) -> Array:
    return jnp.pad(
        x,
        ((0, -x.shape[0] % rows), (0, -x.shape[1] % columns)),
        constant_values=fill,
    )


@partial(jax.jit, static_argnames=("rows", "columns"), inline=True)
def quantize(x: Array, *, rows: int = 1, columns: int = GROUP) -> Operand:
    """Quantises with one scale per tile of `rows` x `columns` (a multiple of 32).

    The scale is the smallest power of two with which the tile's largest finite value
    fits (448), so nothing saturates; values are rounded to nearest even; NaN and
    infinity become 0x7F in their place. Part tiles at the edges count as padded by 0.

    Args:
        x: bfloat16, float16 or float32 [M, K], K a multiple of 32.
    """
    num_rows, num_columns = x.shape
    padded = pad_to(x, rows, columns)
    bits = float32_bits(padded).reshape(
        padded.shape[0] // rows, rows, padded.shape[1] // columns, columns
    )
    magnitude = bits & 0x7FFFFFFF
    amax = jnp.max(
        jnp.where(magnitude < _INFINITY, magnitude, 0), axis=(1, 3), keepdims=True
    )
    # 448 is 1.75 * 2^8: a larger fraction than .75 carries into the next octave.
    octave = ((amax + 0x1FFFFF) >> 23).astype(jnp.int32)
    scale = jnp.where(amax == 0, ONE_SCALE, jnp.maximum(octave - 8, 0))
    values = encode(bits, scale).reshape(padded.shape)
    scales = jnp.broadcast_to(scale, (*bits.shape[:3], columns // GROUP))
    scales = scales.astype(jnp.uint8).reshape(padded.shape[0], padded.shape[1] // GROUP)
    return Operand(
        values[:num_rows, :num_columns], scales[:num_rows, : num_columns // GROUP]
    )


def encode(bits: Array, scale: Array) -> Array:
    """E4M3 bytes of fp32 values times 2^(127 - scale), which must not exceed 448.

    Args:
        bits: uint32 fp32 bits of any shape.
        scale: int32 scale bytes, broadcast against `bits`.
    """
    exponent = ((bits >> 23) & 0xFF).astype(jnp.int32)
    fraction = bits & 0x7FFFFF
    leading_zeros = lax.clz(fraction) - 8
    up = jnp.where(exponent == 0, leading_zeros, 0)  # subnormals become normal
    significand = jnp.where(exponent == 0, fraction << up, fraction | 0x800000)
    # The value is significand * 2^(octave - 23) with its leading bit at 2^octave.
    octave = jnp.maximum(exponent, 1) - up.astype(jnp.int32) - scale
    kept = jnp.maximum(octave, _E4M3_MIN_EXPONENT)
    drop = jnp.minimum(_FRACTION_DROPPED + kept - octave, 25).astype(jnp.uint32)
    odd = (significand >> drop) & 1
    rounded = (significand + (jnp.uint32(1) << (drop - 1)) - 1 + odd) >> drop
    code = rounded + ((kept - _E4M3_MIN_EXPONENT) << 3).astype(jnp.uint32)
    finite = (bits & 0x7FFFFFFF) < _INFINITY
    return jnp.where(finite, code | ((bits >> 24) & 0x80), NAN).astype(jnp.uint8)


def payload(values: Array) -> Array:
    """float32 of E4M3 bytes without their scale."""
    e4m3 = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return e4m3.astype(jnp.float32)


def power_of_two(exponent: Array) -> Array:
    """float32 2^exponent for int32 in -126..127; 0 for -127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def times_power_of_two(x: Array, exponent: Array) -> Array:
    """float32 `x` times 2^exponent for int32 in -254..254, rounded once.

    In two steps, the first of them exact: 2^-127, the scale of byte 0, is subnormal.
    """
    half = exponent // 2
    return x * power_of_two(half) * power_of_two(exponent - half)


def scale_factor(scales: Array) -> Array:
    """float32 of scale bytes: NaN for 255, 0 for 0 (2^-127 is subnormal)."""
    factor = power_of_two(scales.astype(jnp.int32) - 127)
    return jnp.where(scales == NAN_SCALE, jnp.nan, factor)


def scaled(values: Array, factors: Array) -> Array:
    """float32 [rows, K]: every payload times its group's factor [rows, K / 32]."""
    groups = payload(values).reshape(*factors.shape, GROUP)
    return (groups * factors[..., None]).reshape(values.shape)


@partial(jax.jit, inline=True)
def realign(operand: Operand) -> tuple[Operand, Array]:
    """One scale per 128 x 128 tile, the largest in it; smaller groups are shifted.

    Returns:
        The operand and the largest absolute error of an element, float32: 0 where no
        bit was lost. A group of scale 255 becomes NaN payloads.
    """
    num_rows, num_columns = operand.values.shape
    values = pad_to(operand.values, TILE, TILE)
    scales = pad_to(operand.scales, TILE, TILE // GROUP, ONE_SCALE)
    groups = values.reshape(*scales.shape, GROUP)
    groups = jnp.where((scales == NAN_SCALE)[..., None], NAN, groups)
    magnitude = groups & 0x7F
    live = jnp.any((magnitude > 0) & (magnitude < NAN), axis=-1)
    byte = scales.astype(jnp.int32)
    largest = jnp.where(live, byte, -1).reshape(
        values.shape[0] // TILE, TILE, values.shape[1] // TILE, TILE // GROUP
    )
    tile = jnp.max(largest, axis=(1, 3), keepdims=True)
    tile = jnp.where(tile < 0, ONE_SCALE, tile)
    tile = jnp.broadcast_to(tile, largest.shape).reshape(scales.shape)

    old = payload(groups)
    shift = jnp.maximum(tile - byte, 0)[..., None]
    new_groups = encode(float32_bits(old), ONE_SCALE + shift)
    new = payload(new_groups)
    moved = old * power_of_two(-jnp.minimum(shift, 126))
    # Of what became 0 all is lost, and `moved` may have flushed.
    lost = jnp.where(new == 0, jnp.abs(old), jnp.abs(new - moved))
    exponent = jnp.where(new == 0, byte[..., None], tile[..., None])
    error = times_power_of_two(lost, exponent - 127)
    error = jnp.max(jnp.where(jnp.isnan(old), 0, error), initial=0)
    aligned = Operand(
        new_groups.reshape(values.shape)[:num_rows, :num_columns],
        tile.astype(jnp.uint8)[:num_rows, : num_columns // GROUP],
    )
    return aligned, error


def swizzled_scale_offset(row: Int, group: Int, num_columns: int) -> Int:
    """Where Blackwell's tensor cores look for the scale of (`row`, `group`).

    ``(r/128)*Kt*512 + (g/4)*512 + (r%32)*16 + ((r%128)/32)*4 + g%4``, Kt = K / 128:
    tiles of 128 rows x 4 groups, 512 bytes each, in row-major order.

    Args:
        row, group: ints or integer arrays; `group` counts 32 columns.
        num_columns: K, a multiple of 128.

    Returns:
        The offset in bytes.

    Raises:
        ValueError: `num_columns` is not a positive multiple of 128.

    Source: cuBLAS documentation, 1D block scaling factors layout (VEC32_UE8M0).

    Example:
        >>> swizzled_scale_offset(5, 5, 256)
        593
    """
    if num_columns <= 0 or num_columns % TILE:
        raise ValueError(
            f"num_columns is {num_columns}, not a positive multiple of {TILE}"
        )
    tile = row // TILE * (num_columns // TILE) + group // 4
    return tile * 512 + row % 32 * 16 + row % TILE // 32 * 4 + group % 4


def swizzle_scales(scales: Array) -> Array:
    """Row-major scale bytes in the order of `swizzled_scale_offset`.

    Args:
        scales: uint8 or float8_e8m0fnu [rows, K / 32], K a multiple of 128.

    Returns:
        uint8 [128 * ceil(rows / 128) * K / 32]; padding rows have scale 127 (255 there
        would turn products into NaN).

    Raises:
        TypeError: `scales` has another dtype.
        ValueError: K is not a multiple of 128, or `scales` has not two axes.

    Source: cuBLAS documentation, 1D block scaling factors layout (VEC32_UE8M0).

    Example:
        >>> swizzle_scales(jnp.zeros((1, 4), jnp.uint8)).shape
        (512,)
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = as_bytes(scales)
    if scales.dtype != jnp.uint8:
        raise TypeError(f"scales must be uint8 or float8_e8m0fnu, not {scales.dtype}")
    if scales.ndim != 2:
        raise ValueError(f"scales have shape {scales.shape}, not [rows, K / {GROUP}]")
    if scales.shape[1] % 4:
        raise ValueError(
            f"scales have {scales.shape[1]} groups a row, not a multiple of 4 "
            f"({TILE} columns)"
        )
    padded = pad_to(scales, TILE, 4, ONE_SCALE)
    tiles = padded.reshape(padded.shape[0] // TILE, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)
