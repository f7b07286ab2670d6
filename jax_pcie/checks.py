"""Checks of single arguments, at trace time: what is wrong is named, and what is right.

Numbers are Python's or NumPy's; a bool is not taken for one, and nothing else for a
bool, so that no argument silently means something.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_MAX_BYTES = (1 << 63) - 1


def as_int(name: str, value: Any) -> int:  # noqa: ANN401
    """`value` as a Python int, or a `TypeError` that names it."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return int(value)


def as_bool(name: str, value: Any) -> bool:  # noqa: ANN401
    """`value` as a Python bool, or a `TypeError` that names it."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def as_float(name: str, value: Any) -> float:  # noqa: ANN401
    """`value` as a Python float, or a `TypeError` that names it."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def as_array(op: str, name: str, x: ArrayLike) -> Array:
    """`x` as JAX has it, or a `TypeError` that names it."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        kind = type(x).__name__
        raise TypeError(f"{op}: {name} must be an array, not {kind}") from None


def check_dtype(op: str, dtype: Any) -> np.dtype:  # noqa: ANN401
    """`dtype` as NumPy has it, or a `TypeError` that names it."""
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = None
    if name not in FLOAT_DTYPES:
        raise TypeError(f"{op} takes {', '.join(FLOAT_DTYPES)}, not {name or dtype}")
    return np.dtype(dtype)


def check_movable(op: str, name: str, dtype: Any) -> np.dtype:  # noqa: ANN401
    """Raises unless elements of `dtype` are 1, 2 or 4 whole bytes."""
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{op}: {name} has dtype {dtype}; it must be of plain numbers")
    try:
        dtype = np.dtype(dtype if dtype is not None else object)
    except TypeError:
        raise TypeError(f"{op}: {name} has dtype {dtype!r}, which is none") from None
    packed = dtype.name in ("int1", "uint1", "int2", "uint2", "int4", "uint4")
    if packed or dtype.name.startswith(("float4", "float6")):
        raise TypeError(f"{op}: {name} has dtype {dtype.name}, less than a byte")
    if dtype.itemsize not in (1, 2, 4):
        raise TypeError(
            f"{op}: {name} has dtype {dtype.name} of {dtype.itemsize} bytes; elements "
            "of 1, 2 and 4 bytes can be gathered"
        )
    return dtype


def as_shape(op: str, shape: Any, itemsize: int) -> tuple[int, ...]:  # noqa: ANN401
    """`shape` as a tuple of Python ints, of an array that can be."""
    if not isinstance(shape, tuple | list):
        raise TypeError(f"{op}: a shape must be a tuple of integers, not {shape!r}")
    sizes = tuple(as_int(f"{op}: a size of shape {shape}", size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"{op}: shape {shape} has a negative size")
    if math.prod(sizes) * itemsize > _MAX_BYTES:
        raise ValueError(f"{op}: an array of shape {shape} is too large for any memory")
    return sizes
