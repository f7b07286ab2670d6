"""`all_reduce` under JAX's transformations behaves as `lax.psum` does.

Whole numbers make every order of summation exact, so the lossless wire is compared with
`lax.psum` by ``==``; lossy wires are held to the oracles, or to the derived bound.
The collective that a body uses is its argument, so that psum runs the same lines.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import (
    COMPRESSED_MODES,
    MODES,
    Mode,
    Ranks,
    assert_all_ranks_hold,
    assert_same_bits,
    at_one_world_size,
    make_mesh,
    on_all_ranks,
    put,
    run_on_all_ranks,
    with_check_vma,
    with_dtypes,
    with_modes,
)
from jax import P, lax
from oracles import BF16, DTYPES, F16, F32, Rng

import jax_pcie

Tree = Any
Reduce = Callable[[Tree], Tree]
Body = Callable[[Reduce, jax.Array], Tree]


def psum(x: Tree) -> Tree:
    return lax.psum(x, "tp")


def lossless(ranks: Ranks) -> Reduce:
    return lambda x: jax_pcie.all_reduce(x, ranks.group, wire="bf16")


def whole_numbers(shape: tuple[int, ...], rng: Rng) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(np.float32)


def check_like_psum(ranks: Ranks, body: Body, xs: np.ndarray, check_vma: bool) -> None:
    """`body` on every rank, once with our collective and once with `lax.psum`."""
    got, want = (
        on_all_ranks(lambda x, r=r: body(r, x), ranks.mesh, check_vma=check_vma)(xs)
        for r in (lossless(ranks), psum)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


@at_one_world_size
@with_check_vma
@with_modes(MODES)
def test_the_result_is_replicated_by_type(
    ranks: Ranks, mode: Mode, check_vma: bool, rng: Rng
) -> None:
    xs = oracles.varied_input(ranks.world, BF16, rng)
    fn = jax.jit(
        jax.shard_map(
            lambda x: jax_pcie.all_reduce(x[0], ranks.group, wire=mode.wire),
            mesh=ranks.mesh,
            in_specs=P("tp"),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    want = oracles.all_reduce(mode.codec, mode.topology, xs)
    assert_same_bits(np.asarray(fn(put(xs, ranks.mesh))), want)


@at_one_world_size
def test_the_result_varies_over_the_other_axes_only(ranks: Ranks, rng: Rng) -> None:
    mesh = make_mesh(ranks.platform, (1, ranks.world), ("dp", "tp"))
    xs = whole_numbers((1, ranks.world, 200), rng)
    with jax_pcie.PeerGroup(mesh, "tp") as group:

        def body(x: jax.Array) -> jax.Array:
            return jax_pcie.all_reduce(x[0], group, wire="i8_ring")

        def mapped(out_specs: P) -> Callable[[jax.Array], jax.Array]:
            return jax.shard_map(
                body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=out_specs
            )

        got = np.asarray(jax.jit(mapped(P("dp")))(put(xs, mesh)))
        assert_same_bits(got[0], oracles.all_reduce("int8", "ring", xs[0]))
        with pytest.raises(ValueError, match="dp"):
            jax.eval_shape(mapped(P()), xs)


@at_one_world_size
@with_check_vma
@with_modes(MODES)
def test_an_operand_that_does_not_vary_counts_once_for_each_rank(
    ranks: Ranks, mode: Mode, check_vma: bool, rng: Rng
) -> None:
    x = oracles.exact_input(mode.codec, 300, rng)
    fn = jax.jit(
        jax.shard_map(
            lambda v: jax_pcie.all_reduce(v, ranks.group, wire=mode.wire),
            mesh=ranks.mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    replicated = jax.device_put(x, jax.NamedSharding(ranks.mesh, P()))
    np.testing.assert_array_equal(fn(replicated), ranks.world * x)


@at_one_world_size
@with_check_vma
def test_a_tree_is_reduced_leaf_by_leaf(
    ranks: Ranks, check_vma: bool, rng: Rng
) -> None:
    n = ranks.world
    leaves = [
        oracles.ordinary_input(n, d, s, rng)
        for d in DTYPES
        for s in [(130,), (3, 50), ()]
    ]
    tree = {"a": leaves[:3], "b": (leaves[3], None, {"c": leaves[4:]}), "d": ()}
    got = on_all_ranks(
        lambda t: jax_pcie.all_reduce(t, ranks.group, wire="mx_ring"),
        ranks.mesh,
        check_vma=check_vma,
    )(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for y, x in zip(jax.tree.leaves(got), leaves, strict=True):
        assert_all_ranks_hold(y, oracles.all_reduce("mxfp8", "ring", x))


@at_one_world_size
@with_check_vma
def test_it_runs_without_jit(ranks: Ranks, check_vma: bool, rng: Rng) -> None:
    xs = oracles.varied_input(ranks.world, F16, rng)
    eager = jax.shard_map(
        lambda x: jax_pcie.all_reduce(x[0], ranks.group, wire="e4m3_ring"),
        mesh=ranks.mesh,
        in_specs=P("tp"),
        out_specs=P(),
        check_vma=check_vma,
    )
    got = np.asarray(eager(put(xs, ranks.mesh)))
    assert_same_bits(got, oracles.all_reduce("e4m3", "ring", xs))


@at_one_world_size
@with_dtypes
def test_shape_and_dtype_are_known_without_running(
    ranks: Ranks, dtype: np.dtype
) -> None:
    mapped = jax.shard_map(
        lambda x: jax_pcie.all_reduce(x, ranks.group, wire="i8"),
        mesh=ranks.mesh,
        in_specs=P("tp"),
        out_specs=P(),
    )
    shape = jax.eval_shape(mapped, jax.ShapeDtypeStruct((ranks.world, 3, 5), dtype))
    assert (shape.shape, shape.dtype) == ((1, 3, 5), dtype)


def linear_loss(reduce: Reduce, x: jax.Array) -> jax.Array:
    weights = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) % 7
    return (reduce(x) * weights).sum()


def quadratic_loss(reduce: Reduce, x: jax.Array) -> jax.Array:
    return (reduce(x * x) * reduce(x)).sum()


def layered_loss(reduce: Reduce, x: jax.Array) -> jax.Array:
    """Layers in turn: a replicated result feeds computations that vary by rank."""
    rank = lax.axis_index("tp").astype(x.dtype)
    hidden = reduce(x * (rank + 1))
    hidden = reduce(jnp.maximum(hidden - rank, 0) * (rank + 1))
    return hidden.sum()


LOSSES = [linear_loss, quadratic_loss, layered_loss]
with_losses = pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)


@at_one_world_size
@with_check_vma
@with_losses
def test_gradient_inside_shard_map_is_that_of_psum(
    ranks: Ranks, loss: Body, check_vma: bool, rng: Rng
) -> None:
    xs = whole_numbers((ranks.world, 6, 50), rng)
    check_like_psum(
        ranks,
        lambda r, x: jax.value_and_grad(lambda v: loss(r, v))(x),
        xs,
        check_vma,
    )


@at_one_world_size
@with_check_vma
@with_losses
def test_gradient_through_shard_map_is_that_of_psum(
    ranks: Ranks, loss: Body, check_vma: bool, rng: Rng
) -> None:
    """The differentiated function contains the shard_map; one operand is replicated."""
    xs = put(whole_numbers((ranks.world, 300), rng), ranks.mesh)
    replicated = jax.NamedSharding(ranks.mesh, P())
    shared = jax.device_put(whole_numbers((300,), rng), replicated)

    def gradients(reduce: Reduce) -> tuple[jax.Array, jax.Array]:
        mapped = jax.shard_map(
            lambda x, w: loss(reduce, x[0] * w) + loss(reduce, w),
            mesh=ranks.mesh,
            in_specs=(P("tp"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(jax.grad(mapped, argnums=(0, 1)))(xs, shared)

    jax.tree.map(
        np.testing.assert_array_equal, gradients(lossless(ranks)), gradients(psum)
    )


@at_one_world_size
@with_check_vma
def test_jvp_is_that_of_psum(ranks: Ranks, check_vma: bool, rng: Rng) -> None:
    xs = whole_numbers((ranks.world, 2, 300), rng)
    check_like_psum(
        ranks, lambda r, x: jax.jvp(lambda v: r(v * v), (x[0],), (x[1],)), xs, check_vma
    )


@at_one_world_size
@with_check_vma
def test_second_derivatives_are_those_of_psum(
    ranks: Ranks, check_vma: bool, rng: Rng
) -> None:
    def body(r: Reduce, x: jax.Array) -> jax.Array:
        first = jax.grad(lambda v: quadratic_loss(r, v))
        return jax.grad(lambda v: (first(v) * x).sum())(x)

    check_like_psum(ranks, body, whole_numbers((ranks.world, 40), rng), check_vma)


def pull_back(ranks: Ranks, xs: np.ndarray, cts: np.ndarray, **kwargs: str) -> Tree:
    """Result and cotangent of one all-reduce whose own cotangent differs by rank."""

    def body(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(
            lambda v: jax_pcie.all_reduce(v, ranks.group, **kwargs), args[0]
        )
        return y, pull(args[1])[0]

    return on_all_ranks(body, ranks.mesh, check_vma=False)((xs, cts))


@at_one_world_size
@with_modes(MODES)
def test_backward_uses_the_forward_mode_by_default(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    """Without types the transpose of a sum over ranks is a sum over ranks."""
    xs, cts = (oracles.varied_input(ranks.world, F32, rng) for _ in range(2))
    y, ct = pull_back(ranks, xs, cts, wire=mode.wire)
    assert_all_ranks_hold(y, oracles.all_reduce(mode.codec, mode.topology, xs))
    assert_all_ranks_hold(ct, oracles.all_reduce(mode.codec, mode.topology, cts))


@at_one_world_size
@with_modes(MODES)
def test_grad_wire_is_the_mode_of_the_backward_pass_only(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    xs, cts = (oracles.varied_input(ranks.world, BF16, rng) for _ in range(2))
    y, ct = pull_back(ranks, xs, cts, wire="mx_a2a", grad_wire=mode.wire)
    assert_all_ranks_hold(y, oracles.all_reduce("mxfp8", "a2a", xs))
    assert_all_ranks_hold(ct, oracles.all_reduce(mode.codec, mode.topology, cts))


@at_one_world_size
@with_modes(COMPRESSED_MODES)
def test_the_codec_is_passed_straight_through(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    """With types the cotangent is replicated, needs no collective and stays exact."""
    xs = oracles.ordinary_input(ranks.world, F32, (300,), rng)
    weights = oracles.ordinary_input(1, F32, (300,), rng)[0]

    def body(x: jax.Array) -> jax.Array:
        return jax.grad(
            lambda v: (
                jax_pcie.all_reduce(v, ranks.group, wire=mode.wire) * weights
            ).sum()
        )(x)

    assert_all_ranks_hold(run_on_all_ranks(body, xs, ranks.mesh), weights)


@at_one_world_size
@with_check_vma
def test_rematerialised_gradients_are_the_same(
    ranks: Ranks, check_vma: bool, rng: Rng
) -> None:
    xs = whole_numbers((ranks.world, 300), rng)

    def gradient(wrap: Callable[[Callable], Callable]) -> np.ndarray:
        def body(x: jax.Array) -> jax.Array:
            def loss(v: jax.Array) -> jax.Array:
                return quadratic_loss(
                    lambda u: jax_pcie.all_reduce(u, ranks.group, wire="i8_ring"), v
                )

            return jax.grad(wrap(loss))(x)

        return on_all_ranks(body, ranks.mesh, check_vma=check_vma)(xs)

    want = gradient(lambda f: f)
    np.testing.assert_array_equal(gradient(jax.checkpoint), want)
    saved = jax.checkpoint_policies.everything_saveable
    np.testing.assert_array_equal(
        gradient(lambda f: jax.checkpoint(f, policy=saved)), want
    )


VMAPS = {
    "leading": lambda r, x: jax.vmap(r)(x),
    "last": lambda r, x: jax.vmap(r, in_axes=2, out_axes=1)(x),
    "nested": lambda r, x: jax.vmap(jax.vmap(r, in_axes=1))(x),
    "unbatched": lambda r, x: jax.vmap(lambda a, b: r(a) * b, (None, 0))(x[0], x),
    "tree": lambda r, x: jax.vmap(r)({"a": x, "b": (x + 1, x[:, 0])}),
    "partly batched tree": lambda r, x: jax.vmap(lambda a: r((a, x[0])))(x),
    "of a gradient": lambda r, x: jax.vmap(jax.grad(lambda v: linear_loss(r, v)))(x),
    "in a gradient": lambda r, x: jax.grad(lambda v: jax.vmap(r)(v * v).sum())(x),
}


@at_one_world_size
@with_check_vma
@pytest.mark.parametrize("kind", VMAPS)
def test_vmap_is_that_of_psum(
    ranks: Ranks, kind: str, check_vma: bool, rng: Rng
) -> None:
    xs = whole_numbers((ranks.world, 3, 5, 40), rng)
    check_like_psum(ranks, VMAPS[kind], xs, check_vma)


@at_one_world_size
def test_vmap_around_shard_map_is_that_of_psum(ranks: Ranks, rng: Rng) -> None:
    xs = whole_numbers((3, ranks.world, 100), rng)
    placed = jax.device_put(xs, jax.NamedSharding(ranks.mesh, P(None, "tp")))

    def batched(reduce: Reduce) -> jax.Array:
        mapped = jax.shard_map(
            lambda x: reduce(x[0]), mesh=ranks.mesh, in_specs=P("tp"), out_specs=P()
        )
        return jax.jit(jax.vmap(mapped))(placed)

    np.testing.assert_array_equal(batched(lossless(ranks)), xs.sum(axis=1))


@at_one_world_size
@with_modes(MODES)
def test_vmap_of_a_lossy_mode_stays_within_the_bound(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    """The batch is folded into the payload, so a block may hold any of its values."""
    xs = oracles.ordinary_input(ranks.world, F32, (5, 100), rng)
    got = run_on_all_ranks(
        jax.vmap(lambda x: jax_pcie.all_reduce(x, ranks.group, wire=mode.wire)),
        xs,
        ranks.mesh,
    )
    want = xs.astype(np.float64).sum(axis=0)
    bound = oracles.sum_bound(mode.codec, mode.topology, xs, block=500)
    for y in got:
        assert (np.abs(y - want) <= bound).all()
        assert_same_bits(y, got[0])


def chain(inputs: np.ndarray, codec: str, topology: str) -> np.ndarray:
    """NumPy's run of `chained_step` from the first of `inputs` [steps, 2, world, N]."""
    carry = inputs[0, 0]
    sums = []
    for positive, negative in inputs:
        total = oracles.all_reduce(codec, topology, carry)
        carry = np.where(oracles.widen(total) > 0, positive, negative)
        sums.append(total)
    return np.stack(sums)


def chained_step(reduce: Reduce, carry: jax.Array, pair: jax.Array) -> Tree:
    """The next operand depends on every value of this sum, and differs by rank."""
    total = reduce(carry)
    return jnp.where(total > 0, pair[0], pair[1]), total


def chain_input(world: int, dtype: np.dtype, rng: Rng) -> np.ndarray:
    steps = [oracles.ordinary_input(world, dtype, (300,), rng) for _ in range(12)]
    return np.stack(steps).reshape(6, 2, world, 300)


@at_one_world_size
@with_check_vma
@with_modes(MODES)
def test_scan_runs_a_dependent_chain(
    ranks: Ranks, mode: Mode, check_vma: bool, rng: Rng
) -> None:
    inputs = chain_input(ranks.world, BF16, rng)

    def body(pairs: jax.Array) -> jax.Array:
        def step(carry: jax.Array, pair: jax.Array) -> Tree:
            return chained_step(
                lambda v: jax_pcie.all_reduce(v, ranks.group, wire=mode.wire),
                carry,
                pair,
            )

        return lax.scan(step, pairs[0, 0], pairs)[1]

    run = on_all_ranks(body, ranks.mesh, check_vma=check_vma)
    got = run(np.moveaxis(inputs, 2, 0))
    assert_all_ranks_hold(got, chain(inputs, mode.codec, mode.topology))


@at_one_world_size
def test_while_loop_may_stop_on_a_sum(ranks: Ranks) -> None:
    """The condition is the same on all ranks because the result is."""

    def body(x: jax.Array) -> jax.Array:
        def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return state[1] < 1000

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            grown = state[0] * 2
            total = jax_pcie.all_reduce(grown, ranks.group, wire="i8_a2a").sum()
            return grown, total

        start = jax_pcie.all_reduce(x, ranks.group, wire="i8_a2a").sum()
        return lax.while_loop(more, step, (x, start))[1]

    got = run_on_all_ranks(body, np.ones((ranks.world, 4), np.float32), ranks.mesh)
    want = 4 * ranks.world
    while want < 1000:
        want *= 2
    np.testing.assert_array_equal(got, np.full(ranks.world, want, np.float32))


@at_one_world_size
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_cond_may_skip_it_on_all_ranks_at_once(
    ranks: Ranks, flag: float, rng: Rng
) -> None:
    xs = whole_numbers((ranks.world, 200), rng)
    xs[:, 0] = flag

    def body(x: jax.Array) -> jax.Array:
        return lax.cond(
            lax.pmax(x[0], "tp") > 0,
            lambda v: jax_pcie.all_reduce(v, ranks.group, wire="bf16"),
            lambda v: lax.pmax(v, "tp"),
            x,
        )

    got = run_on_all_ranks(body, xs, ranks.mesh)
    want = xs.sum(axis=0) if flag else xs.max(axis=0)
    np.testing.assert_array_equal(got, np.stack([want] * ranks.world))


@at_one_world_size
@with_check_vma
def test_gradient_through_scan_is_that_of_psum(
    ranks: Ranks, check_vma: bool, rng: Rng
) -> None:
    def body(r: Reduce, x: jax.Array) -> jax.Array:
        def loss(v: jax.Array) -> jax.Array:
            def step(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return w + r(carry * w), None

            return lax.scan(step, v[0], v[1:])[0].sum()

        return jax.grad(loss)(x)

    check_like_psum(ranks, body, whole_numbers((ranks.world, 4, 50), rng), check_vma)


@at_one_world_size
@with_modes(MODES)
def test_a_donated_operand_is_consumed_and_another_is_not(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    xs = oracles.varied_input(ranks.world, BF16, rng)
    mapped = jax.shard_map(
        lambda x: lax.pcast(
            jax_pcie.all_reduce(x, ranks.group, wire=mode.wire), "tp", to="varying"
        ),
        mesh=ranks.mesh,
        in_specs=P("tp"),
        out_specs=P("tp"),
    )
    want = oracles.all_reduce(mode.codec, mode.topology, xs)
    kept, given = put(xs, ranks.mesh), put(xs, ranks.mesh)
    assert_all_ranks_hold(np.asarray(jax.jit(mapped)(kept)), want)
    np.testing.assert_array_equal(oracles.bits(np.asarray(kept)), oracles.bits(xs))
    assert_all_ranks_hold(np.asarray(jax.jit(mapped, donate_argnums=0)(given)), want)
    assert given.is_deleted()
