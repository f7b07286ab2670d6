"""`PeerGroup`: meshes, lifetime, errors by their message, `plan`, and the watchdog.

Errors that JAX can see come at trace time as Python exceptions; what happens inside a
compiled program arrives as JAX's runtime error with our message in it.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import (
    MODES,
    Mode,
    Ranks,
    assert_all_ranks_hold,
    assert_same_bits,
    at_all_world_sizes,
    at_one_world_size,
    first_devices,
    make_mesh,
    on_all_ranks,
    put,
    run_on_all_ranks,
    with_modes,
)
from jax import P, lax
from jax.sharding import AxisType, Mesh
from oracles import BF16, F32, Rng

import jax_pcie
from jax_pcie import Codec, PcieError, PeerGroup, Topology, WireMode, _ffi

with_platforms = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def mapped(fn: Callable, mesh: Mesh, axis: str = "tp") -> Callable:
    return jax.shard_map(fn, mesh=mesh, in_specs=P(axis), out_specs=P())


def short_id(value: object) -> str:
    """(2, 4) as 2x4, so that a test's name can be typed."""
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def zeros(num: int = 64) -> jax.Array:
    return jnp.zeros((num,), jnp.float32)


@pytest.mark.parametrize(
    ("platform", "shape", "axes", "axis"),
    [
        ("cpu", (2, 4), ("dp", "tp"), "tp"),
        ("cpu", (2, 4), ("dp", "tp"), "dp"),
        ("cpu", (4, 2), ("tp", "dp"), "tp"),
        ("cpu", (2, 2, 2), ("pp", "tp", "dp"), "tp"),
        ("cpu", (1, 8), ("dp", "tp"), "tp"),
        ("cpu", (8, 1), ("dp", "tp"), "tp"),
        pytest.param("cuda", (1, 2), ("dp", "tp"), "tp", marks=pytest.mark.cuda),
        pytest.param("cuda", (2, 1), ("tp", "dp"), "tp", marks=pytest.mark.cuda),
        pytest.param("cuda", (2, 1), ("dp", "tp"), "tp", marks=pytest.mark.cuda),
    ],
    ids=short_id,
)
@with_modes(MODES)
def test_each_slice_of_the_other_axes_is_a_group_of_its_own(
    platform: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    axis: str,
    mode: Mode,
    rng: Rng,
) -> None:
    mesh = make_mesh(platform, shape, axes)
    at = axes.index(axis)
    xs = oracles.varied_input(mesh.size, BF16, rng)
    xs = xs.reshape(*shape, -1)
    with PeerGroup(mesh, axis) as group:
        assert (group.axis, group.world_size) == (axis, shape[at])
        got = run_on_all_ranks(
            lambda x: jax_pcie.all_reduce(x, group, wire=mode.wire), xs, mesh
        )
    slices = np.moveaxis(xs, at, -2).reshape(-1, shape[at], xs.shape[-1])
    results = np.moveaxis(got, at, -2).reshape(slices.shape)
    for y, x in zip(results, slices, strict=True):
        assert_all_ranks_hold(y, oracles.all_reduce(mode.codec, mode.topology, x))


@pytest.mark.parametrize(
    ("platform", "order"),
    [
        ("cpu", [2, 0, 3, 1]),
        ("cpu", [7, 1, 4]),
        ("cpu", [6, 5, 4, 3, 2, 1, 0, 7]),
        pytest.param("cuda", [1, 0], marks=pytest.mark.cuda),
    ],
    ids=short_id,
)
@with_modes(MODES)
def test_a_rank_is_a_place_in_the_mesh_and_not_a_device_number(
    platform: str, order: list[int], mode: Mode, rng: Rng
) -> None:
    """Sums depend on the order of ranks, so wrong ranks show in the bits."""
    devices = np.array(first_devices(platform, max(order) + 1))[order]
    mesh = Mesh(devices, ("tp",), axis_types=(AxisType.Auto,))
    xs = oracles.varied_input(len(order), BF16, rng)
    with PeerGroup(mesh, "tp") as group:
        got = run_on_all_ranks(
            lambda x: jax_pcie.all_reduce(x, group, wire=mode.wire), xs, mesh
        )
    assert_all_ranks_hold(got, oracles.all_reduce(mode.codec, mode.topology, xs))


def test_a_permuted_mesh_of_two_axes(rng: Rng) -> None:
    devices = np.array(jax.devices("cpu"))[rng.permutation(8)].reshape(2, 4)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    xs = oracles.varied_input(8, BF16, rng).reshape(2, 4, -1)
    with PeerGroup(mesh, "tp", wire="e4m3_ring") as group:
        got = run_on_all_ranks(lambda x: jax_pcie.all_reduce(x, group), xs, mesh)
    for y, x in zip(got, xs, strict=True):
        assert_all_ranks_hold(y, oracles.all_reduce("e4m3", "ring", x))


@at_one_world_size
def test_a_group_serves_a_shard_map_that_leaves_other_axes_automatic(
    ranks: Ranks, rng: Rng
) -> None:
    mesh = make_mesh(ranks.platform, (1, ranks.world), ("dp", "tp"))
    xs = oracles.varied_input(ranks.world, BF16, rng)
    with PeerGroup(mesh, "tp", wire="i8_ring") as group:
        fn = jax.shard_map(
            lambda x: jax_pcie.all_reduce(x[0], group),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P(),
            axis_names={"tp"},
        )
        placed = jax.device_put(xs, jax.NamedSharding(mesh, P("tp")))
        got = np.asarray(jax.jit(fn)(placed))
    assert_same_bits(got, oracles.all_reduce("int8", "ring", xs))


def check_names_the_axis(error: pytest.ExceptionInfo) -> None:
    message = str(error.value)
    assert "tp" in message
    assert "shard_map" in message


@at_one_world_size
def test_a_call_outside_shard_map_is_refused(ranks: Ranks) -> None:
    """Served, it would gather a sharded array and sum it world_size times."""
    with pytest.raises(ValueError) as error:
        jax_pcie.all_reduce(zeros(), ranks.group)
    check_names_the_axis(error)
    with pytest.raises(ValueError) as error:
        jax.jit(lambda x: jax_pcie.all_reduce(x, ranks.group))(zeros())
    check_names_the_axis(error)


@at_one_world_size
def test_a_call_under_another_axis_is_refused(ranks: Ranks) -> None:
    mesh = make_mesh(ranks.platform, (ranks.world,), ("dp",))
    fn = mapped(lambda x: jax_pcie.all_reduce(x, ranks.group), mesh, axis="dp")
    with pytest.raises(ValueError) as error:
        jax.jit(fn)(zeros())
    check_names_the_axis(error)


@at_one_world_size
def test_a_call_where_the_axis_is_not_manual_is_refused(ranks: Ranks) -> None:
    mesh = make_mesh(ranks.platform, (1, ranks.world), ("dp", "tp"))
    with PeerGroup(mesh, "tp") as group:
        fn = jax.shard_map(
            lambda x: jax_pcie.all_reduce(x, group),
            mesh=mesh,
            in_specs=P("dp"),
            out_specs=P("dp"),
            axis_names={"dp"},
        )
        with pytest.raises(ValueError) as error:
            jax.jit(fn)(zeros())
        check_names_the_axis(error)


@with_platforms
def test_a_mesh_of_another_size_is_refused_with_both_sizes(platform: str) -> None:
    large, small = (2, 1) if platform == "cuda" else (8, 4)
    mesh = make_mesh(platform, (small,), ("tp",))
    with (
        PeerGroup(make_mesh(platform, (large,), ("tp",)), "tp") as group,
        pytest.raises(ValueError) as error,
    ):
        jax.jit(mapped(lambda x: jax_pcie.all_reduce(x, group), mesh))(zeros())
    assert str(large) in str(error.value)
    assert str(small) in str(error.value)


def test_other_devices_than_the_groups_are_refused() -> None:
    """Four others under the same axis name: known at lowering at the earliest."""
    mesh = make_mesh("cpu", (4,), ("tp",), first=4)
    with PeerGroup(make_mesh("cpu", (4,), ("tp",)), "tp") as group:
        fn = jax.jit(mapped(lambda x: jax_pcie.all_reduce(x, group), mesh))
        with pytest.raises((ValueError, RuntimeError), match="device"):
            jax.block_until_ready(fn(put(np.zeros((4, 8), np.float32), mesh)))
        group.check()


@at_one_world_size
@pytest.mark.parametrize(
    "dtype", ["int32", "int8", "uint16", "bool", "complex64", "float8_e4m3fn"]
)
def test_other_dtypes_are_refused_by_name(ranks: Ranks, dtype: str) -> None:
    fn = mapped(lambda x: jax_pcie.all_reduce(x, ranks.group), ranks.mesh)
    with pytest.raises(TypeError, match=dtype):
        jax.eval_shape(fn, jax.ShapeDtypeStruct((64,), dtype))


@at_one_world_size
def test_one_bad_leaf_refuses_the_whole_tree(ranks: Ranks) -> None:
    fn = mapped(
        lambda x: jax_pcie.all_reduce((x, x.astype(int)), ranks.group), ranks.mesh
    )
    with pytest.raises(TypeError, match="int32"):
        jax.eval_shape(fn, zeros())


@at_one_world_size
@pytest.mark.parametrize("name", ["wire", "grad_wire"])
def test_an_unknown_mode_is_refused_by_name(ranks: Ranks, name: str) -> None:
    fn = mapped(
        lambda x: jax_pcie.all_reduce(x, ranks.group, **{name: "mx_rnig"}), ranks.mesh
    )
    with pytest.raises(ValueError, match="mx_rnig") as error:
        jax.eval_shape(fn, zeros())
    for mode in ("bf16", "e4m3", "i8_ring", "mx_a2a"):
        assert mode in str(error.value)


@with_platforms
@pytest.mark.parametrize(
    ("arguments", "error", "pattern"),
    [
        ({"axis": "ep"}, ValueError, "ep"),
        ({"wire": "mx_rnig"}, ValueError, "mx_rnig"),
        ({"wire": 8}, TypeError, "int"),
        ({"max_bytes": 0}, ValueError, "max_bytes"),
        ({"max_bytes": 1 << 70}, ValueError, "max_bytes must be .* at most"),
        ({"max_bytes": 1e6}, TypeError, "max_bytes must be an integer"),
        ({"timeout_s": "5"}, TypeError, "timeout_s must be a number, not '5'"),
        ({"max_bytes": -1}, ValueError, "max_bytes"),
        ({"timeout_s": 0.0}, ValueError, "timeout_s"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(
    platform: str, arguments: dict, error: type[Exception], pattern: str
) -> None:
    mesh = make_mesh(platform, (2,), ("tp",))
    with pytest.raises(error, match=pattern):
        PeerGroup(mesh, **{"axis": "tp", **arguments})


@with_platforms
def test_the_environment_gives_the_default_mode(
    platform: str, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    mesh = make_mesh(platform, (2,), ("tp",))
    xs = oracles.varied_input(2, BF16, rng)
    monkeypatch.setenv("JAX_PCIE_WIRE", " I8-ring ")
    with PeerGroup(mesh, "tp") as group, PeerGroup(mesh, "tp", wire="mx") as named:
        assert group.wire == WireMode(Codec.INT8, Topology.RING)
        assert named.wire == WireMode(Codec.MXFP8, Topology.AG)
        monkeypatch.setenv("JAX_PCIE_WIRE", "e4m3")  # too late: read once
        got = run_on_all_ranks(lambda x: jax_pcie.all_reduce(x, group), xs, mesh)
    assert_all_ranks_hold(got, oracles.all_reduce("int8", "ring", xs))


@with_platforms
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_PCIE_WIRE", "mx_rnig"),
        ("JAX_PCIE_TIMEOUT_S", "soon"),
        ("JAX_PCIE_TIMEOUT_S", "-1"),
    ],
)
def test_a_bad_environment_is_refused_when_a_group_is_made(
    platform: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=value):
        PeerGroup(make_mesh(platform, (2,), ("tp",)), "tp")


def test_importing_touches_no_device_and_no_environment() -> None:
    """The backends are still unmade afterwards: their number of devices can be set."""
    program = (
        "import jax_pcie, jax; jax.config.update('jax_num_cpu_devices', 3); "
        "assert len(jax.devices('cpu')) == 3"
    )
    environment = {**os.environ, "JAX_PCIE_WIRE": "mx_rnig", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@with_platforms
def test_a_context_manager_closes_the_group(platform: str) -> None:
    with PeerGroup(make_mesh(platform, (2,), ("tp",)), "tp") as group:
        assert not group.closed
        group.check()
    assert group.closed
    group.close()
    assert group.closed


@with_platforms
def test_a_failing_body_closes_the_group_too(platform: str) -> None:
    with (
        pytest.raises(KeyError, match="body"),
        PeerGroup(make_mesh(platform, (2,), ("tp",)), "tp") as group,
    ):
        raise KeyError("body")
    assert group.closed


@with_platforms
def test_a_closed_group_is_refused_when_a_program_is_traced(platform: str) -> None:
    mesh = make_mesh(platform, (2,), ("tp",))
    group = PeerGroup(mesh, "tp")
    group.close()
    with pytest.raises(PcieError, match="closed"):
        jax.jit(mapped(lambda x: jax_pcie.all_reduce(x, group), mesh))(zeros())


@with_platforms
def test_a_program_does_not_outlive_its_group(platform: str) -> None:
    """Not even when an equal group exists again."""
    mesh = make_mesh(platform, (2,), ("tp",))
    x = put(np.ones((2, 8), np.float32), mesh)

    def program(group: PeerGroup) -> Callable:
        return jax.jit(mapped(lambda v: jax_pcie.all_reduce(v[0], group), mesh))

    with PeerGroup(mesh, "tp") as group:
        old = program(group)
        np.testing.assert_array_equal(old(x), np.full(8, 2, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
        jax.block_until_ready(old(x))
    with PeerGroup(mesh, "tp") as again:
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            jax.block_until_ready(old(x))
        np.testing.assert_array_equal(program(again)(x), np.full(8, 2, np.float32))


@with_platforms
def test_groups_come_and_go(platform: str) -> None:
    mesh = make_mesh(platform, (2,), ("tp",))
    for k in range(1, 6):
        with PeerGroup(mesh, "tp") as group:
            xs = np.full((2, 300), k, np.float32)
            got = run_on_all_ranks(
                lambda x, g=group: jax_pcie.all_reduce(x, g), xs, mesh
            )
        np.testing.assert_array_equal(got, 2 * xs)


def test_an_error_is_a_runtime_error() -> None:
    assert issubclass(PcieError, RuntimeError)


@at_one_world_size
@with_modes(MODES)
def test_a_plan_is_a_readable_value(ranks: Ranks, mode: Mode) -> None:
    plan = ranks.group.plan("all_reduce", (3, 1000), BF16, wire=mode.wire)
    wire = WireMode.parse(mode.wire)
    assert dataclasses.is_dataclass(plan)
    assert (plan.codec, plan.topology) == (wire.codec, wire.topology)
    assert plan.path
    assert plan.mover
    assert plan.reason
    for part in (plan.path, wire.codec.name, wire.topology.name, str(plan.wire_bytes)):
        assert part in repr(plan)


@at_all_world_sizes
@with_modes(MODES)
def test_a_plan_counts_the_bytes_that_a_rank_sends(ranks: Ranks, mode: Mode) -> None:
    n = ranks.world
    shard = 512 * 6
    plan = ranks.group.plan("all_reduce", (2, n * shard // 2), BF16, wire=mode.wire)
    record, raw = shard * 132 // 128, shard * BF16.itemsize
    reduce_hop = raw if mode.codec == "raw" or mode.topology == "ag" else record
    gather_hop = raw if mode.codec == "raw" else record
    assert plan.wire_bytes == (n - 1) * (reduce_hop + gather_hop)


@at_one_world_size
def test_a_plan_follows_the_groups_mode(ranks: Ranks) -> None:
    with PeerGroup(ranks.mesh, "tp", wire="mx_ring") as group:
        plan = group.plan("all_reduce", (1 << 16,), jnp.float16)
        assert (plan.codec, plan.topology) == (Codec.MXFP8, Topology.RING)
        assert group.plan("all_reduce", (1 << 16,), jnp.float16, wire="off").codec is (
            Codec.RAW
        )
        assert group.plan("all_reduce", (1 << 16,), "float16") == plan


@at_one_world_size
def test_a_long_message_is_planned_in_segments(ranks: Ranks) -> None:
    with PeerGroup(ranks.mesh, "tp", max_bytes=1 << 16) as group:
        plans = [
            group.plan("all_reduce", (1 << k,), F32, wire="i8_ring")
            for k in (8, 20, 22)
        ]
    segments = [plan.segments for plan in plans]
    assert segments[0] == 1
    assert 1 < segments[1] < segments[2]


@at_one_world_size
def test_a_plan_refuses_what_a_call_refuses(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="mx_rnig"):
        ranks.group.plan("all_reduce", (8,), F32, wire="mx_rnig")
    with pytest.raises(ValueError, match="all_redcue"):
        ranks.group.plan("all_redcue", (8,), F32)


BAD_PLANS: dict[str, tuple[tuple, type[Exception], str]] = {
    "no shape": (("all_reduce", 4, F32), TypeError, "a tuple of integers, not 4"),
    "no integer": (("all_reduce", (4.5,), F32), TypeError, "an integer, not 4.5"),
    "negative": (("all_reduce", (-4,), F32), ValueError, "has a negative size"),
    "too large": (("all_reduce", (1 << 62, 4), F32), ValueError, "too large"),
    "no dtype": (("all_reduce", (4,), None), TypeError, "not None"),
    "unknown dtype": (("all_reduce", (4,), "notatype"), TypeError, "not notatype"),
    "negative rows": (
        ("all_gather_heads", (-4, 8, 2), F32),
        ValueError,
        "has a negative size",
    ),
    "too few axes": (
        ("all_gather_heads", (4, 8), F32),
        ValueError,
        r"x has shape \(4, 8\); it must have 3 axes",
    ),
    "eight bytes": (
        ("all_gather_heads", (4, 8, 2), "int64"),
        TypeError,
        "x has dtype int64 of 8 bytes",
    ),
    "half a byte": (
        ("all_gather_pair", ((4, 8), (4, 8)), (F32, "int4")),
        TypeError,
        "second has dtype int4, less than a byte",
    ),
    "rows that differ": (
        ("all_gather_pair", ((4, 8), (3, 8)), (F32, F32)),
        ValueError,
        "not equally many rows",
    ),
    "one shape": (
        ("all_gather_pair", (4, 8), F32),
        ValueError,
        "all_gather_pair has first and second: give both",
    ),
    "logits of integers": (
        ("all_gather_topk", ((4, 8), (4, 8)), (F32, "int32")),
        TypeError,
        "logits takes bfloat16, float16, float32, not int32",
    ),
    "logits of one axis": (
        ("all_gather_topk", ((4, 8), (4,)), (F32, F32)),
        ValueError,
        "logits has shape",
    ),
    "wire": (
        ("all_gather_heads", (4, 8, 2), F32, "zz"),
        ValueError,
        "'zz'",
    ),
}


@at_one_world_size
@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_names_what_does_not_fit(ranks: Ranks, case: str) -> None:
    arguments, error, pattern = BAD_PLANS[case]
    with pytest.raises(error, match=pattern):
        ranks.group.plan(*arguments)


def test_a_group_stays_open_where_a_program_closes_it_natively() -> None:
    with PeerGroup(make_mesh("cpu", (2,), ("tp",)), "tp", timeout_s=5.0) as group:
        errors = []

        def close(y: np.ndarray) -> np.ndarray:
            try:
                group._native.close_group(group.id)
            except PcieError as error:
                errors.append(str(error))
            return y

        def body(x: jax.Array) -> jax.Array:
            y = jax_pcie.all_reduce(x, group)
            return jax.pure_callback(close, jax.typeof(y), y, vmap_method="sequential")

        jax.block_until_ready(jax.jit(mapped(body, group.mesh))(zeros()))
        assert errors
        assert all("cannot be closed by a program" in error for error in errors)
        group.check()


def test_threads_that_cannot_be_made_are_an_error() -> None:
    program = """
import resource
import jax
jax.config.update("jax_num_cpu_devices", 16)
import jax_pcie
mesh = jax.make_mesh((16,), ("tp",), (jax.sharding.AxisType.Auto,))
jax_pcie.PeerGroup(mesh, "tp").close()  # all that is made once is made now
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
try:
    jax_pcie.PeerGroup(mesh, "tp")
except jax_pcie.PcieError as error:
    assert "16 devices needs as many threads" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((9, 0), "codec 9 is not known"),
        ((0, 7), "topology 7 is not known"),
    ],
)
def test_unknown_numbers_are_no_wire_mode(call: tuple[int, int], message: str) -> None:
    """As a module of another version would send them."""
    with pytest.raises(PcieError, match=message):
        _ffi.wire_bytes(*call, "float32", 1000, 4)


def test_groups_of_an_axis_are_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="axis_index_groups"):
        jax_pcie.all_reduce(zeros(), None, axis_index_groups=[[0, 1]])


@with_platforms
def test_a_single_rank_sends_nothing(platform: str) -> None:
    with PeerGroup(make_mesh(platform, (1,), ("tp",)), "tp", wire="i8_ring") as group:
        assert group.world_size == 1
        assert group.plan("all_reduce", (4096,), F32).wire_bytes == 0


def skipping(group: PeerGroup, skipper: int, mesh: Mesh) -> Callable:
    """A program whose rank `skipper` does not take part in the all-reduce."""
    return on_all_ranks(
        lambda x: lax.cond(
            lax.axis_index("tp") == skipper,
            lambda v: v,
            lambda v: jax_pcie.all_reduce(v, group),
            x,
        ),
        mesh,
        check_vma=False,
    )


def fails_with(pattern: str, call: Callable[[], object]) -> None:
    """A CPU call fails itself; a GPU call ends as NaN, and the next one fails."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=pattern):
        for _ in range(2):
            jax.block_until_ready(call())


@at_one_world_size
@pytest.mark.parametrize("source", ["argument", "environment"])
def test_a_missing_rank_is_named_and_breaks_the_group(
    ranks: Ranks, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ranks.world // 2
    message = f"missing ranks: {missing}"
    xs = np.ones((ranks.world, 64), np.float32)
    if source == "environment":
        monkeypatch.setenv("JAX_PCIE_TIMEOUT_S", "1")
    arguments = {"timeout_s": 1.0} if source == "argument" else {}
    with PeerGroup(ranks.mesh, "tp", **arguments) as group:
        program = skipping(group, missing, ranks.mesh)
        group.check()
        start = time.monotonic()
        fails_with(message, lambda: program(xs))
        assert 0.5 < time.monotonic() - start < 15
        with pytest.raises(PcieError, match=message):
            group.check()

        complete = on_all_ranks(lambda x: jax_pcie.all_reduce(x, group), ranks.mesh)
        start = time.monotonic()
        fails_with(message, lambda: complete(xs))
        assert time.monotonic() - start < 5  # compilation included, but no wait

    # Other groups of the same devices are as they were, and so is XLA.
    np.testing.assert_array_equal(ranks.all_reduce("bf16", xs), ranks.world * xs)
    with PeerGroup(ranks.mesh, "tp") as fresh:
        got = run_on_all_ranks(lambda x: jax_pcie.all_reduce(x, fresh), xs, ranks.mesh)
    np.testing.assert_array_equal(got, ranks.world * xs)


def test_all_missing_ranks_are_named() -> None:
    mesh = make_mesh("cpu", (8,), ("tp",))
    xs = np.ones((8, 64), np.float32)
    with PeerGroup(mesh, "tp", timeout_s=1.0) as group:
        program = on_all_ranks(
            lambda x: lax.cond(
                lax.axis_index("tp") % 3 == 1,
                lambda v: v,
                lambda v: jax_pcie.all_reduce(v, group),
                x,
            ),
            mesh,
            check_vma=False,
        )
        fails_with("missing ranks: 1 4 7", lambda: program(xs))


def test_a_rank_that_is_late_is_waited_for() -> None:
    """Rank 1 computes for a while first; the deadline is for those that never come."""
    mesh = make_mesh("cpu", (4,), ("tp",))
    with PeerGroup(mesh, "tp", timeout_s=20.0) as group:

        def body(x: jax.Array) -> jax.Array:
            num_turns = jnp.where(lax.axis_index("tp") == 1, 20_000_000, 1)
            slow = lax.fori_loop(0, num_turns, lambda _, v: v * 0.5 + 0.5, x[:1])
            return jax_pcie.all_reduce(x.at[:1].set(slow), group)

        got = on_all_ranks(body, mesh, check_vma=False)(np.ones((4, 8), np.float32))
    np.testing.assert_array_equal(got, np.full((4, 8), 4, np.float32))


@at_one_world_size
def test_a_group_without_calls_does_not_time_out(ranks: Ranks) -> None:
    """The deadline runs from a rank's arrival, not from the group's last use."""
    xs = np.ones((ranks.world, 8), np.float32)
    with PeerGroup(ranks.mesh, "tp", timeout_s=0.5) as group:
        run = on_all_ranks(lambda x: jax_pcie.all_reduce(x, group), ranks.mesh)
        np.testing.assert_array_equal(run(xs), ranks.world * xs)
        time.sleep(1.0)
        group.check()
        np.testing.assert_array_equal(run(xs), ranks.world * xs)
