"""Compressed collectives between the ranks of a `PeerGroup`, inside `jax.shard_map`.

Each section reads: public function, primitive, abstract evaluation, lowering, batching,
transpose. The codec is passed straight through by gradients.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_pcie import _ffi
from jax_pcie.checks import as_array, check_dtype
from jax_pcie.group import (
    MAX_WORLD_SIZE,
    PeerGroup,
    device_ids,
    same_slices,
)
from jax_pcie.wire import WireMode

Tree = TypeVar("Tree")

# --- all_reduce


def all_reduce(
    x: Tree,
    group: PeerGroup,
    *,
    wire: str | WireMode | None = None,
    grad_wire: str | WireMode | None = None,
    axis_index_groups: None = None,
) -> Tree:
    """Sums `x` over `group`, compressed on the wire: ``y = decode(encode(sum_r x_r))``.

    Like `jax.lax.psum` over the group's axis, inside `jax.shard_map`, under `jax.jit`
    or eagerly. Sums are fp32 whatever the dtype. A compressed mode turns Inf, and a sum
    that does not fit the dtype, into NaN at its place; an uncompressed one keeps it.

    Args:
        x: array or pytree of arrays, bfloat16, float16 or float32 of any shape, of the
            same shape on every rank.
        group: the ranks to sum over; its axis must be a manual axis here.
        wire: wire mode such as ``"i8_ring"``; default the group's.
        grad_wire: wire mode of the all-reduce that the gradient may need (only with
            ``check_vma=False``, as for `psum`); default `wire`.
        axis_index_groups: not implemented; for the sake of who knows `psum`.

    Returns:
        ``y`` like `x`, bit-identical on all ranks, no longer varying over the axis.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `wire` is not a mode, or this is not a `shard_map` over the group's
            axis (at trace time) or over its devices (when the program is lowered).
        PcieError: the group is closed. A peer that does not answer within
            ``group.timeout_s`` fails the program and the group; ``group.check()`` says
            why.
        NotImplementedError: `axis_index_groups` is given.

    Source: ring all-reduce, Patarasuk and Yuan 2009.

    Example:
        >>> f = jax.shard_map(lambda x, w: all_reduce(x @ w, group, wire="mx_ring"),
        ...     mesh=mesh, in_specs=(P(None, "tp"), P("tp", None)), out_specs=P())
    """
    if axis_index_groups is not None:
        raise NotImplementedError(
            "all_reduce: axis_index_groups: make a group of the mesh axis to sum over"
        )
    check_group("all_reduce", group)
    mode = group.resolve_wire(wire)
    grad_mode = mode if grad_wire is None else WireMode.parse(grad_wire)
    return jax.tree.map(lambda leaf: _all_reduce(leaf, group, mode, grad_mode), x)


def _all_reduce(
    x: Any,  # noqa: ANN401
    group: PeerGroup,
    mode: WireMode,
    grad_mode: WireMode,
) -> Array:
    x = as_array("all_reduce", "x", x)
    check_dtype("all_reduce", x.dtype)
    if group.world_size > MAX_WORLD_SIZE:
        return jax.lax.psum(x, group.axis)
    checked = _ffi.checks_varying_axes(group.axis)
    if checked and group.axis not in _ffi.varying_axes(x):
        x = jax.lax.pcast(x, group.axis, to="varying")
    return all_reduce_p.bind(
        x, group=group, mode=mode, grad_mode=grad_mode, checked=checked
    )


def check_group(op: str, group: PeerGroup) -> None:
    """Raises unless `group` can be used in the `shard_map` that is being traced."""
    if not isinstance(group, PeerGroup):
        raise TypeError(f"{op}: group must be a PeerGroup, not {group!r}")
    group.require_usable()
    require_manual_axis(group, op)
    group.in_use = True


def require_manual_axis(group: PeerGroup, op: str) -> None:
    """Raises unless this is traced inside a `shard_map` over the group's axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if group.axis not in mesh.manual_axes:
        raise ValueError(
            f"{op} over axis {group.axis!r} must be called inside jax.shard_map over "
            f"that axis; the manual axes here are {tuple(mesh.manual_axes)}"
        )
    size = mesh.shape[group.axis]
    if size != group.world_size:
        raise ValueError(
            f"axis {group.axis!r} has {size} ranks in this shard_map's mesh and "
            f"{group.world_size} in the group's: use the group's mesh"
        )


def require_program_of_group(
    group: PeerGroup,
    op: str,
    platform: str,
    ctx: Any,  # noqa: ANN401
) -> None:
    """Raises unless the program that is being lowered runs on the group's devices."""
    group.require_usable()
    mesh = _ffi.lowering_mesh(ctx)
    if not same_slices(group, mesh):
        raise ValueError(
            f"{op}: this shard_map puts other devices, or the same ones in "
            f"another order, along axis {group.axis!r} than {group!r} has: its mesh "
            f"has device ids {device_ids(mesh)}, the group's {device_ids(group.mesh)}"
        )
    if group.platform != platform:
        raise ValueError(
            f"{op}: {group!r} is made of {group.platform} devices and cannot be "
            f"part of a program for {platform}"
        )


def require_another_axis(group: PeerGroup, op: str, vmap_axis: str) -> None:
    """Raises if a `vmap` calls its axis as the group's mesh axis is called."""
    if vmap_axis == group.axis:
        raise ValueError(
            f"{op}: this vmap calls its axis {group.axis!r}, as the group's mesh "
            "axis is called; give it another name"
        )


all_reduce_p = Primitive("jax_pcie_all_reduce")


@all_reduce_p.def_abstract_eval
def _all_reduce_abstract(
    x: Any,  # noqa: ANN401
    *,
    group: PeerGroup,
    checked: bool,
    **_: object,
) -> Any:  # noqa: ANN401
    return _ffi.without_varying_axis(x, group.axis) if checked else x.update()


def _all_reduce_lowering(
    platform: str,
    ctx: Any,  # noqa: ANN401
    x: Any,  # noqa: ANN401
    *,
    group: PeerGroup,
    mode: WireMode,
    **_: object,
) -> Any:  # noqa: ANN401
    require_program_of_group(group, "all_reduce", platform, ctx)
    if group.world_size == 1 or ctx.avals_in[0].size == 0:
        # Compilers trip over empty operands, and XLA's psum over NaN payloads.
        return [x]
    lower = _ffi.lower_between_ranks(platform, "jax_pcie.all_reduce")
    return list(
        lower(
            ctx,
            x,
            group=np.int64(group.id),
            codec=np.int32(mode.codec),
            topology=np.int32(mode.topology),
        )
    )


_ffi.register_between_ranks(all_reduce_p, _all_reduce_lowering)


def _all_reduce_batching(
    axis: Any,  # noqa: ANN401
    args: tuple[Array],
    dims: tuple[int],
    *,
    group: PeerGroup,
    **params: object,
) -> tuple[Array, int]:
    require_another_axis(group, "all_reduce", axis.name)
    # The batch is part of the payload: one message instead of many.
    return all_reduce_p.bind(*args, group=group, **params), dims[0]


batching.fancy_primitive_batchers[all_reduce_p] = _all_reduce_batching


def _all_reduce_transpose(
    cotangent: Any,  # noqa: ANN401
    _: Any,  # noqa: ANN401
    *,
    group: PeerGroup,
    mode: WireMode,
    grad_mode: WireMode,
    checked: bool,
) -> list[Any]:
    # As for psum: typed varying -> invariant, the transpose only changes the type;
    # without types every rank has its own part of the cotangent, and they are summed.
    if checked:
        return [jax.lax.pcast(cotangent, group.axis, to="varying")]
    return [
        all_reduce_p.bind(
            cotangent, group=group, mode=grad_mode, grad_mode=mode, checked=checked
        )
    ]


ad.deflinear2(all_reduce_p, _all_reduce_transpose)
