"""Lossless gathers of rows between the ranks of a `PeerGroup`, inside `jax.shard_map`.

Small arrays, one launch and one synchronisation for all of them: what a decode step
gathers. Bytes are moved as they are, NaN payloads included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.typing import ArrayLike

from jax_pcie import _ffi
from jax_pcie.checks import as_array, check_movable
from jax_pcie.collectives import (
    check_group,
    require_another_axis,
    require_program_of_group,
)
from jax_pcie.group import PeerGroup

_OUTPUT_TYPES = ("varying", "invarying")

# --- all_gather_pair, all_gather_heads


def all_gather_pair(
    first: Array, second: Array, group: PeerGroup, *, to: str = "varying"
) -> tuple[Array, Array]:
    """Gathers the columns of two arrays at once: ``y[:, r * w : (r + 1) * w] = x_r``.

    Like `jax.lax.all_gather` over the group's axis with ``axis=1, tiled=True`` for each
    array, in one launch and one synchronisation; every byte arrives as it was.

    Args:
        first: ``[B, w1]`` of any dtype of 1, 2 or 4 bytes, of the same shape on every
            rank.
        second: ``[B, w2]``, likewise; the dtypes may differ.
        group: the ranks to gather from; its axis must be a manual axis here.
        to: ``"varying"``, or ``"invarying"`` for results whose type says that all ranks
            hold the same, as for `jax.lax.all_gather`.

    Returns:
        ``([B, n * w1], [B, n * w2])``, the ranks' columns in rank order.

    Raises:
        TypeError: a dtype has 8 bytes or less than one.
        ValueError: an operand's shape is not one of these, or this is not a `shard_map`
            over the group's axis and devices.
        PcieError: the group is closed. A peer that does not answer within
            ``group.timeout_s`` fails the program and the group; on a GPU the bits of
            what that call misses are all ones, and the next one raises. That is NaN in
            floats, but the lowest number in float8 ``fnuz`` types and -1 in signed
            integers, which ``group.check()`` tells from results.

    Example:
        >>> f = jax.shard_map(lambda x, y: all_gather_pair(x, y, group), mesh=mesh,
        ...     in_specs=P(None, "tp"), out_specs=P(None), check_vma=False)
    """
    op = "all_gather_pair"
    arrays = {
        name: check_array(op, name, x, rank=2)
        for name, x in {"first": first, "second": second}.items()
    }
    check_same_rows(op, arrays)
    return tuple(_gather(list(arrays.values()), group, op, to))


def all_gather_heads(x: Array, group: PeerGroup, *, to: str = "varying") -> Array:
    """Gathers attention heads: ``y[:, r * (H / n) + h] = x_r[:, h]``.

    Like `jax.lax.all_gather` over the group's axis with ``axis=1, tiled=True``.

    Args:
        x: ``[B, H / n, d]`` of any dtype of 1, 2 or 4 bytes.
        group: the ranks to gather from; its axis must be a manual axis here.
        to: as for `all_gather_pair`.

    Returns:
        ``[B, H, d]``, every byte as it was.

    Raises:
        TypeError, ValueError, PcieError: as for `all_gather_pair`.

    Example:
        >>> f = jax.shard_map(lambda x: all_gather_heads(x, group, to="invarying"),
        ...     mesh=mesh, in_specs=P(None, "tp"), out_specs=P())
    """
    x = check_array("all_gather_heads", "x", x, rank=3)
    return _gather([x], group, "all_gather_heads", to)[0]


def check_array(op: str, name: str, x: ArrayLike, rank: int) -> Array:
    """`x`, if it has `rank` axes and elements of 1, 2 or 4 whole bytes."""
    if isinstance(x, np.ndarray):
        check_movable(op, name, x.dtype)  # before JAX narrows it
    x = as_array(op, name, x)
    check_movable(op, name, x.dtype)
    if x.ndim != rank:
        raise ValueError(f"{op}: {name} has shape {x.shape}; it must have {rank} axes")
    return x


def check_same_rows(op: str, arrays: dict[str, Array]) -> None:
    rows = {name: x.shape[0] for name, x in arrays.items()}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} has {num}" for name, num in rows.items())
        raise ValueError(f"{op}: {listed} rows; they must have equally many")


def gather_in_lax(x: Array, group: PeerGroup, to: str) -> Array:
    return jax.lax.all_gather(x, group.axis, axis=1, tiled=True, to=to)


def _gather(arrays: list[Array], group: PeerGroup, op: str, to: str) -> list[Array]:
    if to not in _OUTPUT_TYPES:
        reason = "" if to != "reduced" else " ('reduced' is not implemented)"
        raise ValueError(f"{op}: to must be one of {_OUTPUT_TYPES}, not {to!r}{reason}")
    check_group(op, group)
    checked = _ffi.checks_varying_axes(group.axis)
    if checked:
        arrays = [_ffi.vary_alike(x, group.axis) for x in arrays]

    invariant = checked and to == "invarying"

    if group.uses_peers:
        gather = partial(gather_p.bind, group=group, op=op, invariant=invariant)
    else:
        gather = partial(_gather_in_lax, group=group, to=to)
    return _gather_full(gather, arrays, group, invariant)


def _gather_in_lax(*arrays: Array, group: PeerGroup, to: str) -> list[Array]:
    return [gather_in_lax(x, group, to) for x in arrays]


def _gather_full(
    gather: Callable[..., list[Array]],
    arrays: list[Array],
    group: PeerGroup,
    invariant: bool,
) -> list[Array]:
    """`gather` of the arrays that have elements, and the others' empty results.

    Compilers trip over empty operands, and lax refuses to gather them.
    """

    def empty(x: Array) -> Array:
        axes = _ffi.varying_axes(x) - ({group.axis} if invariant else set())
        y = jnp.zeros(widened(x.shape, group.world_size), x.dtype)
        return _ffi.vary_alike(y, *axes)

    full = [x for x in arrays if x.size]
    results = iter(gather(*full) if full else [])
    return [next(results) if x.size else empty(x) for x in arrays]


def widened(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    return (shape[0], world_size * shape[1], *shape[2:])


gather_p = Primitive("jax_pcie_gather")
gather_p.multiple_results = True


@gather_p.def_abstract_eval
def _gather_abstract(
    *arrays: Any,  # noqa: ANN401
    group: PeerGroup,
    invariant: bool,
    **_: object,
) -> list[Any]:
    results = [x.update(shape=widened(x.shape, group.world_size)) for x in arrays]
    if invariant:
        results = [_ffi.without_varying_axis(y, group.axis) for y in results]
    return results


def lower_gather(
    platform: str,
    ctx: Any,  # noqa: ANN401
    *arrays: Any,  # noqa: ANN401
    group: PeerGroup,
) -> list[Any]:
    """The native gather of whole rows, with the operands and results of `ctx`."""
    lower = _ffi.lower_between_ranks(platform, "jax_pcie.gather")
    return lower(
        ctx, *arrays, group=np.int64(group.id), num_arrays=np.int32(len(arrays))
    )


def _gather_lowering(
    platform: str,
    ctx: Any,  # noqa: ANN401
    *arrays: Any,  # noqa: ANN401
    group: PeerGroup,
    op: str,
    **_: object,
) -> list[Any]:
    require_program_of_group(group, op, platform, ctx)
    return lower_gather(platform, ctx, *arrays, group=group)


_ffi.register_between_ranks(gather_p, _gather_lowering)


def _gather_batching(
    axis: Any,  # noqa: ANN401
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    group: PeerGroup,
    op: str,
    invariant: bool,
) -> tuple[list[Array], list[int | None]]:
    require_another_axis(group, op, axis.name)
    # The batch is part of the rows: one message instead of many.
    mapped = [dim is not None for dim in dims]
    batches = [
        jnp.moveaxis(x, dim, 0) if dim is not None else x
        for x, dim in zip(args, dims, strict=True)
    ]
    rows = [
        fold_rows(x) if is_mapped else x
        for x, is_mapped in zip(batches, mapped, strict=True)
    ]
    gather = partial(gather_p.bind, group=group, op=op, invariant=invariant)
    results = [
        unfold_rows(y, x.shape[:2]) if is_mapped else y
        for y, x, is_mapped in zip(
            _gather_full(gather, rows, group, invariant), batches, mapped, strict=True
        )
    ]
    return results, [0 if is_mapped else None for is_mapped in mapped]


def fold_rows(x: Array) -> Array:
    """[batch, rows, ...] -> [batch * rows, ...]"""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def unfold_rows(y: Array, batch_and_rows: tuple[int, ...]) -> Array:
    return y.reshape(*batch_and_rows, *y.shape[1:])


batching.fancy_primitive_batchers[gather_p] = _gather_batching


def _gather_jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    **params: object,
) -> tuple[list[Array], list[Any]]:
    results = gather_p.bind(*primals, **params)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    gathered = iter(gather_p.bind(*moving, **params))
    return results, [
        ad.Zero(jax.typeof(y).to_tangent_aval())
        if type(t) is ad.Zero
        else next(gathered)
        for y, t in zip(results, tangents, strict=True)
    ]


ad.primitive_jvps[gather_p] = _gather_jvp


def _gather_transpose(
    cotangents: Sequence[Any],
    *operands: Any,  # noqa: ANN401
    group: PeerGroup,
    invariant: bool,
    **_: object,
) -> list[Any]:
    # As for lax.all_gather: the ranks' cotangents are summed, and each gets its part.
    # Where the type says that they are the same, each only takes its part.
    def own_part(ct: Any, x: Any) -> Any:  # noqa: ANN401
        if type(ct) is ad.Zero:
            return ad.Zero(x.aval)
        if not invariant:
            return jax.lax.psum_scatter(ct, group.axis, scatter_dimension=1, tiled=True)
        width = ct.shape[1] // group.world_size
        ct = jax.lax.pcast(ct, group.axis, to="varying")
        begin = jax.lax.axis_index(group.axis) * width
        return jax.lax.dynamic_slice_in_dim(ct, begin, width, axis=1)

    return [own_part(ct, x) for ct, x in zip(cotangents, operands, strict=True)]


ad.primitive_transposes[gather_p] = _gather_transpose
