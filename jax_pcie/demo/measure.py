"""Runs the sharded model with one way of summing after the other.

Owns the mesh, the programs, the clock and the comparison with the unsharded model; the
model itself is `model`'s. Each program also returns the raw bits that every tensor rank
holds: an invariant output alone would show one rank's copy and hide a difference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pcie
from jax_pcie import PeerGroup, WireMode
from jax_pcie.demo import model
from jax_pcie.demo.errors import DemoError
from jax_pcie.demo.packing import Batch

DATA, TENSOR = "data", "tensor"
WIRE_DTYPE = jnp.bfloat16
# Eleven ways of summing, each compiled and warmed up, must fit in a minute on two
# cores, where a batch takes 0.8 to 1.4 s; a GPU's milliseconds get the most runs.
SECONDS_OF_RUNS, _MAX_RUNS = 1.2, 9


@dataclass(frozen=True)
class Row:
    """What one way of summing gave."""

    mode: str
    wire_bytes: int  # that a rank sends for a batch
    worst_drift: float  # 1 - cosine between its embeddings and the unsharded ones
    mean_drift: float
    time_ms: float  # median over the runs, for a batch
    runs_ms: tuple[float, ...]
    tokens_per_s: float  # real tokens
    same_bits: bool  # on all tensor ranks
    path: str


@dataclass(frozen=True)
class Problem:
    """A batch, the model for it, and where its sentences' embeddings are."""

    weights: model.Weights
    batch: Batch
    places: np.ndarray  # int [sentences, 2]: row and segment

    @property
    def num_segments(self) -> int:
        """The most sentences that a row has."""
        return int(self.places[:, 1].max()) + 1

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int((self.batch.segments >= 0).sum())

    def pick(self, embeddings: np.ndarray) -> np.ndarray:
        """``[..., rows, segments, hidden]`` to ``[..., sentences, hidden]``."""
        return embeddings[..., self.places[:, 0], self.places[:, 1], :]


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Lays devices out as data x tensor, the heads shared out evenly.

    Raises:
        DemoError: fewer than two devices.
    """
    # gcd(5, 12) = 1 leaves nothing to sum: such a number goes without its last device.
    for num_devices in range(len(devices), 1, -1):
        num_tensor = math.gcd(num_devices, model.NUM_HEADS)
        if num_tensor > 1:
            return jax.make_mesh(
                (num_devices // num_tensor, num_tensor),
                (DATA, TENSOR),
                axis_types=(AxisType.Auto, AxisType.Auto),
                devices=devices[:num_devices],
            )
    raise DemoError(f"{len(devices)} device has no other to sum with, 2 are needed")


def embed_unsharded(problem: Problem, device: jax.Device) -> np.ndarray:
    """Returns float32 ``[sentences, hidden]``, computed on one device."""
    weights, batch = jax.device_put((problem.weights, problem.batch), device)
    # Elsewhere GPUs may use their fast product; what others are held against may not.
    with jax.default_matmul_precision("highest"):
        forward = jax.jit(model.embed, static_argnums=2)
        return problem.pick(np.asarray(forward(weights, batch, problem.num_segments)))


class Bench:
    """The problem placed on a mesh, and the group that sums over it.

    Args:
        mesh: axes `DATA` and `TENSOR`.
        group: of the axis `TENSOR`.
        problem: what to embed.
        expected: float32 ``[sentences, hidden]``, as `embed_unsharded` gives it.
    """

    def __init__(
        self, mesh: Mesh, group: PeerGroup, problem: Problem, expected: np.ndarray
    ) -> None:
        self._mesh = mesh
        self._group = group
        self._problem = problem
        self._expected = expected
        self._specs = (model.partition(TENSOR), Batch(*[P(DATA)] * 3))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._specs)
        self._placed = jax.device_put((problem.weights, problem.batch), shardings)

    def run(self, wire: WireMode | None) -> Row:
        """Runs the model with its sums done in `wire`; None is XLA's `lax.psum`."""
        program = self._compile(wire)
        embeddings, copies = jax.block_until_ready(program(*self._placed))
        runs_ms: list[float] = []
        while len(runs_ms) < _MAX_RUNS and sum(runs_ms) < 1e3 * SECONDS_OF_RUNS:
            start = time.perf_counter()
            jax.block_until_ready(program(*self._placed))
            runs_ms.append(1e3 * (time.perf_counter() - start))

        drift = cosine_drift(self._problem.pick(np.asarray(embeddings)), self._expected)
        bits = np.asarray(copies)
        time_ms = statistics.median(runs_ms)
        num_bytes, path = self._wire(wire)
        return Row(
            mode="psum" if wire is None else str(wire),
            wire_bytes=num_bytes,
            worst_drift=float(drift.max()),
            mean_drift=float(drift.mean()),
            time_ms=time_ms,
            runs_ms=tuple(runs_ms),
            tokens_per_s=1e3 * self._problem.num_tokens / time_ms,
            same_bits=bool((bits == bits[0]).all()),
            path=path,
        )

    def _compile(self, wire: WireMode | None) -> Callable[..., tuple[Array, Array]]:
        num_segments = self._problem.num_segments

        # Products are float32 dots: 150 GFLOP/s on two cores. With AMX bfloat16 ran
        # at 0.8 to 1.8 times that, depending on JAX's version; they would also hide the
        # wire's rounding behind their own. Only what travels is bfloat16.
        def row_sum(partial: Array) -> Array:
            narrow = partial.astype(WIRE_DTYPE)
            if wire is None:
                total = lax.psum(narrow, TENSOR)
            else:
                total = jax_pcie.all_reduce(narrow, self._group, wire=wire)
            return total.astype(partial.dtype)

        def body(weights: model.Weights, batch: Batch) -> tuple[Array, Array]:
            embeddings = model.embed(weights, batch, num_segments, row_sum)
            bits = lax.bitcast_convert_type(embeddings, jnp.uint32)
            return embeddings, lax.pcast(bits, TENSOR, to="varying")[None]

        sharded = jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=self._specs,
            out_specs=(P(DATA), P(TENSOR, DATA)),
            check_vma=True,
        )
        return jax.jit(sharded).lower(*self._placed).compile()

    def _wire(self, wire: WireMode | None) -> tuple[int, str]:
        """Returns the bytes that a rank sends for a batch, and the path they take."""
        num_tokens = self._problem.batch.ids.size // self._mesh.shape[DATA]
        shape = (num_tokens, model.HIDDEN)
        if wire is None:
            # XLA does not say what it sends; this is what a ring would. (On a CPU it
            # widens to float32 first: the compiled program shows the converts.)
            n = self._mesh.shape[TENSOR]
            native_bytes = math.prod(shape) * jnp.dtype(WIRE_DTYPE).itemsize
            return model.NUM_SUMS * 2 * (n - 1) * native_bytes // n, "lax.psum"
        plan = self._group.plan("all_reduce", shape, WIRE_DTYPE, wire=wire)
        return model.NUM_SUMS * plan.wire_bytes, str(plan.path)


def cosine_drift(embeddings: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns ``1 - cos`` of each pair of rows, in float64.

    Taken as half the squared distance of the unit vectors: the same, and free of the
    cancellation that leaves nothing of a small angle.
    """
    unit = [
        x / np.linalg.norm(x, axis=-1, keepdims=True)
        for x in (embeddings.astype(np.float64), expected.astype(np.float64))
    ]
    return np.square(unit[0] - unit[1]).sum(axis=-1) / 2
