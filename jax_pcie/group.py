"""PeerGroup: the ranks of one mesh axis and the mailboxes between them.

The only stateful object. It owns membership, defaults and life time; what happens on
the wire is native. A mesh with more axes gives one independent slice per position on
the others.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from jax_pcie import _ffi
from jax_pcie._ffi import PcieError
from jax_pcie.checks import (
    as_float,
    as_int,
    as_shape,
    check_dtype,
    check_movable,
)
from jax_pcie.wire import OFF, Codec, Topology, WireMode

MAX_WORLD_SIZE = _ffi.MAX_WORLD_SIZE  # larger groups go to `lax`
_MAX_TIMEOUT_S = 86_400
_MIN_STAGING_BYTES, _MAX_STAGING_BYTES = 1 << 16, 1 << 40
_DRAIN_GRACE_S = 30.0  # beyond the timeout, for programs that compute as well
# The operands of each, and how many axes they have.
_GATHERS = {
    "all_gather_pair": {"first": 2, "second": 2},
    "all_gather_heads": {"x": 3},
    "all_gather_topk": {"latent": 2, "logits": 2},
}

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call would be carried out; see `PeerGroup.plan`.

    Attributes:
        op: the operation.
        path: ``"peer"``, ``"lax"``, ``"identity"`` (world size 1) or ``"empty"``.
        codec: what the bytes on the wire are; RAW where nothing is sent, and for `lax`.
        topology: who sends them to whom.
        mover: what moves them.
        segments: passes over the staging memory.
        wire_bytes: the most bytes that any rank sends, payload and scales.
        reason: why this path.
    """

    op: str
    path: str
    codec: Codec
    topology: Topology
    mover: str
    segments: int
    wire_bytes: int
    reason: str


class PeerGroup:
    """The ranks along one axis of a mesh, connected by mailboxes.

    Args:
        mesh: a `jax.sharding.Mesh` of CPU or CUDA devices of this process.
        axis: the mesh axis to communicate over; a rank is the position along it.
        wire: the default wire mode of the group's collectives; see `WireMode.parse`.
            Default: ``JAX_PCIE_WIRE``, else off.
        max_bytes: staging capacity in bytes per rank. Not a limit on messages: longer
            ones are processed in segments.
        timeout_s: seconds after which a rank that waits for another gives up. Default:
            ``JAX_PCIE_TIMEOUT_S``, else 30.

    Raises:
        ValueError: an argument is out of range, or `axis` is not an axis of `mesh`.
        PcieError: the mailboxes cannot be made (message says why).

    Close the group, or use it as a context manager: it keeps its mailboxes and threads
    until then. Programs compiled for a closed group fail. A group that has failed once
    stays failed, because its ranks no longer agree on what comes next: make a new one.

    One thread dispatches a group's programs: GPUs may begin the runs of two threads in
    an order of their own, and then exchange the arrays of two runs of one program. And
    every rank makes the same calls in the same order: a `while_loop` with collectives
    in it takes as many turns on each.

    Example:
        >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
        >>> with PeerGroup(mesh, "tp", wire="i8_a2a") as group:
        ...     layer = jax.shard_map(
        ...         lambda x: all_reduce(x, group),
        ...         mesh=mesh, in_specs=P("tp"), out_specs=P())
        ...     y = jax.jit(layer)(x)
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis: str,
        *,
        wire: str | WireMode | None = None,
        max_bytes: int = 64 << 20,
        timeout_s: float | None = None,
        _first_generation: int = 0,
    ) -> None:
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, not {type(mesh)}")
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{axis!r} is not an axis of the mesh; it has {mesh.axis_names}, and a "
                "group is of one of them"
            )
        # The environment gives defaults, and is read here and nowhere else.
        if wire is None:
            wire = _from_environment("JAX_PCIE_WIRE", WireMode.parse, OFF)
        if timeout_s is None:
            timeout_s = _from_environment("JAX_PCIE_TIMEOUT_S", _timeout, 30.0)
        max_bytes = as_int("max_bytes", max_bytes)
        if not _MIN_STAGING_BYTES <= max_bytes <= _MAX_STAGING_BYTES:
            raise ValueError(
                f"max_bytes must be at least {_MIN_STAGING_BYTES} and at most "
                f"{_MAX_STAGING_BYTES}, not {max_bytes}"
            )

        self.mesh = mesh
        self.axis = axis
        self.world_size = mesh.shape[axis]
        self._wire = WireMode.parse(wire)
        self.max_bytes = max_bytes
        self.timeout_s = _timeout(as_float("timeout_s", timeout_s))
        self._process = os.getpid()
        self.slices = _slices(mesh, axis)  # [slice][rank] devices
        self.platform = _ffi.platform_of(self.slices[0, 0])
        self._native: Any = None
        self.id = -1  # what compiled programs carry; never used twice
        self.in_use = False  # whether a program has been traced with it
        if self.uses_peers:
            self._open(_first_generation)
        self._closed = False

    @property
    def uses_peers(self) -> bool:
        """Whether collectives move bytes between peers, rather than call `lax`."""
        return 1 < self.world_size <= MAX_WORLD_SIZE

    def _open(self, first_generation: int) -> None:
        devices = self.slices.reshape(-1)
        remote = [d for d in devices if d.process_index != jax.process_index()]
        if remote:
            raise PcieError(
                f"device {remote[0]} belongs to another process; a group's devices "
                "must all be of this process"
            )
        self._native = _ffi.native_module(self.platform)
        self.id = self._native.create_group(
            name=repr(self),
            slices=[[_ffi.device_ordinal(d) for d in line] for line in self.slices],
            max_bytes=self.max_bytes,
            timeout_s=self.timeout_s,
            first_generation=first_generation,
        )

    @property
    def wire(self) -> WireMode:
        """The default wire mode of the group's collectives."""
        return self._wire

    @property
    def closed(self) -> bool:
        """Whether `close` has ended the group."""
        return self._closed

    def close(self) -> None:
        """Ends the group and frees its mailboxes; closing twice is harmless.

        Waits for the programs that run on the group's devices.

        Raises:
            PcieError: the group was made in another process (before a fork), or its
                devices are still busy after the timeout (as they are when a program
                that uses the group calls this).
        """
        if self._closed:
            return
        self._require_own_process()
        failure = None
        if self._native is not None:
            if self.in_use:
                failure = self._drain()
            self._native.close_group(self.id)
        self._closed = True
        if failure is not None:
            raise PcieError(
                f"{self!r} is closed, without having waited for the programs that ran "
                f"on its devices: {failure}"
            ) from failure

    def _drain(self) -> Exception | None:
        """Waits until the devices have run everything that was dispatched to them.

        Returns:
            What kept it from waiting, if something did.
        """
        spec = jax.sharding.PartitionSpec(self.mesh.axis_names)

        failures: list[Exception] = []

        def run() -> None:
            # A program of all devices; devices run theirs in the order of dispatch.
            body = jax.shard_map(
                lambda x: x + 1, mesh=self.mesh, in_specs=spec, out_specs=spec
            )
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            zeros = jax.device_put(np.zeros(self.mesh.size, np.float32), sharding)
            jax.block_until_ready(jax.jit(body)(zeros))

        def run_after_all_others() -> None:
            try:
                run()
            except Exception as error:
                failures.append(error)

        # On a thread of its own, because a wait without an end would be a hang.
        thread = threading.Thread(target=run_after_all_others, daemon=True)
        thread.start()
        thread.join(self.timeout_s + _DRAIN_GRACE_S)
        if thread.is_alive():
            raise PcieError(
                f"{self!r} cannot be closed: programs still run on its devices after "
                f"{self.timeout_s + _DRAIN_GRACE_S:g} s (a program cannot close the "
                "group that it uses)"
            )
        return failures[0] if failures else None

    def __enter__(self) -> PeerGroup:
        self.require_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def require_usable(self) -> None:
        """Raises `PcieError` if the group is closed or belongs to another process."""
        if self._closed:
            raise PcieError(f"{self!r} is closed")
        self._require_own_process()

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise PcieError(
                f"{self!r} was made in process {self._process} and cannot be used "
                f"after fork in process {os.getpid()}"
            )

    def check(self) -> None:
        """Raises the first failure of the group's collectives as a `PcieError`."""
        self.require_usable()
        if self._native is not None:
            self._native.check_group(self.id)

    def resolve_wire(self, wire: str | WireMode | None) -> WireMode:
        """The mode of a call: its own, else the group's."""
        return self.wire if wire is None else WireMode.parse(wire)

    def plan(
        self,
        op: str,
        shape: tuple[int, ...],
        dtype: Any,  # noqa: ANN401
        wire: str | WireMode | None = None,
    ) -> Plan:
        """Says how a call would be carried out, without running it.

        Args:
            op: ``"all_reduce"``, ``"all_gather_pair"``, ``"all_gather_heads"`` or
                ``"all_gather_topk"``.
            shape: the shape of one rank's operand; of an op with two, both shapes.
            dtype: its dtype, or both.
            wire: the call's wire mode; default the group's. (Gathers are lossless.)

        Returns:
            The plan.

        Raises:
            ValueError, TypeError: `op`, `shape`, `dtype` or `wire` is one that a call
                would refuse.
            PcieError: the group is closed.

        Example:
            >>> group.plan("all_reduce", (1024,), "bfloat16", wire="i8_ring").path
            'peer'
        """
        self.require_usable()
        mode = self.resolve_wire(wire)
        if op in _GATHERS:
            return self._plan_gather(op, shape, dtype)
        if op != "all_reduce":
            known = ", ".join(map(repr, ("all_reduce", *_GATHERS)))
            raise ValueError(f"{op!r} is not an operation; there are {known}")
        dtype = check_dtype(op, dtype)
        count = math.prod(as_shape(op, shape, dtype.itemsize))
        call = (int(mode.codec), int(mode.topology), dtype.name, count)

        def plan(path: str, mover: str, segments: int, sent: int, why: str) -> Plan:
            taken = mode if path == "peer" else OFF
            return Plan(
                op, path, taken.codec, taken.topology, mover, segments, sent, why
            )

        if self.world_size == 1:
            return plan("identity", "none", 0, 0, "a world of one rank")
        if count == 0:
            return plan("empty", "none", 0, 0, "no elements")
        if not self.uses_peers:
            native = 2 * (self.world_size - 1) * count * dtype.itemsize
            sent = math.ceil(native / self.world_size)
            reason = f"{self.world_size} ranks; peers serve up to {MAX_WORLD_SIZE}"
            return plan("lax", "XLA", 1, sent, reason)
        return plan(
            "peer",
            "process memory" if self.platform == "cpu" else "kernel stores",
            self._native.num_segments(self.id, *call),
            _ffi.wire_bytes(*call, self.world_size),
            "compressed" if mode.compresses else "compression is off",
        )

    def _plan_gather(self, op: str, shapes: Any, dtypes: Any) -> Plan:  # noqa: ANN401
        shapes, dtypes = _operands_of_gather(op, shapes, dtypes)
        bytes_of = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        rows = [
            (s[0], size // s[0])
            for s, size in zip(shapes, bytes_of, strict=True)
            if size
        ]
        selects = op == "all_gather_topk" and self.fuses_selection(
            self.world_size * shapes[1][1]
        )

        def plan(path: str, mover: str, segments: int, why: str) -> Plan:
            sent = (self.world_size - 1) * sum(bytes_of)
            return Plan(op, path, Codec.RAW, Topology.A2A, mover, segments, sent, why)

        if not rows:
            return plan("empty", "none", 0, "no elements")
        if self.world_size == 1:
            return plan("identity", "none", 0, "a world of one rank")
        if not self.uses_peers:
            reason = f"{self.world_size} ranks; peers serve up to {MAX_WORLD_SIZE}"
            return plan("lax", "XLA", 1, reason)
        mover = "process memory" if self.platform == "cpu" else "kernel stores"
        selected_rows = shapes[1][0] if selects else 0
        segments = self._native.gather_segments(
            self.id, selected_rows, rows[:1] if selects else rows
        )
        if op == "all_gather_topk" and not selects:
            reason = (
                f"{self.world_size * shapes[1][1]} experts; the fused kernel chooses "
                f"from up to {_ffi.MAX_FUSED_EXPERTS}: a gather, then topk_route"
            )
            return plan("separate", mover, segments, reason)
        return plan("peer", mover, segments, "lossless, in one launch")

    def fuses_selection(self, num_experts: int) -> bool:
        """Whether experts are chosen in the launch that gathers their logits."""
        return self.platform == "cpu" or num_experts <= _ffi.MAX_FUSED_EXPERTS

    def __repr__(self) -> str:
        return f"PeerGroup(axis {self.axis!r}, {self.world_size} ranks, {self.wire})"


def _operands_of_gather(
    op: str,
    shapes: Any,  # noqa: ANN401
    dtypes: Any,  # noqa: ANN401
) -> tuple[list[tuple[int, ...]], list[np.dtype]]:
    """Shapes and dtypes of each operand, if they are what the call takes."""
    num_axes = _GATHERS[op]
    if len(num_axes) == 1:
        shapes, dtypes = (shapes,), (dtypes,)
    for given in (shapes, dtypes):
        if not isinstance(given, tuple | list) or len(given) != len(num_axes):
            names = " and ".join(num_axes)
            raise ValueError(f"{op} has {names}: give both shapes and both dtypes")
    dtypes = [
        check_movable(op, name, d) for name, d in zip(num_axes, dtypes, strict=True)
    ]
    shapes = [
        as_shape(op, shape, dtype.itemsize)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for (name, axes), shape in zip(num_axes.items(), shapes, strict=True):
        if len(shape) != axes:
            raise ValueError(
                f"{op}: {name} has shape {shape}; it must have {axes} axes"
            )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"{op}: operands of shapes {shapes} have not equally many rows"
        )
    if op == "all_gather_topk":
        check_dtype("all_gather_topk's logits", dtypes[1])
    return shapes, dtypes


def _slices(mesh: jax.sharding.Mesh, axis: str) -> np.ndarray:
    position = mesh.axis_names.index(axis)
    return np.moveaxis(mesh.devices, position, -1).reshape(-1, mesh.shape[axis])


def device_ids(mesh: jax.sharding.Mesh) -> list:
    """The ids of a mesh's devices, nested like its axes."""
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def same_slices(group: PeerGroup, mesh: jax.sharding.Mesh) -> bool:
    """Whether `mesh` has the group's lines of devices, in the group's order."""
    if group.axis not in mesh.axis_names:
        return False
    lines = {tuple(line) for line in _slices(mesh, group.axis)}
    return lines == {tuple(line) for line in group.slices}


def _timeout(seconds: float | str) -> float:
    timeout_s = float(seconds)
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be positive and at most {_MAX_TIMEOUT_S} (a day), "
            f"not {timeout_s}"
        )
    return timeout_s


def _from_environment(
    variable: str, parse: Callable[[str], Value], default: Value
) -> Value:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from None
