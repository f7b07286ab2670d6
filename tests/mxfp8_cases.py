"""Operands, compiled calls and names that the tests of `jax_pcie.mxfp8` share.

Expected values belong to `mxfp8_oracles`. Operands made here from bytes are what no
quantiser would write: any scale, any payload.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import mxfp8_oracles as oracles
import numpy as np
import pytest
from mxfp8_oracles import F32, Array

from jax_pcie import mxfp8

NUM_OUTPUTS = 132
NUM_COLUMNS = 256
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
NAN_CODES = (0x7F, 0xFF)

stage = jax.jit(
    mxfp8.quantize_input_slice, static_argnames="column", donate_argnames="storage"
)
pack = jax.jit(mxfp8.pack_weight, static_argnames="scale_group")
mm = jax.jit(mxfp8.mm, static_argnames=("scale_group", "dtype"))
mm_quantized = jax.jit(mxfp8.mm_quantized, static_argnames=("tokens", "dtype"))
mm_quantized_into = jax.jit(
    mxfp8.mm_quantized_into, static_argnames="tokens", donate_argnames="out"
)


def with_sizes(names: str, *, cpu: list[Any], cuda: list[Any]) -> pytest.MarkDecorator:
    """Parametrises `names` by sizes: each costs the CPU one or two seconds to compile,
    while on CUDA they choose between kernels and kinds of part tiles."""
    cases = [("cpu", size, ()) for size in cpu]
    cases += [("cuda", size, pytest.mark.cuda) for size in cuda]
    several = "," in names
    return pytest.mark.parametrize(
        f"device, {names}",
        [
            pytest.param(platform, *(size if several else (size,)), marks=marks)
            for platform, size, marks in cases
        ],
        indirect=["device"],
    )


def gaussian(rng: np.random.Generator, *shape: int, dtype: np.dtype = F32) -> Array:
    """Normal values whose magnitude varies by four octaves from column to column."""
    octaves = rng.integers(-2, 3, shape[-1:])
    return np.ldexp(rng.standard_normal(shape), octaves).astype(dtype)


def any_octaves(
    rng: np.random.Generator, rows: int, columns: int, octaves: int
) -> Array:
    """bfloat16: gaussian, each group of 32 times some 2^(-octaves ... octaves)."""
    shift = rng.integers(-octaves, octaves + 1, (rows, columns // 32)).repeat(32, 1)
    return np.ldexp(gaussian(rng, rows, columns), shift).astype(oracles.BF16)


def finite_codes(rng: np.random.Generator, *shape: int) -> Array:
    """E4M3 bytes without NaN."""
    sign = rng.integers(0, 2, shape, np.uint8) << 7
    return rng.integers(0, 0x7F, shape, np.uint8) | sign


def stored_bytes(
    operand: mxfp8.StagedInput | mxfp8.PackedWeight,
) -> tuple[Array, Array]:
    values, scales = np.asarray(operand.values), np.asarray(operand.scales)
    assert (values.dtype, scales.dtype) == (E4M3, E8M0)
    return values.view(np.uint8), scales.view(np.uint8)


def staged(
    x: Array,
    widths: Sequence[int] | None = None,
    *,
    max_tokens: int | None = None,
    scale_group: int = 32,
) -> mxfp8.StagedInput:
    storage = mxfp8.empty_input(
        len(x) if max_tokens is None else max_tokens,
        x.shape[1],
        scale_group=scale_group,
    )
    column = 0
    for width in widths or [x.shape[1]]:
        storage = stage(x[:, column : column + width], storage, column=column)
        column += width
    return storage


def storage_of(
    values: Array, scales: Array, scale_group: int = 32
) -> mxfp8.StagedInput:
    """Storage that holds these bytes, all of it written."""
    num_columns = values.shape[1]
    return dataclasses.replace(
        mxfp8.empty_input(len(values), num_columns, scale_group=scale_group),
        values=jnp.asarray(values.view(E4M3)),
        scales=jnp.asarray(scales.view(E8M0)),
        written=((0, num_columns),),
    )


def weight_of(
    values: Array, scales: Array, scale_group: int = 32
) -> mxfp8.PackedWeight:
    return pack(values.view(E4M3), scales.view(E8M0), scale_group=scale_group)


def multiply_bytes(
    x: tuple[Array, Array], w: tuple[Array, Array], dtype: np.dtype = F32
) -> Array:
    """The product of operands given as (values, scales)."""
    return np.asarray(mm_quantized(storage_of(*x), weight_of(*w), dtype=dtype))
