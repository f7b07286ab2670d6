"""Gradients, `vmap`, `scan` and programs of many products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits, make_mesh
from jax import P, lax
from mxfp8_cases import (
    E4M3,
    E8M0,
    NUM_OUTPUTS,
    any_octaves,
    gaussian,
    mm,
    pack,
    with_sizes,
)
from mxfp8_oracles import BF16, F16, F32

from jax_pcie import mxfp8

on_a_device = pytest.mark.usefixtures("device")


@on_a_device
def test_gradients_take_quantisation_for_the_identity(
    rng: np.random.Generator,
) -> None:
    x, w = gaussian(rng, 6, 96), gaussian(rng, 8, 96)
    bias, weights = gaussian(rng, 8), gaussian(rng, 6, 8)

    def loss(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return (mxfp8.mm(x, w, bias=bias) * weights).sum()

    dx, dw, dbias = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, w, bias)
    g = weights.astype(np.float64)
    for got, a, b in (
        (dx, g, oracles.quantized(w).T),
        (dw, g.T, oracles.quantized(x).T),
    ):
        oracles.assert_within(np.asarray(got), *oracles.product(a, b))
    np.testing.assert_allclose(dbias, g.sum(axis=0), rtol=6 * 2.0**-24)
    packed_dx = jax.jit(jax.grad(loss))(x, mxfp8.pack_weight(w), bias)
    assert_same_bits(np.asarray(packed_dx), np.asarray(dx))


@on_a_device
def test_gradients_have_the_dtypes_of_their_operands(rng: np.random.Generator) -> None:
    x, w = gaussian(rng, 2, 32, dtype=F16), gaussian(rng, 4, 32, dtype=BF16)
    loss = jax.grad(lambda x, w: mxfp8.mm(x, w, dtype=jnp.float32).sum(), (0, 1))
    assert [leaf.dtype for leaf in loss(x, w)] == [F16, BF16]


@pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_ranks_that_share_a_raw_weight_sum_its_gradients(
    platform: str, rng: np.random.Generator
) -> None:
    mesh = make_mesh(platform, (2,), ("dp",))
    x, w = gaussian(rng, 4, 64), gaussian(rng, 8, 64)
    per_rank = jax.shard_map(
        mxfp8.mm, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp")
    )
    got = jax.jit(jax.grad(lambda x, w: per_rank(x, w).sum(), (0, 1)))(x, w)
    ones = np.ones((4, 8))
    want_dx = oracles.product(ones, oracles.quantized(w).T)
    want_dw = oracles.product(ones.T, oracles.quantized(x).T)
    oracles.assert_within(np.asarray(got[0]), *want_dx)
    oracles.assert_within(np.asarray(got[1]), *want_dw)


@on_a_device
@pytest.mark.parametrize("of", ["slice", "storage", "packed weight", "pack_weight"])
def test_a_gradient_that_is_not_defined_says_so(of: str) -> None:
    x, w = jnp.ones((2, 128), F32), jnp.ones((4, 128), F32)
    packed = mxfp8.pack_weight(w)
    storage = mxfp8.quantize_input_slice(x, mxfp8.empty_input(2, 128), column=0)

    def staged_loss(x: jax.Array) -> jax.Array:
        written = mxfp8.quantize_input_slice(x, storage, column=0)
        return mxfp8.mm_quantized(written, packed, dtype=jnp.float32).sum()

    losses: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "slice": (staged_loss, x),
        "storage": (lambda s: mxfp8.mm_quantized(s, packed).sum(), storage),
        "packed weight": (lambda p: mxfp8.mm(x, p).sum(), packed),
        "pack_weight": (lambda w: mxfp8.mm(x, mxfp8.pack_weight(w)).sum(), w),
    }
    loss, at = losses[of]
    with pytest.raises(NotImplementedError, match="mm"):
        jax.grad(loss)(at)


@on_a_device
def test_vmap_maps_every_operation(rng: np.random.Generator) -> None:
    x = gaussian(rng, 3, 5, 128)
    x[1] *= np.float32(2.0**-130)  # one element of the batch takes the slow path
    w = gaussian(rng, 8, 128)
    packed = mxfp8.pack_weight(w)

    def staged_product(x: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
        storage = mxfp8.empty_input(5, 128)
        storage = mxfp8.quantize_input_slice(x, storage, column=0)
        return (
            mxfp8.mm_quantized(storage, packed, dtype=jnp.float32),
            mxfp8.mm_quantized_into(storage, packed, out, tokens=5),
            mxfp8.mm(x, packed),
        )

    outs = jax.jit(jax.vmap(staged_product))(x, np.zeros((3, 6, 8), F32))
    for i in range(3):
        want = oracles.product(oracles.quantized(x[i]), oracles.quantized(w))
        for got in outs:
            oracles.assert_within(np.asarray(got[i])[:5], *want)


@on_a_device
def test_vmap_gives_the_bits_of_each_element(rng: np.random.Generator) -> None:
    x = any_octaves(rng, 12, 256, 20).reshape(3, 4, 256)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 256))
    each = [np.asarray(mm(rows, packed)) for rows in x]
    got = jax.jit(jax.vmap(mxfp8.mm, (0, None)))(x, packed)
    assert_same_bits(np.asarray(got), np.stack(each))


@on_a_device
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_takes_storage_stacked_along_any_axis(
    axis: int, rng: np.random.Generator
) -> None:
    x = gaussian(rng, 3, 5, 128)
    packed = pack(gaussian(rng, 8, 128))

    def store(x: jax.Array) -> mxfp8.StagedInput:
        return mxfp8.quantize_input_slice(x, mxfp8.empty_input(5, 128), column=0)

    stacked = jax.vmap(store, out_axes=axis)(x)
    got = jax.vmap(lambda s: mxfp8.mm_quantized(s, packed), in_axes=axis)(stacked)
    want = [np.asarray(mxfp8.mm_quantized(store(rows), packed)) for rows in x]
    assert_same_bits(np.asarray(got), np.stack(want))


@pytest.mark.parametrize("shape", [(2, 0, 128), (0, 3, 128)], ids=str)
def test_vmap_over_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    packed = pack(np.ones((8, 128), F32))
    got = jax.vmap(lambda x: mxfp8.mm(x, packed))(np.zeros(shape, F32))
    assert got.shape == (*shape[:2], 8)


def test_second_derivatives_are_refused_with_the_reason() -> None:
    w = np.ones((8, 128), F32)

    def slope(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: mxfp8.mm(x, w).sum())(x).sum()

    x = np.ones((2, 128), F32)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.jvp(slope, (x,), (x,))


@on_a_device
@with_sizes("num_tokens", cpu=[4], cuda=[4, 70])
def test_a_scan_stages_and_multiplies_layer_after_layer(
    num_tokens: int, rng: np.random.Generator
) -> None:
    x = gaussian(rng, num_tokens, 256, dtype=BF16)
    weights = [pack(gaussian(rng, 256, 256, dtype=BF16)) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)

    def layer(
        carry: tuple[jax.Array, mxfp8.StagedInput], weight: mxfp8.PackedWeight
    ) -> tuple[tuple[jax.Array, mxfp8.StagedInput], jax.Array]:
        x, storage = carry
        for column in (0, 128):
            part = x[:, column : column + 128]
            storage = mxfp8.quantize_input_slice(part, storage, column=column)
        y = mxfp8.mm_quantized(storage, weight)
        return (y, storage), y

    @jax.jit
    def run(x: jax.Array, stacked: mxfp8.PackedWeight) -> jax.Array:
        storage = mxfp8.empty_input(num_tokens, 256, track=False)
        return lax.scan(layer, (x, storage), stacked)[1]

    want = []
    for weight in weights:
        want.append(np.asarray(mm(want[-1] if want else x, weight)))
    assert_same_bits(np.asarray(run(x, stacked)), np.stack(want))


@on_a_device
def test_many_products_in_one_program_give_the_bits_of_each(
    rng: np.random.Generator,
) -> None:
    # Enough kernels in a row for XLA to make a CUDA graph of them.
    xs = gaussian(rng, 4, 40, 256, dtype=BF16)
    xs[1] = any_octaves(rng, 40, 256, 60)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 256, dtype=BF16))
    bias = gaussian(rng, NUM_OUTPUTS)

    @jax.jit
    def all_at_once(xs: jax.Array, packed: mxfp8.PackedWeight) -> list[jax.Array]:
        return [mxfp8.mm(x, packed, bias=bias) for x in xs]

    each = [np.asarray(mm(x, packed, bias=bias)) for x in xs]
    for _ in range(5):
        for got, want in zip(all_at_once(xs, packed), each, strict=True):
            assert_same_bits(np.asarray(got), want)


def test_the_gradient_of_the_smallest_scale_is_not_lost() -> None:
    """Scale byte 0 is 2^-127, a subnormal that CPUs flush; times 448 it is not one."""
    w = np.full((128, 128), 0x7E, np.uint8).view(E4M3)
    scales = np.zeros((128, 4), np.uint8).view(E8M0)
    packed = mxfp8.pack_weight(jnp.asarray(w), jnp.asarray(scales))
    cotangent = np.full((1, 128), 2.0**100, F32)
    _, pull = jax.vjp(lambda x: mxfp8.mm(x, packed), np.ones((1, 128), F32))
    np.testing.assert_array_equal(pull(cotangent)[0], 128 * 448 * 2.0**-27)
