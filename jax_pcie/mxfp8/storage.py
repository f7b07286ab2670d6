"""The retained operand: storage, and the slices written to it.

The one surprise: which columns were written is part of the storage's pytree structure,
so that a missing slice is an error before anything runs.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_pcie import _ffi
from jax_pcie.checks import as_array, as_bool, as_int
from jax_pcie.mxfp8.checks import (
    check_float,
    check_is,
    check_scale_group,
    not_differentiable,
)
from jax_pcie.mxfp8.format import GROUP, NAN_SCALE, TILE, Operand, as_bytes
from jax_pcie.mxfp8.kernels import quantize_into

Span = tuple[int, int]
_MAX_SIZE = (1 << 31) - 1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("scale_group", "written"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class StagedInput:
    """An MXFP8 operand that is written slice by slice; made by `empty_input`.

    Attributes:
        values: float8_e4m3fn [T, K].
        scales: float8_e8m0fnu [T, K / 32]; 255 (NaN) where nothing was written.
        scale_group: 32 or 128.
        written: disjoint spans of columns written since `empty_input` or `reset`, in
            rising order; None if this storage does not track them.
    """

    values: Array
    scales: Array
    scale_group: int
    written: tuple[Span, ...] | None

    @property
    def max_tokens(self) -> int:
        """T: how many rows it holds."""
        return self.values.shape[0]

    @property
    def num_columns(self) -> int:
        """K, over all slices."""
        return self.values.shape[1]

    @property
    def missing(self) -> tuple[Span, ...]:
        """Spans of columns known never to have been written."""
        if self.written is None:
            return ()
        edges = (0, *(edge for span in self.written for edge in span), self.num_columns)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return tuple((first, end) for first, end in gaps if first < end)

    def reset(self) -> StagedInput:
        """The same storage with nothing written: sets the scales to NaN."""
        return dataclasses.replace(
            self,
            scales=_as_scales(jnp.full_like(as_bytes(self.scales), NAN_SCALE)),
            written=None if self.written is None else (),
        )


def empty_input(
    max_tokens: int, num_columns: int, *, scale_group: int = 32, track: bool = True
) -> StagedInput:
    """Storage for up to `max_tokens` rows of `num_columns`, with nothing written.

    What is never written decodes to NaN. The storage also knows which columns were
    written, as long as `column` is a Python int, and `mm_quantized` then refuses to
    multiply missing ones. A `lax.scan` carry cannot change what it knows, and neither
    can a traced `column`: use ``track=False`` there. (As a carry inside `shard_map`,
    make it varying first, with `lax.pcast`.)

    Args:
        max_tokens: capacity T in rows.
        num_columns: K, a positive multiple of 128.
        scale_group: 32 or 128 columns of a row share a scale.
        track: whether the storage knows which columns were written.

    Returns:
        Storage of 33/32 T K bytes. Donate it to every jitted function that writes to
        it, and it stays in place.

    Raises:
        ValueError: `max_tokens`, `num_columns` or `scale_group` does not fit.

    Example:
        >>> storage = empty_input(max_tokens=16, num_columns=256)
        >>> storage = quantize_input_slice(jnp.ones((16, 128)), storage, column=0)
        >>> storage.written
        ((0, 128),)
    """
    check_scale_group("empty_input", scale_group)
    max_tokens = as_int("max_tokens", max_tokens)
    num_columns = as_int("num_columns", num_columns)
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}, which is negative")
    if num_columns <= 0 or num_columns % TILE:
        raise ValueError(
            f"num_columns is {num_columns}, not a positive multiple of {TILE}"
        )
    if max(max_tokens, num_columns) > _MAX_SIZE:
        raise ValueError(
            f"storage of {max_tokens} x {num_columns} is too large: sizes are at most "
            f"{_MAX_SIZE}"
        )
    return StagedInput(
        jnp.zeros((max_tokens, num_columns), jnp.float8_e4m3fn),
        _as_scales(jnp.full((max_tokens, num_columns // GROUP), NAN_SCALE, jnp.uint8)),
        scale_group,
        () if as_bool("track", track) else None,
    )


def quantize_input_slice(
    x: ArrayLike, storage: StagedInput, *, column: int | Array
) -> StagedInput:
    """Quantises `x` into rows 0 … of columns ``column … column + w`` of `storage`.

    Rows below those of `x` keep what they held.

    Args:
        x: bfloat16, float16 or float32 [rows, w], w a multiple of 128.
        storage: from `empty_input`; donate it to write in place.
        column: a multiple of 128. An integer array needs ``track=False``; if it turns
            out not to fit, the columns it touches become NaN.

    Returns:
        The storage with the slice written.

    Raises:
        ValueError: the slice does not fit `storage`, or `column` is traced and the
            storage tracks columns.
        TypeError: a dtype does not fit (all at trace time).
        NotImplementedError: differentiated; train through `mm`.

    Example:
        >>> storage = quantize_input_slice(x, storage, column=128)
    """
    op = "quantize_input_slice"
    check_is(op, "storage from empty_input", storage, StagedInput)
    x = check_float(op, "x", x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}; a slice is [rows, columns]")
    num_rows, width = x.shape
    if width % TILE:
        raise ValueError(f"x has {width} columns, not a multiple of {TILE}")
    if num_rows > storage.max_tokens:
        raise ValueError(
            f"x has {num_rows} rows, and the storage holds {storage.max_tokens}"
        )
    if width > storage.num_columns:
        raise ValueError(
            f"x has {width} columns, and the storage holds {storage.num_columns}"
        )
    start, written = _locate(column, width, storage)
    x = not_differentiable(x, f"{op} has no gradient: train through mm")
    old = Operand(as_bytes(storage.values), as_bytes(storage.scales))
    if isinstance(start, int):
        x, old = _ffi.vary_alike((x, old))
    else:
        x, old, start = _ffi.vary_alike((x, old, start))
    rows = quantize_into(x, old, start, storage.scale_group)
    return dataclasses.replace(
        storage,
        values=lax.bitcast_convert_type(rows.values, storage.values.dtype),
        scales=lax.bitcast_convert_type(rows.scales, storage.scales.dtype),
        written=written,
    )


def _locate(
    column: int | Array, width: int, storage: StagedInput
) -> tuple[int | Array, tuple[Span, ...] | None]:
    """The first column as `quantize_into` takes it, and what is written then."""
    end = storage.num_columns - width
    if isinstance(column, int | np.integer):
        column = int(column)
        if column % TILE:
            raise ValueError(f"column is {column}, not a multiple of {TILE}")
        if not 0 <= column <= end:
            raise ValueError(
                f"columns {column}:{column + width} are outside the storage's "
                f"0:{storage.num_columns}"
            )
        if storage.written is None:
            return column, None
        return column, _with_span(storage.written, (column, column + width))
    column = as_array("quantize_input_slice", "column", column)
    if column.ndim or not jnp.issubdtype(column.dtype, jnp.integer):
        raise TypeError(
            f"column must be an integer, not {column.dtype.name} of shape "
            f"{column.shape}"
        )
    if storage.written is not None:
        raise ValueError(
            "column is an array, and this storage tracks the columns written: use a "
            "Python int, or empty_input(..., track=False)"
        )
    # Checked before it is narrowed, and widened before it is compared.
    if column.dtype.itemsize < 4:
        column = column.astype(jnp.int32)
    is_valid = (column % TILE == 0) & (column >= 0) & (column <= end)
    nearest = jnp.clip(column, 0, end).astype(jnp.int32) // TILE * TILE
    return jnp.where(is_valid, nearest, ~nearest), None


def _as_scales(scales: Array) -> Array:
    return lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)


def _with_span(spans: tuple[Span, ...], new: Span) -> tuple[Span, ...]:
    merged: list[Span] = []
    for first, end in sorted((*spans, new)):
        if first == end:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)
