"""Ways to get a sum over the wrong devices, or to lose a result: each is an error.

JAX keeps lowered programs by mesh shape, not by devices, and runs programs after the
call returned; both have once given a plausible wrong number or a lost one here.
"""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pcie
from jax_pcie import PeerGroup

XS = np.array(
    [[1.0, 100.0], [10.0, 1000.0]], np.float32
)  # every subset has its own sum


def square_mesh(order: list[int]) -> Mesh:
    devices = np.array(jax.devices("cpu"))[order].reshape(2, 2)
    return Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def on_mesh(mesh: Mesh) -> jax.Array:
    return jax.device_put(XS, NamedSharding(mesh, P("dp", "tp")))


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 3, 2, 1], [1, 0, 2, 3]])
def test_a_program_compiled_again_for_other_devices_is_refused(
    order: list[int],
) -> None:
    mesh, other = square_mesh([0, 1, 2, 3]), square_mesh(order)
    with PeerGroup(mesh, "tp") as group:
        run = jax.jit(
            jax.shard_map(
                lambda x: jax_pcie.all_reduce(x, group),
                in_specs=P("dp", "tp"),
                out_specs=P("dp"),
            )
        )
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(run(on_mesh(mesh))[:, 0], XS.sum(axis=1))
        with jax.set_mesh(other), pytest.raises(ValueError, match="other devices"):
            run(on_mesh(other))


def test_a_program_without_devices_is_refused() -> None:
    mesh = square_mesh([0, 1, 2, 3])
    with PeerGroup(mesh, "tp") as group:
        body = partial(jax_pcie.all_reduce, group=group)
        specs = {"in_specs": P("dp", "tp"), "out_specs": P("dp")}
        abstract = jax.shard_map(body, mesh=mesh.abstract_mesh, **specs)
        with pytest.raises(ValueError, match="belongs to devices"):
            jax.jit(abstract)(on_mesh(square_mesh([0, 2, 1, 3])))
        concrete = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
        with pytest.raises(ValueError, match="belongs to devices"):
            jax.export.export(concrete)(on_mesh(mesh))


def test_results_may_be_read_after_the_group_is_closed() -> None:
    mesh = make_mesh("cpu", (4,), ("tp",))
    xs = np.ones((4, 1 << 20), np.float32)
    for _ in range(3):
        with PeerGroup(mesh, "tp", wire="i8_ring") as group:
            run = jax.jit(
                jax.shard_map(
                    lambda x, group=group: jax_pcie.all_reduce(x, group),
                    mesh=mesh,
                    in_specs=P("tp"),
                    out_specs=P(),
                )
            )
            ys = [run(xs), run(2 * xs)]
        for factor, y in enumerate(ys, start=1):
            np.testing.assert_array_equal(y, np.full((1, 1 << 20), 4.0 * factor))


def test_a_vmap_named_like_the_axis_is_refused() -> None:
    mesh = make_mesh("cpu", (4,), ("tp",))
    with PeerGroup(mesh, "tp") as group:

        def body(x: jax.Array) -> jax.Array:
            return jax.vmap(
                lambda v: jax_pcie.all_reduce(v, group), axis_name="tp", axis_size=4
            )(x)

        run = jax.shard_map(
            body, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(), check_vma=False
        )
        with pytest.raises(ValueError, match="vmap calls its axis 'tp'"):
            jax.jit(run)(np.ones((4, 4), np.float32))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 1e10, float("inf"), float("nan")])
def test_a_timeout_that_clocks_cannot_count_is_refused(timeout_s: float) -> None:
    mesh = make_mesh("cpu", (2,), ("tp",))
    with pytest.raises(ValueError, match="timeout_s must be positive and at most"):
        PeerGroup(mesh, "tp", timeout_s=timeout_s)
