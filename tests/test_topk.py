"""`topk_route` and `all_gather_topk`: the rule on every kind of row and every world.

The judge is a float64 oracle; where two ways must agree (ranks, fused and separate, GPU
and CPU, eager and compiled) their raw bits are compared. How calls behave among others
and under transformations is in `test_topk_calls.py`.
"""

import functools
from collections.abc import Callable

import hypothesis
import jax
import numpy as np
import oracles
import pytest
import router_oracles
from conftest import (
    Ranks,
    all_ranks_of,
    assert_all_ranks_hold,
    assert_same_bits,
    at_one_world_size,
    at_router_worlds,
    at_two_ranks,
    few_drawn_inputs,
    on_all_ranks,
    with_platforms,
)
from hypothesis import strategies as st
from oracles import BF16, DTYPES, F16, F32, Rng
from router_oracles import BIASES, Rule, check_choice

import jax_pcie

Array = np.ndarray
Choice = tuple[Array, Array]  # weights, ids

RULES = {
    "sigmoid": Rule(),
    "softmax": Rule(scoring="softmax"),
    "not normalised": Rule(renormalize=False),
    "factor": Rule(routed_scaling_factor=2.5, k=7),
    "groups": Rule(n_group=8, topk_group=4, k=8),
    "many groups": Rule(n_group=64, topk_group=5, k=9),
    "one group": Rule(n_group=4, topk_group=1, k=1),
    "softmax groups": Rule(scoring="softmax", n_group=8, topk_group=3, k=6),
}
with_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@functools.cache
def routing(rule: Rule) -> Callable[..., Choice]:
    return jax.jit(functools.partial(jax_pcie.topk_route, **rule.arguments))


def route(platform: str, logits: Array, bias: Array | None, rule: Rule) -> Choice:
    device = jax.devices(platform)[0]
    operands = jax.device_put((logits, bias), device)
    return jax.tree.map(np.asarray, routing(rule)(*operands))


@functools.cache
def gathering(
    ranks: Ranks, rule: Rule, has_bias: bool
) -> Callable[[tuple], tuple[Array, ...]]:
    def body(operands: tuple) -> tuple:
        latent, logits, *bias = operands
        return jax_pcie.all_gather_topk(
            latent,
            logits,
            ranks.group,
            bias=bias[0] if has_bias else None,
            **rule.arguments,
        )

    # (a bias that each rank is given a copy of is not typed as the same on all of them)
    return on_all_ranks(body, ranks.mesh, check_vma=not has_bias)


def columns(x: Array, world: int) -> Array:
    """[B, n * w] as what each rank has of it: [n, B, w]."""
    return np.ascontiguousarray(np.stack(np.split(x, world, axis=1)))


def gather_topk(
    ranks: Ranks, latent: Array, logits: Array, bias: Array | None, rule: Rule
) -> tuple[Array, Choice]:
    """Latent and choice of rank 0, once every rank is known to hold the same bits."""
    n = ranks.world
    operands = [columns(latent, n), columns(logits, n)]
    if bias is not None:
        operands.append(np.stack([bias] * n))
    results = gathering(ranks, rule, bias is not None)(tuple(operands))
    for result in results:
        assert_all_ranks_hold(result, result[0])
    return results[0][0], (results[1][0], results[2][0])


def assert_same_choice(got: Choice, want: Choice) -> None:
    assert_same_bits(got[1], want[1], "ids")
    assert_same_bits(got[0], want[0], "weights")


def any_bits(rows: int, width: int, dtype: np.dtype, rng: Rng) -> Array:
    codes = rng.integers(0, 1 << (8 * dtype.itemsize), (rows, width))
    return oracles.from_bits(codes, dtype)


def check_fused(
    ranks: Ranks, logits: Array, bias: Array | None, rule: Rule, rng: Rng
) -> None:
    """Against the oracle, and bit for bit against the separate way."""
    latent = any_bits(len(logits), 6 * ranks.world, BF16, rng)
    whole, choice = gather_topk(ranks, latent, logits, bias, rule)
    assert_same_bits(whole, latent, "latent")
    check_choice(logits, bias, rule, *choice)
    assert_same_choice(route(ranks.platform, logits, bias, rule), choice)


# Where E is not a multiple of n, the nearest that is: odd numbers of experts a rank.
@at_router_worlds
@pytest.mark.parametrize("num_experts", [64, 256, 384, 896, 1024, "odd"])
def test_topk_of_every_kind_of_row(
    ranks: Ranks, num_experts: int | str, rng: Rng
) -> None:
    n = ranks.world
    if num_experts == "odd":
        num_experts = n * (1024 // n - (1024 // n + 1) % 2)
    num_experts -= num_experts % n
    logits = router_oracles.varied_rows(num_experts, rng)
    for kind in BIASES:
        bias = router_oracles.varied_bias(kind, num_experts, rng)
        check_fused(ranks, logits, bias, Rule(), rng)


@at_router_worlds
def test_topk_with_every_count_of_finite_experts(ranks: Ranks, rng: Rng) -> None:
    num_experts = 16 * 3 * 2 if ranks.world == 3 else 64
    logits = router_oracles.rows_with_few_finite(range(21), num_experts, rng)
    for kind in ("none", "normal"):
        bias = router_oracles.varied_bias(kind, num_experts, rng)
        check_fused(ranks, logits, bias, Rule(), rng)


@at_one_world_size
def test_topk_when_nobody_or_everybody_ties_is_the_first_k(ranks: Ranks) -> None:
    logits = np.full((3, 64), np.nan, np.float32)
    logits[1], logits[2] = 0.5, -np.inf
    latent = np.zeros((3, 4), np.float32)
    _, (weights, ids) = gather_topk(ranks, latent, logits, None, Rule())
    np.testing.assert_array_equal(ids, [np.arange(16)] * 3)
    np.testing.assert_array_equal(weights[[0, 2]], 0)
    np.testing.assert_array_equal(weights[1], np.float32(1 / 16))


@at_one_world_size
@with_rules
def test_topk_by_every_rule(ranks: Ranks, rule: Rule, rng: Rng) -> None:
    logits = router_oracles.varied_rows(256, rng)[[0, 1, 2, 6, 7, 8, 10, 11, 12]]
    for kind in ("none", "normal"):
        bias = router_oracles.varied_bias(kind, 256, rng)
        check_fused(ranks, logits, bias, rule, rng)


@with_platforms
def test_topk_groups_are_scored_by_two_with_a_bias_and_by_one_without(
    platform: str,
) -> None:
    """Group 0 has the best expert, group 1 the best pair."""
    logits = np.array([[3, -9, -9, -9, 2, 2, -9, -9]], np.float32)
    rule = Rule(k=2, n_group=2, topk_group=1)
    _, ids = route(platform, logits, None, rule)
    np.testing.assert_array_equal(ids, [[0, 1]])
    _, ids = route(platform, logits, np.zeros(8, np.float32), rule)
    np.testing.assert_array_equal(ids, [[4, 5]])


@with_platforms
def test_topk_by_more_experts_than_the_best_groups_have(platform: str) -> None:
    """The others follow by id, with weight 0."""
    logits = np.array([[1, 2, 3, 4, 5, 6]], np.float32)
    weights, ids = route(platform, logits, None, Rule(k=4, n_group=3, topk_group=1))
    np.testing.assert_array_equal(ids, [[5, 4, 0, 1]])
    np.testing.assert_array_equal(weights[0, 2:], 0)


@with_platforms
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_topk_for_every_k(platform: str, scoring: str, rng: Rng) -> None:
    logits = router_oracles.varied_rows(96, rng)
    bias = router_oracles.varied_bias("ties", 96, rng)
    for k in range(1, 33):
        rule = Rule(k=k, scoring=scoring)
        check_choice(logits, bias, rule, *route(platform, logits, bias, rule))


@at_two_ranks
def test_topk_of_every_batch(ranks: Ranks, rng: Rng) -> None:
    for batch in range(1, 17):
        logits = rng.standard_normal((batch, 64)).astype(np.float32)
        check_fused(ranks, logits, None, Rule(k=3), rng)


@at_two_ranks
def test_topk_of_a_batch_beyond_the_mailboxes(ranks: Ranks, rng: Rng) -> None:
    """More tiles than a GPU has channels, and a group that has only one."""
    logits = rng.standard_normal((300, 64)).astype(np.float32)
    check_fused(ranks, logits, None, Rule(k=5), rng)
    latent = any_bits(9, 3000, BF16, rng)
    with jax_pcie.PeerGroup(ranks.mesh, "tp", max_bytes=1 << 16) as group:
        small = Ranks.__new__(Ranks)
        small.__dict__.update(ranks.__dict__, group=group)
        whole, choice = gather_topk(small, latent, logits[:9], None, Rule())
    assert_same_bits(whole, latent)
    check_choice(logits[:9], None, Rule(), *choice)


@at_one_world_size
@pytest.mark.parametrize("num_experts", [1, 2, 5, 31, 33])
def test_topk_of_few_experts(ranks: Ranks, num_experts: int, rng: Rng) -> None:
    """As many as a rank may have alone, and all of them chosen."""
    num_experts *= ranks.world
    logits = router_oracles.varied_rows(num_experts, rng)
    check_fused(ranks, logits, None, Rule(k=min(num_experts, 32)), rng)


@at_two_ranks
@pytest.mark.parametrize("num_experts", [1026, 2048, 5000])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_topk_of_more_experts_than_are_fused(
    ranks: Ranks, num_experts: int, scoring: str, rng: Rng
) -> None:
    logits = router_oracles.varied_rows(num_experts, rng)
    bias = router_oracles.varied_bias("ties", num_experts, rng)
    check_fused(ranks, logits, bias, Rule(k=32, scoring=scoring), rng)
    grouped = Rule(n_group=num_experts // 2, topk_group=20, scoring=scoring)
    check_fused(ranks, logits[:3], bias, grouped, rng)


@at_one_world_size
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_topk_widens_16_bit_logits_exactly(
    ranks: Ranks, dtype: np.dtype, rng: Rng
) -> None:
    codes = rng.permutation(1 << 16).reshape(64, 1024)
    logits = oracles.from_bits(codes, dtype)
    latent = any_bits(64, 4 * ranks.world, BF16, rng)
    _, choice = gather_topk(ranks, latent, logits, None, Rule(k=32))
    wide = oracles.widen(logits)
    assert_same_choice(route(ranks.platform, logits, None, Rule(k=32)), choice)
    assert_same_choice(route(ranks.platform, wide, None, Rule(k=32)), choice)
    check_choice(logits, None, Rule(k=32), *choice)
    odd = logits[:5, : 7 * ranks.world]
    check_fused(ranks, odd, None, Rule(k=9), rng)


@with_platforms
def test_topk_sigmoid_is_accurate_everywhere(platform: str, rng: Rng) -> None:
    """Of all magnitudes, and densely where the result changes: within 2 ulp."""
    codes = rng.integers(0, 0x7F800000, (3000, 32), np.uint32)
    codes |= rng.integers(0, 2, codes.shape, np.uint32) << 31
    dense = rng.uniform(-104, 20, (17000, 32)).astype(np.float32)
    logits = np.concatenate([codes.view(np.float32), dense])
    weights, ids = route(platform, logits, None, Rule(k=32, renormalize=False))
    want = router_oracles.sigmoid(np.take_along_axis(logits, ids, 1).astype(np.float64))
    assert (np.abs(weights - want) <= 2 * router_oracles.ulp(want)).all()
    assert ((weights > 0) == (want > 2.0**-150)).all()


@pytest.mark.cuda
def test_topk_sigmoid_has_the_same_bits_on_cpu_and_cuda(rng: Rng) -> None:
    """GPUs divide there without a test for extreme operands."""
    codes = rng.integers(0, 2**32, (20_000, 32), np.uint32)
    dense = rng.uniform(-106, 30, (40_000, 32)).astype(np.float32)
    logits = np.concatenate([codes.view(np.float32), dense])
    for renormalize in (False, True):
        rule = Rule(k=32, renormalize=renormalize)
        want = route("cpu", logits, None, rule)
        assert_same_choice(route("cuda", logits, None, rule), want)


@with_platforms
def test_topk_has_known_bits(platform: str) -> None:
    """A change of the arithmetic shows here, on every platform."""
    logits = np.array([[-3.5, 0.1, 2.25, -20.0]], np.float32)
    weights, ids = route(platform, logits, None, Rule(k=4, renormalize=False))
    np.testing.assert_array_equal(ids, [[2, 1, 0, 3]])
    assert [hex(code) for code in oracles.bits(weights)[0]] == KNOWN_BITS


KNOWN_BITS = ["0x3f67972e", "0x3f066509", "0x3cf02034", "0x310da433"]


@pytest.mark.cuda
@pytest.mark.parametrize("num_experts", [64, 898, 1024, 3000])
@with_rules
def test_topk_bits_are_the_same_on_cpu_and_cuda(
    all_ranks: dict, num_experts: int, rule: Rule, rng: Rng
) -> None:
    if num_experts % rule.n_group:
        num_experts -= num_experts % 64
    logits = router_oracles.varied_rows(num_experts, rng)
    logits = np.concatenate([logits, 3 * rng.standard_normal((40, num_experts))])
    logits = logits.astype(np.float32)
    latent = any_bits(len(logits), 64, F32, rng)
    for kind in BIASES:
        bias = router_oracles.varied_bias(kind, num_experts, rng)
        results = [
            gather_topk(all_ranks_of(all_ranks, p, 2), latent, logits, bias, rule)
            for p in ("cpu", "cuda")
        ]
        assert_same_bits(results[1][0], results[0][0])
        assert_same_choice(results[1][1], results[0][1])
        assert_same_choice(route("cuda", logits, bias, rule), results[0][1])


@at_two_ranks
@few_drawn_inputs
@hypothesis.given(
    rank_experts=st.integers(1, 512),
    rows=st.integers(1, 16),
    k=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_topk_of_any_bits(
    ranks: Ranks,
    rank_experts: int,
    rows: int,
    k: int,
    dtype: np.dtype,
    has_bias: bool,
    scoring: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    num_experts = rank_experts * ranks.world
    logits = any_bits(rows, num_experts, dtype, rng)
    bias = any_bits(1, num_experts, F32, rng)[0] if has_bias else None
    rule = Rule(k=min(k, num_experts), scoring=scoring)
    check_fused(ranks, logits, bias, rule, rng)
