"""What the mailboxes must survive: counters that wrap, and slots that are used again.

Generations only go up and are compared modulo 2^32; a slot is used again after a few
pieces. Inputs differ from call to call: with equal ones a stale record is invisible.
"""

import jax
import numpy as np
import oracles
import pytest
from conftest import (
    MODES,
    Mode,
    Ranks,
    assert_all_ranks_hold,
    at_two_ranks,
    on_all_ranks,
    with_modes,
    with_worlds,
)
from jax import lax
from oracles import BF16, F32

import jax_pcie
from jax_pcie import PeerGroup

NUM_CALLS = 7  # odd, and more than the slots of an inbox


def different_inputs(num: int, world: int, size: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [oracles.ordinary_input(world, BF16, (size,), rng) for _ in range(num)]


def assert_oracles_sum(mode: Mode, got: np.ndarray, xs: np.ndarray) -> None:
    assert_all_ranks_hold(got, oracles.all_reduce(mode.codec, mode.topology, xs))


@at_two_ranks
@pytest.mark.parametrize("before_wrap", [0, 1, 3, 6])
@with_modes(MODES)
def test_generations_wrap_around(ranks: Ranks, mode: Mode, before_wrap: int) -> None:
    calls = different_inputs(NUM_CALLS, ranks.world, 700, seed=before_wrap)
    first = 2**32 - before_wrap
    with PeerGroup(ranks.mesh, "tp", _first_generation=first) as group:
        run = on_all_ranks(
            lambda xs: [jax_pcie.all_reduce(x, group, wire=mode.wire) for x in xs],
            ranks.mesh,
        )
        for _ in range(3):
            for got, xs in zip(run(calls), calls, strict=True):
                assert_oracles_sum(mode, got, xs)


@with_worlds([2, 3])
def test_modes_take_turns_in_little_staging_memory(ranks: Ranks) -> None:
    """All modes in one program, shorter than a piece and much longer than all slots."""
    calls = [(mode, size) for size in (1, 40_000, 130, 300_000) for mode in MODES]
    rng = np.random.default_rng(0)
    inputs = [
        oracles.ordinary_input(ranks.world, BF16, (size,), rng) for _, size in calls
    ]
    with PeerGroup(ranks.mesh, "tp", max_bytes=1 << 17) as group:

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            return [
                jax_pcie.all_reduce(part, group, wire=mode.wire)
                for part, (mode, _) in zip(parts, calls, strict=True)
            ]

        results = on_all_ranks(body, ranks.mesh)(inputs)
    for (mode, _), got, xs in zip(calls, results, inputs, strict=True):
        assert_oracles_sum(mode, got, xs)


@at_two_ranks
@pytest.mark.parametrize("slow_rank", [0, 1])
@with_modes(MODES)
def test_a_rank_that_lags_behind_reads_what_was_meant_for_it(
    ranks: Ranks, mode: Mode, slow_rank: int
) -> None:
    """One rank computes before each call, and the other runs as far ahead as it can."""
    calls = np.stack(different_inputs(NUM_CALLS, ranks.world, 3000, seed=1), axis=1)

    def body(parts: jax.Array) -> jax.Array:
        def step(zero: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
            turns = jax.numpy.where(lax.axis_index("tp") == slow_rank, 3000, 0)
            zero = lax.fori_loop(0, turns, lambda _, v: v * 0.5, zero)
            shifted = part + zero.astype(part.dtype)
            return zero, jax_pcie.all_reduce(shifted, ranks.group, wire=mode.wire)

        return lax.scan(step, jax.numpy.zeros((), F32), parts)[1]

    results = on_all_ranks(body, ranks.mesh, check_vma=False)(calls)
    for call in range(NUM_CALLS):
        assert_oracles_sum(mode, results[:, call], calls[:, call] + np.zeros((), BF16))


def test_subnormals_after_a_call_are_the_same_on_all_ranks() -> None:
    """XLA:CPU goes on with its program on the thread that completes the call.

    That thread must flush subnormals as XLA's own do: one rank's product was zero and
    the others' was not, depending on who came last.
    """
    mesh = jax.make_mesh(
        (4,), ("tp",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4]
    )
    xs = np.full((4, 1 << 16), 0.125, np.float32)  # the product is 2^-127
    with PeerGroup(mesh, "tp") as group:
        run = on_all_ranks(
            lambda x: jax_pcie.all_reduce(x, group) * np.float32(2.0**-126), mesh
        )
        for _ in range(8):
            got = run(xs)
            np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
