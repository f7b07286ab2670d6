"""`all_reduce` bit for bit: every codec, topology, world size and dtype on one body.

The expected bits are those of the oracles' simulation of the topology, so a GPU is held
to the very same ones as the CPU. Transformations are in `test_transforms.py`.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import (
    COMPRESSED_MODES,
    LOSSLESS_MODES,
    MODES,
    Mode,
    Ranks,
    assert_all_ranks_hold,
    at_all_world_sizes,
    at_one_world_size,
    at_two_ranks,
    few_drawn_inputs,
    run_on_all_ranks,
    with_dtypes,
    with_modes,
)
from hypothesis import strategies as st
from oracles import BF16, DTYPES, F16, F32, Rng

import jax_pcie


def expected(mode: Mode, xs: np.ndarray) -> np.ndarray:
    return oracles.all_reduce(mode.codec, mode.topology, xs)


def at_places(
    xs: np.ndarray, rank: int | slice, at: list[int], value: float
) -> np.ndarray:
    """A copy of `xs` with `value` at those places of one rank."""
    xs = xs.copy()
    xs[rank, at] = value
    return xs


NUM = 5000  # elements where a test does not care: one compilation serves them all


@at_all_world_sizes
@with_dtypes
@with_modes(MODES)
def test_every_kind_of_input_gives_the_oracles_bits_on_all_ranks(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    xs = oracles.varied_input(ranks.world, dtype, rng)
    assert_all_ranks_hold(ranks.all_reduce(mode.wire, xs), expected(mode, xs))


@at_all_world_sizes
@with_modes(MODES)
def test_sizes_and_shapes(ranks: Ranks, mode: Mode, rng: Rng) -> None:
    """Short shards, absent shards, partial blocks; each size in each dtype."""
    n = ranks.world
    shapes = [(), (1,), (2,), (127,), (128,), (129,), (255,), (1000,), (4096,)]
    shapes += [(128 * n,), (128 * n + 1,), (128 * n - 1,), (3, 5, 7), (1, 1), (16, 129)]
    xs = [oracles.ordinary_input(n, d, s, rng) for s in shapes for d in DTYPES]
    for got, x in zip(ranks.all_reduce(mode.wire, xs), xs, strict=True):
        assert_all_ranks_hold(got, expected(mode, x))


@at_all_world_sizes
@with_modes(MODES)
def test_an_empty_array_gives_an_empty_array(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    """Cut in the program: not every XLA can pass an empty sharded argument."""

    def body(x: jax.Array) -> list[jax.Array]:
        empty = [x[:0], x[:0].reshape(3, 0, 5)]
        return jax_pcie.all_reduce([*empty, x], ranks.group, wire=mode.wire)

    xs = oracles.ordinary_input(ranks.world, BF16, (7,), rng)
    one, two, rest = run_on_all_ranks(body, xs, ranks.mesh)
    assert (one.dtype, one.shape) == (BF16, (ranks.world, 0))
    assert (two.dtype, two.shape) == (BF16, (ranks.world, 3, 0, 5))
    assert_all_ranks_hold(rest, expected(mode, xs))


@at_all_world_sizes
@with_dtypes
@with_modes(MODES)
def test_exact_inputs_are_summed_without_error(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    """Lossy codec, exact result: world_size * x, rounded once to the dtype."""
    if mode[1:] == ("int8", "ag") and dtype == BF16 and ranks.world >= 4:
        dtype = F32  # bf16 partial sums of INT8's whole numbers round on the way
    x = oracles.exact_input(mode.codec, NUM, rng).astype(dtype)
    want = oracles.narrow(ranks.world * oracles.widen(x), dtype)
    got = ranks.all_reduce(mode.wire, np.stack([x] * ranks.world))
    for y in got:
        np.testing.assert_array_equal(oracles.widen(y), oracles.widen(want))


@at_all_world_sizes
@with_dtypes
@with_modes(MODES)
def test_the_sum_is_within_the_bound(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    xs = oracles.ordinary_input(ranks.world, dtype, (NUM,), rng)
    want = oracles.widen(xs).astype(np.float64).sum(axis=0)
    bound = oracles.sum_bound(mode.codec, mode.topology, xs)
    for y in oracles.widen(ranks.all_reduce(mode.wire, xs)).astype(np.float64):
        assert (np.abs(y - want) <= bound).all()


@at_two_ranks
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@with_modes(MODES)
def test_every_16_bit_pattern_passes_through(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    """x + (-0) is x: out comes the codec alone, as this backend vectorises it."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = np.concatenate([patterns, rng.permutation(patterns)])
    negative_zero = np.full(patterns.size, 0x8000, np.uint16)
    xs = np.stack([patterns, negative_zero]).view(dtype)
    for pair in (xs, xs[::-1]):
        assert_all_ranks_hold(ranks.all_reduce(mode.wire, pair), expected(mode, pair))


@at_two_ranks
@with_modes(MODES)
def test_random_f32_patterns_pass_through(ranks: Ranks, mode: Mode, rng: Rng) -> None:
    xs = rng.integers(0, 1 << 32, (2, 1 << 17), np.uint32)
    xs[:, : 1 << 15] &= 0x807FFFFF  # subnormals
    xs[1, : 1 << 16] = 0x80000000
    assert_all_ranks_hold(
        ranks.all_reduce(mode.wire, xs.view(F32)), expected(mode, xs.view(F32))
    )


@at_all_world_sizes
@with_modes(COMPRESSED_MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_compressed_non_finite_value_is_nan_in_its_place_only(
    ranks: Ranks, mode: Mode, value: float, rng: Rng
) -> None:
    clean = oracles.ordinary_input(ranks.world, BF16, (NUM,), rng)
    at = [0, 31, 32, 200, NUM - 1]
    got = ranks.all_reduce(mode.wire, at_places(clean, ranks.world - 1, at, value))
    for y in got:
        np.testing.assert_array_equal(np.isnan(oracles.widen(y)).nonzero()[0], at)


@at_all_world_sizes
@with_dtypes
@with_modes(LOSSLESS_MODES)
def test_a_lossless_path_keeps_infinities(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    clean = oracles.ordinary_input(ranks.world, dtype, (NUM,), rng)
    xs = at_places(clean, 0, [3, 700], np.inf)
    xs = at_places(xs, 1, [4, 700], -np.inf)
    for y in oracles.widen(ranks.all_reduce(mode.wire, xs)):
        assert (y[3], y[4]) == (np.inf, -np.inf)
        assert np.isnan(y[700])
        assert np.isfinite(np.delete(y, [3, 4, 700])).all()


@at_all_world_sizes
@with_dtypes
@with_modes(COMPRESSED_MODES)
def test_a_sum_beyond_the_dtype_is_nan_and_not_the_largest_number(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    clean = oracles.ordinary_input(ranks.world, dtype, (NUM,), rng)
    largest = oracles.from_bits(np.array(oracles.infinity_bits(dtype) - 1), dtype)
    xs = at_places(clean, slice(None), [5, 2000], largest)
    for y in oracles.widen(ranks.all_reduce(mode.wire, xs)):
        np.testing.assert_array_equal(np.isnan(y).nonzero()[0], [5, 2000])


def one_array_near_the_top(world: int, dtype: np.dtype, rng: Rng) -> np.ndarray:
    """The other ranks hold zeros."""
    xs = np.zeros((world, NUM), dtype)
    top = oracles.infinity_bits(dtype) - 1
    xs[0] = oracles.from_bits(top - rng.integers(0, 40, NUM), dtype)
    return xs


@at_all_world_sizes
@with_dtypes
@with_modes([m for m in COMPRESSED_MODES if m.codec != "mxfp8" or m.topology == "ag"])
def test_one_large_finite_array_stays_finite(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    """Decoders round up near the dtype's top; nothing of that may reach infinity."""
    xs = one_array_near_the_top(ranks.world, dtype, rng)
    assert np.isfinite(oracles.widen(ranks.all_reduce(mode.wire, xs))).all()


@at_all_world_sizes
@with_dtypes
@with_modes(COMPRESSED_MODES)
def test_one_large_finite_array_has_the_oracles_bits(
    ranks: Ranks, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    """MXFP8 partial sums that round up past a 16-bit dtype's top travel as NaN."""
    xs = one_array_near_the_top(ranks.world, dtype, rng)
    assert_all_ranks_hold(ranks.all_reduce(mode.wire, xs), expected(mode, xs))


@at_all_world_sizes
@with_dtypes
@with_modes(MODES)
def test_negative_zero_survives_unless_the_codec_has_none(
    ranks: Ranks, mode: Mode, dtype: np.dtype
) -> None:
    xs = oracles.narrow(np.full((ranks.world, NUM), -0.0, np.float32), dtype)
    got = oracles.widen(ranks.all_reduce(mode.wire, xs))
    assert (got == 0).all()
    assert (np.signbit(got) == (mode.codec != "int8")).all()


@at_one_world_size
@with_modes(MODES)
@pytest.mark.parametrize("max_bytes", [1 << 16, 1 << 17])
def test_segments_do_not_change_the_result(
    ranks: Ranks, mode: Mode, max_bytes: int, rng: Rng
) -> None:
    """A message many times the staging capacity, and not a multiple of it."""
    num = 128 * ranks.world * 1100 + 77
    xs = oracles.ordinary_input(ranks.world, BF16, (num,), rng)
    with jax_pcie.PeerGroup(ranks.mesh, "tp", max_bytes=max_bytes) as group:
        got = run_on_all_ranks(
            lambda x: jax_pcie.all_reduce(x, group, wire=mode.wire), xs, ranks.mesh
        )
    assert_all_ranks_hold(got, expected(mode, xs))


@at_one_world_size
@with_modes(MODES)
def test_the_groups_mode_is_the_default_of_its_calls(
    ranks: Ranks, mode: Mode, rng: Rng
) -> None:
    xs = oracles.varied_input(ranks.world, BF16, rng)
    with jax_pcie.PeerGroup(ranks.mesh, "tp", wire=mode.wire) as group:
        assert group.wire == jax_pcie.WireMode.parse(mode.wire)
        both = run_on_all_ranks(
            lambda x: [
                jax_pcie.all_reduce(x, group),
                jax_pcie.all_reduce(x, group, wire="mx_a2a"),
            ],
            xs,
            ranks.mesh,
        )
    assert_all_ranks_hold(both[0], expected(mode, xs))
    assert_all_ranks_hold(both[1], oracles.all_reduce("mxfp8", "a2a", xs))


@at_one_world_size
def test_nothing_named_means_lossless(ranks: Ranks, rng: Rng) -> None:
    xs = oracles.varied_input(ranks.world, BF16, rng)
    got = run_on_all_ranks(
        lambda x: jax_pcie.all_reduce(x, ranks.group), xs, ranks.mesh
    )
    assert_all_ranks_hold(got, oracles.all_reduce("raw", "ring", xs))


@at_all_world_sizes
@with_modes(MODES)
def test_repeated_calls_give_repeated_bits(ranks: Ranks, mode: Mode, rng: Rng) -> None:
    """Mailboxes are reused: a call must not see the values of the one before."""
    xs = [oracles.varied_input(ranks.world, BF16, rng) for _ in range(3)]
    want = [expected(mode, x) for x in xs]
    for k in (0, 1, 2, 0, 0, 2):
        assert_all_ranks_hold(ranks.all_reduce(mode.wire, xs[k]), want[k])


@at_one_world_size
@with_modes(MODES)
def test_the_operand_is_left_as_it_was(ranks: Ranks, mode: Mode, rng: Rng) -> None:
    xs = oracles.varied_input(ranks.world, BF16, rng)

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax_pcie.all_reduce(x, ranks.group, wire=mode.wire), x

    total, after = run_on_all_ranks(body, xs, ranks.mesh)
    assert_all_ranks_hold(total, expected(mode, xs))
    np.testing.assert_array_equal(oracles.bits(after), oracles.bits(xs))


@at_one_world_size
def test_an_operand_computed_in_the_program_is_contiguous(
    ranks: Ranks, rng: Rng
) -> None:
    """XLA may give a transposed array another layout: flattened is row-major."""
    xs = oracles.ordinary_input(ranks.world, F32, (40, 50), rng)
    got = run_on_all_ranks(
        lambda x: jax_pcie.all_reduce(
            jnp.swapaxes(x, 0, 1), ranks.group, wire="i8_ring"
        ),
        xs,
        ranks.mesh,
    )
    want = oracles.all_reduce("int8", "ring", np.ascontiguousarray(xs.swapaxes(1, 2)))
    assert_all_ranks_hold(got, want)


@pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@with_dtypes
@with_modes(MODES)
def test_one_rank_gets_its_operand_back(
    platform: str, mode: Mode, dtype: np.dtype, rng: Rng
) -> None:
    """Nothing is encoded: NaN payloads and infinities included."""
    alone = Ranks(platform, 1)
    with alone.group:
        xs = oracles.varied_input(1, dtype, rng)
        assert_all_ranks_hold(alone.all_reduce(mode.wire, xs), xs[0])


@at_two_ranks
@few_drawn_inputs
@hypothesis.given(
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(DTYPES),
    num=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_of_any_bits(
    ranks: Ranks, mode: Mode, dtype: np.dtype, num: int, seed: int
) -> None:
    top = 1 << (8 * dtype.itemsize)
    codes = np.random.default_rng(seed).integers(0, top, (ranks.world, num))
    xs = oracles.from_bits(codes, dtype)
    got = ranks.all_reduce(mode.wire, xs)
    assert_all_ranks_hold(got, expected(mode, xs))


@at_one_world_size
def test_a_program_can_be_lowered_and_compiled_ahead_of_time(
    ranks: Ranks, rng: Rng
) -> None:
    x = oracles.ordinary_input(ranks.world, BF16, (300,), rng)
    fn = jax.jit(
        jax.shard_map(
            lambda v: jax_pcie.all_reduce(v, ranks.group, wire="e4m3_a2a"),
            mesh=ranks.mesh,
            in_specs=jax.P("tp"),
            out_specs=jax.P(),
        )
    )
    placed = jax.device_put(x.reshape(-1), jax.NamedSharding(ranks.mesh, jax.P("tp")))
    got = np.asarray(fn.lower(placed).compile()(placed))
    assert_all_ranks_hold(got[None], oracles.all_reduce("e4m3", "a2a", x))


@at_one_world_size
def test_the_collective_has_no_effect(ranks: Ranks) -> None:
    """An effect would cost every program JAX's fast dispatch."""
    jaxpr = jax.make_jaxpr(
        jax.shard_map(
            lambda x: jax_pcie.all_reduce(x, ranks.group, wire="i8"),
            mesh=ranks.mesh,
            in_specs=jax.P("tp"),
            out_specs=jax.P(),
        )
    )(jnp.zeros((ranks.world, 8), jnp.float32))
    assert not jaxpr.effects
