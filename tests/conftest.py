"""The devices, meshes and groups of the tests, and how a test asks for them.

A test body is written once and marked `at_all_world_sizes` or `at_one_world_size`: its
`ranks` fixture is then so many virtual CPU devices, or, under the marker `cuda`, two
GPUs; a test without peers uses `device`, the CPU or one GPU. Expected values belong to
`oracles.py`. Groups live for the whole run: a test that closes or breaks a group makes
its own.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import jax
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_pcie

jax.config.update("jax_num_cpu_devices", 16)
for name in [name for name in os.environ if name.startswith("JAX_PCIE_")]:
    del os.environ[name]  # a developer's own defaults

Tree = Any


class Mode(NamedTuple):
    """A wire mode as users write it, and what it is to the oracles."""

    wire: str | jax_pcie.WireMode
    codec: str
    topology: str


RAW_A2A = jax_pcie.WireMode(jax_pcie.Codec.RAW, jax_pcie.Topology.A2A)
LOSSLESS_MODES = [Mode("bf16", "raw", "ring"), Mode(RAW_A2A, "raw", "a2a")]
COMPRESSED_MODES = [
    Mode("i8", "int8", "ag"),
    Mode("i8_ring", "int8", "ring"),
    Mode("i8_a2a", "int8", "a2a"),
    Mode("e4m3", "e4m3", "ag"),
    Mode("e4m3_ring", "e4m3", "ring"),
    Mode("e4m3_a2a", "e4m3", "a2a"),
    Mode("mx", "mxfp8", "ag"),
    Mode("mx_ring", "mxfp8", "ring"),
    Mode("mx_a2a", "mxfp8", "a2a"),
]
MODES = LOSSLESS_MODES + COMPRESSED_MODES


def with_modes(modes: list[Mode]) -> pytest.MarkDecorator:
    ids = [f"{mode.codec}-{mode.topology}" for mode in modes]
    return pytest.mark.parametrize("mode", modes, ids=ids)


with_dtypes = pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
with_check_vma = pytest.mark.parametrize("check_vma", [True, False])


def with_worlds(cpu_worlds: list[int]) -> pytest.MarkDecorator:
    worlds = [pytest.param(("cpu", n), id=f"cpu{n}") for n in cpu_worlds]
    worlds.append(pytest.param(("cuda", 2), id="cuda2", marks=pytest.mark.cuda))
    return pytest.mark.parametrize("ranks", worlds, indirect=True)


few_drawn_inputs = hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)

at_all_world_sizes = with_worlds([2, 3, 4, 8])
at_one_world_size = with_worlds([4])
at_two_ranks = with_worlds([2])
at_router_worlds = with_worlds([2, 3, 4, 8, 16])
with_platforms = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def first_devices(platform: str, count: int) -> list[jax.Device]:
    """The first `count` devices; skips the test on a machine with fewer GPUs."""
    try:
        devices = jax.devices(platform)
    except RuntimeError:  # no such backend
        devices = []
    if platform == "cuda" and len(devices) < count:
        pytest.skip(f"needs {count} GPUs, and JAX sees {len(devices)}")
    return devices[:count]


def make_mesh(
    platform: str, shape: tuple[int, ...], axes: tuple[str, ...], first: int = 0
) -> Mesh:
    devices = first_devices(platform, first + int(np.prod(shape)))[first:]
    return jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes), devices=devices)


def on_all_ranks(
    fn: Callable[[Tree], Tree],
    mesh: Mesh,
    *,
    check_vma: bool = True,
    fetch: bool = True,
) -> Callable[[Tree], Tree]:
    """Compiles `fn`, a rank's part, for every rank of `mesh` at once.

    Takes and returns trees of arrays [*mesh.shape, ...], NumPy's unless `fetch` is off.
    What a rank returns comes back untouched, also where all ranks should hold the same,
    so that bits can be compared.
    """
    spec = PartitionSpec(*mesh.axis_names)
    num_axes = len(mesh.axis_names)

    def body(xs: Tree) -> Tree:
        ys = fn(jax.tree.map(lambda x: x.reshape(x.shape[num_axes:]), xs))
        return jax.tree.map(lambda y: y.reshape((1,) * num_axes + y.shape), ys)

    compiled = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
    )

    def call(xs: Tree) -> Tree:
        ys = compiled(put(xs, mesh))
        return jax.tree.map(np.asarray, ys) if fetch else ys

    return call


def put(xs: Tree, mesh: Mesh) -> Tree:
    """`xs` [*mesh.shape, ...] on the devices of `mesh`, a rank's part on each."""
    return jax.device_put(xs, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def run_on_all_ranks(fn: Callable[[Tree], Tree], xs: Tree, mesh: Mesh) -> Tree:
    return on_all_ranks(fn, mesh)(xs)


class Ranks:
    """A one-axis mesh ("tp"), its group, and the all-reduces compiled for it so far."""

    def __init__(self, platform: str, world: int) -> None:
        self.platform = platform
        self.world = world
        self.mesh = make_mesh(platform, (world,), ("tp",))
        self.group = jax_pcie.PeerGroup(self.mesh, "tp")
        self._compiled: dict[str | jax_pcie.WireMode, Callable[[Tree], Tree]] = {}

    def all_reduce(self, wire: str | jax_pcie.WireMode, xs: Tree) -> Tree:
        """What each rank holds, [world, ...], after an all-reduce of xs[rank]."""
        if wire not in self._compiled:
            self._compiled[wire] = on_all_ranks(
                lambda x: jax_pcie.all_reduce(x, self.group, wire=wire), self.mesh
            )
        return self._compiled[wire](xs)


@pytest.fixture(scope="session")
def all_ranks() -> Iterator[dict[tuple[str, int], Ranks]]:
    made: dict[tuple[str, int], Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.group.close()


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, all_ranks: dict[tuple[str, int], Ranks]
) -> Ranks:
    return all_ranks_of(all_ranks, *request.param)


def all_ranks_of(
    all_ranks: dict[tuple[str, int], Ranks], platform: str, world: int
) -> Ranks:
    """The run's ranks of this platform and number, made at their first use."""
    if (platform, world) not in all_ranks:
        all_ranks[platform, world] = Ranks(platform, world)
    return all_ranks[platform, world]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """Where a test without peers runs, and JAX's default device in it."""
    (device,) = first_devices(request.param, 1)
    with jax.default_device(device):
        yield device


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name: the same values on every machine and in any order."""
    return np.random.default_rng(list(request.node.name.encode()))


def assert_same_bits(got: np.ndarray, want: np.ndarray, context: object = "") -> None:
    """Same dtype, shape and bits: -0 is not 0, and one NaN is not another."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), context
    wrong = np.argwhere(oracles.bits(got) != oracles.bits(want))
    if len(wrong):
        at = tuple(wrong[0])
        pytest.fail(
            f"{context} {len(wrong)} of {want.size} differ, first at {at}: "
            f"got {got[at]} ({int(oracles.bits(got[at])):#x}), "
            f"expected {want[at]} ({int(oracles.bits(want[at])):#x})"
        )


def assert_all_ranks_hold(got: np.ndarray, want: np.ndarray) -> None:
    """Every got[rank] has the bits of `want`."""
    for rank, y in enumerate(got):
        assert_same_bits(y, want, f"rank {rank} of {len(got)}:")
