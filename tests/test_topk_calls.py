"""How routing calls behave among other calls and under transformations.

Every call's expected bits are those of `topk_route` on the whole rows, which
`test_topk.py` holds to the rule.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import (
    Ranks,
    assert_all_ranks_hold,
    assert_same_bits,
    at_one_world_size,
    at_two_ranks,
    first_devices,
    on_all_ranks,
    put,
    run_on_all_ranks,
    with_check_vma,
    with_platforms,
)
from jax import P, lax
from oracles import BF16, F32, Rng

import jax_pcie
from jax_pcie import PcieError, PeerGroup

Array = np.ndarray
Tree = Any
EXPERTS, WIDTH, K = 64, 24, 5


def random_call(world: int, rng: Rng, batch: int = 2) -> tuple[Array, Array]:
    """latent [n, B, w] and logits [n, B, E / n], which every rank has a part of."""
    latent = rng.standard_normal((world, batch, WIDTH // world)).astype(BF16)
    logits = rng.standard_normal((world, batch, EXPERTS // world)).astype(F32)
    return latent, logits


def whole(xs: Array) -> Array:
    return np.concatenate(list(xs), axis=1)


def expected(latent: Array, logits: Array, **rule: object) -> list[Array]:
    choice = jax_pcie.topk_route(whole(logits), k=K, **rule)
    return [whole(latent), *map(np.asarray, choice)]


def assert_expected(got: Tree, latent: Array, logits: Array) -> None:
    for y, want in zip(got, expected(latent, logits), strict=True):
        assert_all_ranks_hold(y, want)


def gather(call: tuple, group: PeerGroup, **arguments: object) -> tuple:
    return jax_pcie.all_gather_topk(*call, group, k=K, **arguments)


@at_one_world_size
@with_check_vma
def test_topk_results_are_replicated_by_type(
    ranks: Ranks, check_vma: bool, rng: Rng
) -> None:
    latent, logits = random_call(ranks.world, rng)
    bias = np.zeros(EXPERTS, np.float32)
    fn = jax.shard_map(
        lambda x, y, b: gather((x[0], y[0]), ranks.group, bias=b),
        mesh=ranks.mesh,
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    replicated = jax.device_put(bias, jax.NamedSharding(ranks.mesh, P()))
    operands = (*put((latent, logits), ranks.mesh), replicated)
    for run in (fn, jax.jit(fn), jax.jit(fn).lower(*operands).compile()):
        got = run(*operands)
        for y, want in zip(got, expected(latent, logits), strict=True):
            assert_same_bits(np.asarray(y), want)


@at_two_ranks
def test_topk_calls_follow_one_another_with_new_inputs(ranks: Ranks, rng: Rng) -> None:
    """An odd number of calls a program, run repeatedly, in little staging memory."""
    calls = [random_call(2, rng, batch) for batch in (1, 3, 2, 1, 16)]
    with PeerGroup(ranks.mesh, "tp", max_bytes=1 << 16) as group:
        run = on_all_ranks(lambda xs: [gather(x, group) for x in xs], ranks.mesh)
        for _ in range(4):
            for got, call in zip(run(calls), calls, strict=True):
                assert_expected(got, *call)
            calls = [(latent, -logits) for latent, logits in calls]


@at_two_ranks
@pytest.mark.parametrize("before_wrap", [0, 1, 2, 3])
def test_topk_generations_wrap_around(ranks: Ranks, before_wrap: int, rng: Rng) -> None:
    calls = [random_call(2, rng) for _ in range(5)]
    first = 2**32 - before_wrap
    with PeerGroup(ranks.mesh, "tp", _first_generation=first) as group:
        run = on_all_ranks(lambda xs: [gather(x, group) for x in xs], ranks.mesh)
        for _ in range(2):
            for got, call in zip(run(calls), calls, strict=True):
                assert_expected(got, *call)


@at_one_world_size
def test_topk_in_a_loop_whose_input_hangs_on_the_last_choice(
    ranks: Ranks, rng: Rng
) -> None:
    num_steps = 9
    calls = [random_call(ranks.world, rng) for _ in range(2 * num_steps)]
    latents, logits = (np.stack(xs, axis=1) for xs in zip(*calls, strict=True))

    def body(parts: tuple) -> Tree:
        def step(i: jax.Array, carry: tuple) -> tuple:
            last = carry[2]
            at = 2 * i + last[0, 0] % 2
            call = (parts[0][at], parts[1][at])
            return gather(call, ranks.group)

        first = gather((parts[0][0], parts[1][0]), ranks.group)
        return lax.fori_loop(0, num_steps, step, first)

    got = on_all_ranks(body, ranks.mesh)((latents, logits))
    choice = expected(*calls[0])
    for i in range(num_steps):
        choice = expected(*calls[2 * i + choice[2][0, 0] % 2])
    for y, want in zip(got, choice, strict=True):
        assert_all_ranks_hold(y, want)


@at_one_world_size
def test_topk_among_sums_and_gathers(ranks: Ranks, rng: Rng) -> None:
    """Independent calls of every kind, and XLA's own, in one program."""
    calls = [random_call(ranks.world, rng) for _ in range(12)]

    def body(xs: Tree) -> Tree:
        results = []
        for i, (latent, logits) in enumerate(xs):
            results.append(gather((latent, logits), ranks.group))
            mode = ["i8_ring", "mx_a2a", "bf16"][i % 3]
            results.append(jax_pcie.all_reduce(latent, ranks.group, wire=mode))
            results.append(lax.psum(jnp.sign(logits), "tp"))
            results.append(jax_pcie.all_gather_pair(logits, latent, ranks.group))
        return results

    run = on_all_ranks(body, ranks.mesh)
    modes = [("int8", "ring"), ("mxfp8", "a2a"), ("raw", "ring")]
    for _ in range(3):
        results = run(calls)
        for i, (latent, logits) in enumerate(calls):
            choice, total, signs, pair = results[4 * i : 4 * i + 4]
            assert_expected(choice, latent, logits)
            assert_all_ranks_hold(total, oracles.all_reduce(*modes[i % 3], latent))
            assert_all_ranks_hold(signs, np.sign(logits).sum(axis=0))
            assert_all_ranks_hold(pair[0], whole(logits))
            assert_all_ranks_hold(pair[1], whole(latent))


@at_two_ranks
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_topk_with_a_rank_that_lags_behind(
    ranks: Ranks, slow_rank: int, rng: Rng
) -> None:
    calls = [random_call(2, rng) for _ in range(7)]
    stacked = tuple(np.stack(xs, axis=1) for xs in zip(*calls, strict=True))

    def body(parts: tuple) -> Tree:
        def step(zero: jax.Array, call: tuple) -> tuple:
            turns = jnp.where(lax.axis_index("tp") == slow_rank, 3000, 0)
            zero = lax.fori_loop(0, turns, lambda _, v: v * 0.5, zero)
            return zero, gather((call[0], call[1] + zero), ranks.group)

        return lax.scan(step, jnp.zeros((), F32), parts)[1]

    results = on_all_ranks(body, ranks.mesh, check_vma=False)(stacked)
    for i, call in enumerate(calls):
        assert_expected([y[:, i] for y in results], *call)


@at_one_world_size
def test_topk_of_a_missing_rank_is_an_error_and_never_a_choice(ranks: Ranks) -> None:
    missing = ranks.world // 2
    latent = np.ones((ranks.world, 1, WIDTH // ranks.world), np.float32)
    logits = np.ones((ranks.world, 1, EXPERTS // ranks.world), np.float32)
    with PeerGroup(ranks.mesh, "tp", timeout_s=1.0) as group:

        def body(call: tuple) -> tuple:
            nothing = (
                jnp.zeros((1, WIDTH)),
                jnp.zeros((1, K)),
                jnp.zeros((1, K), jnp.int32),
            )
            return lax.cond(
                lax.axis_index("tp") == missing,
                lambda _: nothing,
                lambda c: gather(c, group),
                call,
            )

        run = on_all_ranks(body, ranks.mesh, check_vma=False)
        start = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match="missing ranks"):
            for _ in range(2):  # a GPU's call ends as NaN, and the next one raises
                got = run((latent, logits))
                for rank in set(range(ranks.world)) - {missing}:
                    assert np.isnan(got[0][rank]).all()
                    assert np.isnan(got[1][rank]).all()
                    assert (got[2][rank] == -1).all()
        assert time.monotonic() - start < 20
        with pytest.raises(PcieError, match=f"missing ranks: {missing}"):
            group.check()


VMAPS: dict[str, Callable] = {
    "both": lambda f, x, y: jax.vmap(f)(x, y),
    "last": lambda f, x, y: jax.vmap(f, in_axes=2)(
        jnp.moveaxis(x, 0, 2), jnp.moveaxis(y, 0, 2)
    ),
    "logits": lambda f, x, y: jax.vmap(f, (None, 0))(x[1], y),
    "nested": lambda f, x, y: jax.vmap(jax.vmap(f))(x[:, None], y[:, None]),
}


@at_one_world_size
@pytest.mark.parametrize("kind", VMAPS)
def test_topk_under_vmap(ranks: Ranks, kind: str, rng: Rng) -> None:
    calls = [random_call(ranks.world, rng) for _ in range(3)]
    bias = jnp.zeros(EXPERTS)
    stacked = tuple(np.stack(xs, axis=1) for xs in zip(*calls, strict=True))

    def body(parts: tuple) -> Tree:
        def of_one(latent: jax.Array, logits: jax.Array) -> tuple:
            return gather((latent, logits), ranks.group, bias=bias)

        return VMAPS[kind](of_one, *parts)

    results = run_on_all_ranks(body, stacked, ranks.mesh)
    for i, (latent, logits) in enumerate(calls):
        if kind == "logits":
            latent = calls[1][0]
        got = [y[:, i].reshape(ranks.world, 2, -1) for y in results]
        assert_expected(got, latent, logits)


@with_platforms
def test_topk_route_under_vmap_and_scan(platform: str, rng: Rng) -> None:
    logits = rng.standard_normal((4, 3, 2, EXPERTS)).astype(np.float32)
    placed = jax.device_put(logits, jax.devices(platform)[0])
    route = partial(jax_pcie.topk_route, k=K)
    want = route(placed.reshape(-1, EXPERTS))
    for got in (
        jax.vmap(jax.vmap(route))(placed),
        lax.scan(lambda _, x: (None, jax.vmap(route)(x)), None, placed)[1],
    ):
        for y, w in zip(got, want, strict=True):
            assert_same_bits(np.asarray(y).reshape(w.shape), np.asarray(w))


@with_platforms
def test_topk_route_under_vmap_over_nothing(platform: str) -> None:
    (device,) = first_devices(platform, 1)
    logits = jax.device_put(np.zeros((0, 2, EXPERTS), np.float32), device)
    weights, ids = jax.jit(jax.vmap(partial(jax_pcie.topk_route, k=K)))(logits)
    assert weights.shape == ids.shape == (0, 2, K)
    assert (weights.dtype, ids.dtype) == (np.float32, np.int32)


@at_two_ranks
@with_check_vma
def test_topk_under_vmap_over_nothing(ranks: Ranks, check_vma: bool) -> None:
    fn = jax.shard_map(
        jax.vmap(lambda latent, logits: gather((latent, logits), ranks.group)),
        mesh=ranks.mesh,
        in_specs=P(None, None, "tp"),
        out_specs=P(),
        check_vma=check_vma,
    )
    operands = np.zeros((0, 3, 8), np.float32), np.zeros((0, 3, EXPERTS), np.float32)
    latent, weights, ids = jax.jit(fn)(*operands)
    assert latent.shape == (0, 3, 8)
    assert weights.shape == ids.shape == (0, 3, K)


def test_topk_refuses_a_bias_that_differs_within_a_vmap() -> None:
    with pytest.raises(NotImplementedError, match="share one bias"):
        jax.vmap(jax_pcie.topk_route)(jnp.zeros((2, 1, 32)), jnp.zeros((2, 32)))


@at_two_ranks
def test_topk_has_no_gradient_and_says_why(ranks: Ranks) -> None:
    with pytest.raises(NotImplementedError, match="not differentiable"):
        jax.grad(lambda x: jax_pcie.topk_route(x)[0].sum())(jnp.zeros((1, 32)))
    fn = jax.shard_map(
        lambda x: jax.grad(lambda v: gather((v, v), ranks.group)[1].sum())(x),
        mesh=ranks.mesh,
        in_specs=P("tp"),
        out_specs=P("tp"),
    )
    with pytest.raises(NotImplementedError, match="all_gather_topk has no gradient"):
        jax.eval_shape(fn, jnp.zeros((2, 32)))


@at_one_world_size
def test_topk_of_an_empty_batch_is_empty(ranks: Ranks) -> None:
    def body(x: jax.Array) -> Tree:
        return gather((x[:0], x[:0]), ranks.group), jax_pcie.topk_route(x[:0], k=3)

    n = ranks.world
    fused, alone = run_on_all_ranks(body, np.zeros((n, 2, 8), np.float32), ranks.mesh)
    assert [y.shape for y in fused] == [(n, 0, 8 * n), (n, 0, K), (n, 0, K)]
    assert [y.shape for y in alone] == [(n, 0, 3), (n, 0, 3)]
    assert fused[2].dtype == alone[1].dtype == np.int32


@with_platforms
@with_check_vma
def test_topk_in_a_world_of_one_rank(platform: str, check_vma: bool, rng: Rng) -> None:
    alone = Ranks(platform, 1)
    with alone.group:
        latent, logits = random_call(1, rng)
        got = on_all_ranks(
            lambda call: gather(call, alone.group), alone.mesh, check_vma=check_vma
        )((latent, logits))
        assert_expected(got, latent, logits)


def test_topk_of_more_ranks_than_peers_serve() -> None:
    """17 devices: `lax` gathers, and the plan says so."""
    program = """
import jax, jax_pcie, numpy as np
from jax import P
jax.config.update("jax_num_cpu_devices", 17)
mesh = jax.make_mesh((17,), ("tp",), (jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
logits, bias = rng.standard_normal((2, 85), np.float32), np.zeros(85, np.float32)
latent = rng.standard_normal((2, 34), np.float32)
with jax_pcie.PeerGroup(mesh, "tp") as group:
    for spec in (P(), P("tp")):
        def body(x, y, b):
            if spec == P("tp"):
                b = jax.lax.all_gather(b, "tp", tiled=True, to="invarying")
            pair = jax_pcie.all_gather_pair(x, y, group, to="invarying")
            return pair, jax_pcie.all_gather_topk(x, y, group, bias=b, k=4)
        fn = jax.shard_map(
            body, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp"), spec),
            out_specs=P())
        pair, got = jax.jit(fn)(latent, logits, bias)
        np.testing.assert_array_equal(pair[1], logits)
        want = (latent, *jax_pcie.topk_route(logits, bias, 4))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    shapes, dtypes = ((2, 2), (2, 5)), ("float32", "float32")
    assert group.plan("all_gather_topk", shapes, dtypes).path == "lax"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@at_one_world_size
def test_topk_ids_are_int32_also_with_x64(ranks: Ranks, rng: Rng) -> None:
    latent, logits = random_call(ranks.world, rng)
    with jax.enable_x64(True):
        got = run_on_all_ranks(
            lambda call: gather(call, ranks.group), (latent, logits), ranks.mesh
        )
        alone = jax_pcie.topk_route(whole(logits), k=K)
    assert_expected(got, latent, logits)
    assert [y.dtype for y in alone] == [np.float32, np.int32]


@at_two_ranks
def test_topk_plan_says_which_path_a_call_takes(ranks: Ranks) -> None:
    def plan(latent: tuple, logits: tuple) -> jax_pcie.Plan:
        return ranks.group.plan("all_gather_topk", (latent, logits), (BF16, F32))

    fused = plan((8, 1792), (8, 448))
    assert fused.path == "peer"
    assert fused.wire_bytes == 8 * (1792 * 2 + 448 * 4)
    assert fused.segments == 1
    assert dataclasses.replace(fused, segments=7).segments == 7
    separate = plan((8, 1792), (8, 600))
    assert separate.path == ("peer" if ranks.platform == "cpu" else "separate")
    if ranks.platform == "cuda":
        assert "1200 experts" in separate.reason
    assert plan((0, 1792), (0, 448)).path == "empty"
    with pytest.raises(ValueError, match="both shapes"):
        ranks.group.plan("all_gather_topk", ((8, 2),), (BF16,))


@at_one_world_size
def test_topk_has_no_effect(ranks: Ranks) -> None:
    jaxpr = jax.make_jaxpr(
        jax.shard_map(
            lambda x: gather((x, x), ranks.group),
            mesh=ranks.mesh,
            in_specs=P(None, "tp"),
            out_specs=P(),
        )
    )(jnp.zeros((2, EXPERTS)))
    assert not jaxpr.effects


def test_topk_route_needs_no_group() -> None:
    program = """
import jax_pcie, jax, numpy as np
logits = np.arange(64, dtype=np.float32)[None] / 8
print(jax.jit(jax_pcie.topk_route)(logits)[1][0, 0])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "63"
