"""`all_gather_pair` and `all_gather_heads`: every byte, width, dtype and gradient."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
from conftest import (
    Ranks,
    assert_all_ranks_hold,
    at_one_world_size,
    at_router_worlds,
    at_two_ranks,
    make_mesh,
    on_all_ranks,
    put,
    run_on_all_ranks,
    with_check_vma,
    with_platforms,
)
from jax import P, lax
from oracles import BF16, F16, F32, Rng

import jax_pcie
from jax_pcie import PcieError, PeerGroup

Array = np.ndarray
Tree = Any

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
DTYPES = [BF16, F16, F32, E4M3, E4M3FNUZ, E5M2]
DTYPES += map(np.dtype, (np.int8, np.uint16, np.int32))


def any_bits(shape: tuple[int, ...], dtype: np.dtype, rng: Rng) -> Array:
    """Every pattern, those of NaNs among them."""
    codes = rng.integers(0, 1 << (8 * dtype.itemsize), shape)
    return oracles.from_bits(codes, dtype)


def assert_same_bytes(got: Array, want: Array) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def side_by_side(xs: Array) -> Array:
    """[n, B, w, ...] -> [B, n * w, ...]"""
    return np.concatenate(list(xs), axis=1)


def check_pair(ranks: Ranks, first: Array, second: Array) -> None:
    """`first` and `second` [n, B, w] are what each rank has."""
    results = run_on_all_ranks(
        lambda pair: jax_pcie.all_gather_pair(*pair, ranks.group),
        (first, second),
        ranks.mesh,
    )
    for got, xs in zip(results, (first, second), strict=True):
        for of_rank in got:
            assert_same_bytes(of_rank, side_by_side(xs))


@at_router_worlds
def test_gather_of_latent_and_logits(ranks: Ranks, rng: Rng) -> None:
    n = ranks.world
    for batch in (1, 8):
        first = any_bits((n, batch, 3584 // n), BF16, rng)
        check_pair(ranks, first, any_bits((n, batch, 896 // n), F32, rng))


@at_one_world_size
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_of_every_dtype(ranks: Ranks, dtype: np.dtype, rng: Rng) -> None:
    other = DTYPES[(DTYPES.index(dtype) + 1) % len(DTYPES)]
    first = any_bits((ranks.world, 3, 40), dtype, rng)
    check_pair(ranks, first, any_bits((ranks.world, 3, 24), other, rng))


@at_one_world_size
def test_gather_of_bool(ranks: Ranks, rng: Rng) -> None:
    first = rng.integers(0, 2, (ranks.world, 2, 9)).astype(bool)
    check_pair(ranks, first, ~first)


@at_two_ranks
@pytest.mark.parametrize("dtype", [E4M3, BF16, F32], ids=str)
def test_gather_of_every_width(ranks: Ranks, dtype: np.dtype, rng: Rng) -> None:
    """Rows that begin and end anywhere; several in a packet and several packets."""
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 2049):
        first = any_bits((2, 5, width), dtype, rng)
        check_pair(ranks, first, any_bits((2, 5, 8), dtype, rng))


@at_one_world_size
def test_gather_of_large_arrays(ranks: Ranks, rng: Rng) -> None:
    """Many tiles for each channel, and the second array begins among them."""
    first = any_bits((ranks.world, 700, 3000), BF16, rng)
    check_pair(ranks, first, any_bits((ranks.world, 700, 501), F32, rng))


@at_two_ranks
def test_gather_in_little_staging_memory(ranks: Ranks, rng: Rng) -> None:
    first = any_bits((2, 3, 5000), BF16, rng)
    second = any_bits((2, 3, 77), F32, rng)
    with PeerGroup(ranks.mesh, "tp", max_bytes=1 << 16) as group:
        run = on_all_ranks(
            lambda pair: jax_pcie.all_gather_pair(*pair, group), ranks.mesh
        )
        for _ in range(3):
            got = run((first, second))
            assert_all_ranks_hold(got[0], side_by_side(first))
            assert_all_ranks_hold(got[1], side_by_side(second))
        plan = group.plan("all_gather_pair", ((3, 5000), (3, 77)), (BF16, F32))
        assert plan.wire_bytes == 3 * 5000 * 2 + 3 * 77 * 4
        if ranks.platform == "cuda":
            assert plan.segments > 10


@at_router_worlds
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3], ids=str)
def test_gather_of_heads(ranks: Ranks, dtype: np.dtype, rng: Rng) -> None:
    """head = source rank * (H / n) + local head."""
    for heads, width in ((1, 64), (3, 5)):
        xs = any_bits((ranks.world, 4, heads, width), dtype, rng)
        got = run_on_all_ranks(
            lambda x: jax_pcie.all_gather_heads(x, ranks.group), xs, ranks.mesh
        )
        for of_rank in got:
            assert_same_bytes(of_rank, side_by_side(xs))


@at_one_world_size
def test_gather_of_an_empty_batch_is_empty(ranks: Ranks) -> None:
    def body(x: jax.Array) -> Tree:
        pair = jax_pcie.all_gather_pair(x[:0], x[:0].astype(jnp.int8), ranks.group)
        mixed = jax_pcie.all_gather_pair(x[:, :0], x, ranks.group)
        heads = jax_pcie.all_gather_heads(x[:0, None], ranks.group)
        return pair, mixed, heads

    n = ranks.world
    xs = np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3)
    (first, second), (none, all_of_it), heads = run_on_all_ranks(body, xs, ranks.mesh)
    assert (first.shape, first.dtype) == ((n, 0, 3 * n), np.float32)
    assert (second.shape, second.dtype) == ((n, 0, 3 * n), np.int8)
    assert none.shape == (n, 2, 0)
    assert heads.shape == (n, 0, n, 3)
    assert_all_ranks_hold(all_of_it, side_by_side(xs))


@with_platforms
def test_gather_in_a_world_of_one_rank(platform: str, rng: Rng) -> None:
    alone = Ranks(platform, 1)
    with alone.group:
        check_pair(alone, any_bits((1, 3, 5), BF16, rng), any_bits((1, 3, 2), F32, rng))
        assert alone.group.plan("all_gather_heads", (1, 2, 3), BF16).path == "identity"


# What bits that are all ones are in a dtype.
ONES = {BF16: np.nan, E4M3: np.nan, E4M3FNUZ: -240, np.dtype(np.int32): -1}


@at_two_ranks
@pytest.mark.parametrize("dtype", ONES, ids=str)
def test_gather_of_a_missing_rank_is_an_error_and_ones(
    ranks: Ranks, dtype: np.dtype
) -> None:
    xs = np.ones((2, 1, 40), np.int8).astype(dtype)
    with PeerGroup(ranks.mesh, "tp", timeout_s=1.0) as group:

        def body(x: jax.Array) -> jax.Array:
            return lax.cond(
                lax.axis_index("tp") == 1,
                lambda v: jnp.concatenate([v, v], axis=1),
                lambda v: jax_pcie.all_gather_pair(v, v, group)[0],
                x,
            )

        run = on_all_ranks(body, ranks.mesh, check_vma=False)
        start = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match="missing ranks: 1"):
            for _ in range(2):  # a GPU's call ends as ones, and the next one raises
                got = run(xs)[0].astype(np.float32)
                np.testing.assert_array_equal(got, np.float32(ONES[dtype]))
        assert time.monotonic() - start < 20
        with pytest.raises(PcieError, match="missing ranks: 1"):
            group.check()


@at_one_world_size
@with_check_vma
def test_gather_is_typed_as_lax_does(ranks: Ranks, check_vma: bool, rng: Rng) -> None:
    xs = any_bits((ranks.world, 2, 6), F32, rng)
    want = side_by_side(xs)

    def run(to: str, out: P) -> Array:
        fn = jax.shard_map(
            lambda x: jax_pcie.all_gather_pair(x[0], x[0], ranks.group, to=to)[0],
            mesh=ranks.mesh,
            in_specs=P("tp"),
            out_specs=out,
            check_vma=check_vma,
        )
        return np.asarray(jax.jit(fn)(put(xs, ranks.mesh)))

    assert_same_bytes(run("varying", P("tp")), np.concatenate([want] * ranks.world))
    assert_same_bytes(run("invarying", P()), want)
    if check_vma:
        with pytest.raises(ValueError, match="tp"):
            run("varying", P())


def like_lax(ranks: Ranks, body: Callable, xs: Tree, check_vma: bool) -> None:
    """`body` with our gather and with `lax.all_gather`."""

    def ours(x: jax.Array, y: jax.Array, to: str) -> Tree:
        return jax_pcie.all_gather_pair(x, y, ranks.group, to=to)

    def theirs(x: jax.Array, y: jax.Array, to: str) -> Tree:
        return tuple(lax.all_gather(v, "tp", axis=1, tiled=True, to=to) for v in (x, y))

    got, want = (
        on_all_ranks(lambda x, g=g: body(g, x), ranks.mesh, check_vma=check_vma)(xs)
        for g in (ours, theirs)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def loss(gather: Callable, to: str, pair: Tree) -> jax.Array:
    """Both results with weights of their own, which differ by rank if they may."""
    first, second = gather(pair[0], pair[1], to)
    weights = jnp.arange(first.size, dtype=jnp.float32).reshape(first.shape)
    if to == "varying":
        weights = weights * (lax.axis_index("tp") + 1)
    return (first * weights).sum() + (second * second).sum()


@at_one_world_size
@pytest.mark.parametrize(
    ("to", "check_vma"),
    # (without types, JAX 0.11 and 0.12 disagree about invarying)
    [("varying", True), ("varying", False), ("invarying", True)],
)
def test_gather_has_the_gradient_of_lax(
    ranks: Ranks, check_vma: bool, to: str, rng: Rng
) -> None:
    xs = rng.integers(-4, 5, (2, ranks.world, 3, 6)).astype(np.float32)
    like_lax(
        ranks,
        lambda g, pair: jax.grad(lambda p: loss(g, to, p))(pair),
        (xs[0], xs[1]),
        check_vma,
    )


@at_one_world_size
def test_gather_with_a_gradient_of_one_operand_only(ranks: Ranks, rng: Rng) -> None:
    xs = rng.integers(-4, 5, (ranks.world, 3, 6)).astype(np.float32)

    def body(g: Callable, x: jax.Array) -> Tree:
        ids = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
        return jax.grad(lambda v: (g(v, ids, "varying")[0] ** 2).sum())(x)

    like_lax(ranks, body, xs, True)


@at_one_world_size
def test_gather_under_vmap(ranks: Ranks, rng: Rng) -> None:
    xs = any_bits((ranks.world, 3, 2, 6), F32, rng)

    def body(g: Callable, x: jax.Array) -> Tree:
        both = jax.vmap(lambda a, b: g(a, b, "varying"), (0, 2), 1)(
            x, jnp.moveaxis(x, 0, 2)
        )
        one = jax.vmap(lambda a: g(a, x[0], "varying"))(x)
        return jax.tree.map(
            lambda y: lax.bitcast_convert_type(y, jnp.int32), (both, one)
        )

    like_lax(ranks, body, xs, True)


@at_two_ranks
@with_check_vma
def test_gather_under_vmap_over_nothing(ranks: Ranks, check_vma: bool) -> None:
    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        nothing = jnp.zeros((0, 3, 4), jnp.int8)
        pair = jax_pcie.all_gather_pair
        both = jax.vmap(lambda a: pair(a, a, ranks.group))(nothing)
        return *both, *jax.vmap(lambda a: pair(a, x, ranks.group), out_axes=(0, None))(
            nothing
        )

    fn = jax.shard_map(
        body,
        mesh=ranks.mesh,
        in_specs=P(),
        out_specs=(P("tp"), P("tp"), P("tp"), P("tp")),
        check_vma=check_vma,
    )
    *empty, whole = jax.jit(fn)(np.ones((3, 2), F32))
    assert [y.shape for y in empty] == [(0, 3, 8)] * 3
    np.testing.assert_array_equal(whole, np.ones((6, 4), F32))


def on_two_ranks(fn: Callable[[jax.Array], Tree], ranks: Ranks, x: Tree) -> Tree:
    return jax.eval_shape(
        jax.shard_map(fn, mesh=ranks.mesh, in_specs=P(), out_specs=P("tp")), x
    )


@at_two_ranks
def test_gather_refuses_what_it_cannot_move(ranks: Ranks) -> None:
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def pair(second: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Tree]:
        return lambda v: jax_pcie.all_gather_pair(v, second(v), ranks.group)

    with pytest.raises(TypeError, match="second has dtype complex64 of 8 bytes"):
        on_two_ranks(pair(lambda v: v.astype(jnp.complex64)), ranks, x)
    with pytest.raises(TypeError, match="second has dtype int4, less than a byte"):
        on_two_ranks(pair(lambda v: v.astype(jnp.int4)), ranks, x)
    with pytest.raises(TypeError, match="plain numbers"):
        on_two_ranks(pair(lambda v: jax.random.split(jax.random.key(0))), ranks, x)
    with pytest.raises(ValueError, match=r"second has shape \(8,\)"):
        on_two_ranks(pair(lambda v: v.reshape(-1)), ranks, x)
    with pytest.raises(ValueError, match="first has 2, second has 1 rows"):
        on_two_ranks(pair(lambda v: v[:1]), ranks, x)
    with pytest.raises(ValueError, match="x has shape"):
        on_two_ranks(lambda v: jax_pcie.all_gather_heads(v, ranks.group), ranks, x)
    with pytest.raises(ValueError, match="'reduced' is not implemented"):
        on_two_ranks(
            lambda v: jax_pcie.all_gather_pair(v, v, ranks.group, to="reduced"),
            ranks,
            x,
        )
    with pytest.raises(TypeError, match="must be a PeerGroup"):
        on_two_ranks(lambda v: jax_pcie.all_gather_pair(v, v, "tp"), ranks, x)
    with pytest.raises(ValueError, match="must be called inside jax"):
        jax.eval_shape(lambda v: jax_pcie.all_gather_pair(v, v, ranks.group), x)


def test_gather_on_other_devices_is_refused() -> None:
    mesh = make_mesh("cpu", (4,), ("tp",), first=4)
    with PeerGroup(make_mesh("cpu", (4,), ("tp",)), "tp") as group:
        fn = jax.shard_map(
            lambda x: jax_pcie.all_gather_heads(x, group),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
        )
        with pytest.raises(ValueError, match=r"all_gather_heads.*other devices"):
            jax.jit(fn)(put(np.zeros((4, 1, 1), np.float32), mesh))
