"""Many all-reduces in one program, mixed with XLA's own collectives, run repeatedly.

XLA may run independent calls at once and in another order on another rank. 48 and 128
are beyond the 32 at which a handler that blocks exhausts XLA:CPU's threads.
"""

import threading
from collections.abc import Callable
from typing import Any

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
    at_one_world_size,
    make_mesh,
    on_all_ranks,
    run_on_all_ranks,
    with_check_vma,
    with_modes,
    with_worlds,
)
from jax import lax
from oracles import BF16, DTYPES, F32, Rng

import jax_pcie

Tree = Any
at_small_and_large_worlds = with_worlds([2, 8])


def many_inputs(num_calls: int, world: int, rng: Rng) -> list[np.ndarray]:
    """Equal shapes side by side, so that a mix-up of two calls raises nothing."""
    sizes = [1, 200, 200, 1000]
    return [
        oracles.ordinary_input(world, DTYPES[k % 3], (sizes[k // 3 % 4],), rng)
        for k in range(num_calls)
    ]


def mode_of_call(k: int) -> Mode:
    return MODES[k * 7 % len(MODES)]


def independent_calls(group: jax_pcie.PeerGroup, xs: list[jax.Array]) -> Tree:
    """Nothing orders these calls; a fourth of the operands goes to `lax.psum` too."""
    ours = [
        jax_pcie.all_reduce(x, group, wire=mode_of_call(k).wire)
        for k, x in enumerate(xs)
    ]
    theirs = [lax.psum(jnp.sign(x.astype(jnp.float32)), "tp") for x in xs[::4]]
    world = lax.axis_size("tp")
    shift = [(r, (r + 1) % world) for r in range(world)]
    theirs += [lax.ppermute(x.astype(jnp.float32), "tp", shift) for x in xs[1::16]]
    return ours, theirs


def check_independent_calls(xs: list[np.ndarray], got: Tree) -> None:
    ours, theirs = got
    for k, (y, x) in enumerate(zip(ours, xs, strict=True)):
        mode = mode_of_call(k)
        assert_all_ranks_hold(y, oracles.all_reduce(mode.codec, mode.topology, x))
    signs = [np.sign(oracles.widen(x)) for x in xs[::4]]
    want = [np.broadcast_to(s.sum(axis=0), s.shape) for s in signs]
    want += [np.roll(oracles.widen(x), 1, axis=0) for x in xs[1::16]]
    for y, w in zip(theirs, want, strict=True):
        np.testing.assert_array_equal(y, w)


@at_small_and_large_worlds
@pytest.mark.parametrize("num_calls", [48, 128])
def test_independent_calls_in_one_program(
    ranks: Ranks, num_calls: int, rng: Rng
) -> None:
    run = on_all_ranks(lambda xs: independent_calls(ranks.group, xs), ranks.mesh)
    for _ in range(3):
        xs = many_inputs(num_calls, ranks.world, rng)
        check_independent_calls(xs, run(xs))


@at_small_and_large_worlds
def test_one_program_run_many_times(ranks: Ranks, rng: Rng) -> None:
    """An odd number of calls in it, so that any alternation of buffers shows."""
    batches = [many_inputs(5, ranks.world, rng) for _ in range(4)]
    run = on_all_ranks(lambda xs: independent_calls(ranks.group, xs), ranks.mesh)
    want = [run(xs) for xs in batches]
    for xs, y in zip(batches, want, strict=True):
        check_independent_calls(xs, y)
    for k in range(40):
        jax.tree.map(np.testing.assert_array_equal, run(batches[k % 4]), want[k % 4])


@at_small_and_large_worlds
def test_calls_in_flight_at_once(ranks: Ranks, rng: Rng) -> None:
    """Nothing waits for a result before the next call is made."""
    xs = [oracles.ordinary_input(ranks.world, F32, (700,), rng) for _ in range(20)]
    run = on_all_ranks(
        lambda x: jax_pcie.all_reduce(x, ranks.group, wire="i8_ring"),
        ranks.mesh,
        fetch=False,
    )
    pending = [run(x) for x in xs]
    for y, x in zip(pending, xs, strict=True):
        assert_all_ranks_hold(np.asarray(y), oracles.all_reduce("int8", "ring", x))


@at_one_world_size
def test_two_threads_run_two_programs(ranks: Ranks, rng: Rng) -> None:
    xs = [oracles.ordinary_input(ranks.world, F32, (700,), rng) for _ in range(2)]
    modes = [Mode("i8_ring", "int8", "ring"), Mode("mx_a2a", "mxfp8", "a2a")]
    results: list[list[np.ndarray]] = [[], []]

    def work(k: int) -> None:
        for _ in range(20):
            results[k].append(ranks.all_reduce(modes[k].wire, xs[k]))

    for k in range(2):  # compiled before the threads begin
        ranks.all_reduce(modes[k].wire, xs[k])
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, (_, codec, topology) in enumerate(modes):
        assert len(results[k]) == 20
        for got in results[k]:
            assert_all_ranks_hold(got, oracles.all_reduce(codec, topology, xs[k]))


@at_one_world_size
@with_modes(MODES)
@with_check_vma
def test_a_dependent_chain_in_fori_loop_has_new_inputs_each_time(
    ranks: Ranks, mode: Mode, check_vma: bool, rng: Rng
) -> None:
    """The choice of each operand hangs on the sum before it, so none may be stale."""
    num_steps = 9
    inputs = np.stack(
        [
            oracles.ordinary_input(ranks.world, BF16, (2, 300), rng)
            for _ in range(num_steps)
        ],
        axis=1,
    )  # [world, steps, 2, 300]

    def body(pairs: jax.Array) -> jax.Array:
        def step(k: jax.Array, state: tuple[jax.Array, jax.Array]) -> Tree:
            carry, _ = state
            total = jax_pcie.all_reduce(carry, ranks.group, wire=mode.wire)
            pair = pairs[k]
            return jnp.where(total > 0, pair[0], pair[1]), carry

        return lax.fori_loop(0, num_steps, step, (pairs[0, 0], pairs[0, 0]))[0]

    got = on_all_ranks(body, ranks.mesh, check_vma=check_vma)(inputs)
    carry = inputs[:, 0, 0]
    for k in range(num_steps):
        total = oracles.widen(oracles.all_reduce(mode.codec, mode.topology, carry))
        carry = np.where(total > 0, inputs[:, k, 0], inputs[:, k, 1])
    np.testing.assert_array_equal(oracles.bits(got), oracles.bits(carry))


@at_one_world_size
def test_calls_of_two_groups_share_a_program(ranks: Ranks, rng: Rng) -> None:
    xs = [oracles.ordinary_input(ranks.world, BF16, (500,), rng) for _ in range(24)]
    with jax_pcie.PeerGroup(ranks.mesh, "tp", wire="mx_ring") as other:

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            groups = [ranks.group, other]
            return [
                jax_pcie.all_reduce(x, groups[k % 2], wire=["e4m3", None][k % 2])
                for k, x in enumerate(parts)
            ]

        got = run_on_all_ranks(body, xs, ranks.mesh)
    arithmetic: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda x: oracles.all_reduce("e4m3", "ag", x),
        lambda x: oracles.all_reduce("mxfp8", "ring", x),
    ]
    for k, (y, x) in enumerate(zip(got, xs, strict=True)):
        assert_all_ranks_hold(y, arithmetic[k % 2](x))


@pytest.mark.parametrize(
    ("platform", "shape"),
    [("cpu", (2, 4)), pytest.param("cuda", (1, 2), marks=pytest.mark.cuda)],
)
def test_both_axes_of_a_mesh_in_one_loop(
    platform: str, shape: tuple[int, int], rng: Rng
) -> None:
    """Each step reduces over one axis, then over the other, and mixes psum in."""
    mesh = make_mesh(platform, shape, ("dp", "tp"))
    dp, tp = shape
    inputs = rng.integers(-4, 5, (*shape, 6, 150)).astype(np.float32)
    with (
        jax_pcie.PeerGroup(mesh, "dp") as by_dp,
        jax_pcie.PeerGroup(mesh, "tp") as by_tp,
    ):

        def body(xs: jax.Array) -> jax.Array:
            def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                over_tp = jax_pcie.all_reduce(carry + x, by_tp)
                over_dp = jax_pcie.all_reduce(over_tp - x, by_dp)
                both = over_dp + lax.psum(x, ("dp", "tp"))
                return jnp.sign(both) * x, both

            return lax.scan(step, xs[0], xs)[1]

        got = run_on_all_ranks(body, inputs, mesh)
    carry, want = inputs[:, :, 0], []
    for x in np.moveaxis(inputs, 2, 0):
        over_tp = (carry + x).sum(axis=1, keepdims=True)
        over_dp = (over_tp - x).sum(axis=0, keepdims=True)
        both = over_dp + x.sum(axis=(0, 1), keepdims=True)
        want.append(np.broadcast_to(both, (dp, tp, 150)))
        carry = np.sign(both) * x
    np.testing.assert_array_equal(got, np.stack(want, axis=2))
