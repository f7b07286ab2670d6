"""Operands that arrive in slices: the product is that of their concatenation."""

import jax
import jax.numpy as jnp
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from mxfp8_cases import (
    NUM_OUTPUTS,
    any_octaves,
    gaussian,
    mm,
    mm_quantized,
    mm_quantized_into,
    pack,
    stage,
    staged,
    storage_of,
    stored_bytes,
    with_sizes,
)
from mxfp8_oracles import BF16, F32

from jax_pcie import mxfp8

pytestmark = pytest.mark.usefixtures("device")


SLICES = [[640], [128] * 5, [128, 384, 128]]
ALL_SIZES = [1, 2, 3, 8, 15, 16, 17, 32, 64, 65, 99, 257]


@with_sizes("num_tokens", cpu=[1, 3, 15, 17, 99, 257], cuda=ALL_SIZES)
def test_staged_equals_concatenated_bit_for_bit(
    num_tokens: int, rng: np.random.Generator
) -> None:
    x = gaussian(rng, 257, 640, dtype=BF16)
    w = gaussian(rng, NUM_OUTPUTS, 640, dtype=BF16)
    bias = gaussian(rng, NUM_OUTPUTS)
    packed = pack(w)
    whole = mm(x[:num_tokens], packed, bias=bias, dtype=F32)
    for widths in SLICES:
        storage = staged(x, widths)
        got = mm_quantized(storage, packed, tokens=num_tokens, bias=bias, dtype=F32)
        assert_same_bits(np.asarray(got), np.asarray(whole), widths)
    want = oracles.product(
        oracles.quantized(x[:num_tokens]), oracles.quantized(w), bias
    )
    oracles.assert_within(np.asarray(whole), *want)


def test_one_program_that_stages_and_multiplies_gives_the_same_bits(
    rng: np.random.Generator,
) -> None:
    x = gaussian(rng, 17, 384, dtype=BF16)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 384, dtype=BF16))

    @jax.jit
    def both(x: jax.Array, packed: mxfp8.PackedWeight) -> tuple[jax.Array, jax.Array]:
        storage = mxfp8.empty_input(17, 384)
        for column in (0, 128, 256):
            part = x[:, column : column + 128]
            storage = mxfp8.quantize_input_slice(part, storage, column=column)
        return mxfp8.mm_quantized(storage, packed), mxfp8.mm(x, packed)

    once, whole = both(x, packed)
    assert_same_bits(np.asarray(once), np.asarray(whole))
    assert_same_bits(np.asarray(once), np.asarray(mm(x, packed)))


def test_groups_of_128_staged_equal_concatenated(rng: np.random.Generator) -> None:
    x = gaussian(rng, 17, 384, dtype=BF16)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 384), scale_group=128)
    storage = staged(x, [128, 256], scale_group=128)
    scales = stored_bytes(storage)[1].reshape(17, 3, 4)
    assert (scales == scales[:, :, :1]).all()
    assert_same_bits(
        np.asarray(mm_quantized(storage, packed)),
        np.asarray(mm(x, packed, scale_group=128)),
    )


@with_sizes("num_tokens", cpu=[40], cuda=[3, 40, 300])
@pytest.mark.parametrize("octaves", [15, 60, 100])
def test_staged_equals_concatenated_also_where_scales_are_far_apart(
    octaves: int, num_tokens: int, rng: np.random.Generator
) -> None:
    x = any_octaves(rng, num_tokens, 512, octaves)
    x[::2] = gaussian(rng, len(x[::2]), 512)  # rows in and out of range side by side
    w = any_octaves(rng, NUM_OUTPUTS, 512, 3)
    packed = pack(w)
    whole = np.asarray(mm(x, packed, dtype=F32))
    storage = staged(x, [128, 256, 128])
    assert_same_bits(np.asarray(mm_quantized(storage, packed, dtype=F32)), whole)
    want = oracles.product(oracles.quantized(x), oracles.quantized(w))
    oracles.assert_within(whole, *want)


@with_sizes(
    "tokens, capacity, scale_group",
    cpu=[(14, 16, 32), (33, 70, 128)],
    cuda=[
        (tokens, capacity, scale_group)
        for tokens, capacity in ((14, 16), (33, 70), (257, 300))
        for scale_group in (32, 128)
    ],
)
def test_what_lies_beyond_tokens_never_reaches_the_result(
    tokens: int, capacity: int, scale_group: int, rng: np.random.Generator
) -> None:
    x = gaussian(rng, capacity, 256)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 256), scale_group=scale_group)
    storage = staged(x, scale_group=scale_group)
    values, scales = map(np.copy, stored_bytes(storage))
    clean = np.asarray(mm_quantized(storage, packed, tokens=tokens))
    before = np.resize(np.arange(1 << 16, dtype=np.uint16), (capacity, NUM_OUTPUTS))
    want = np.concatenate([clean, before.view(BF16)[tokens:]])
    assert np.isfinite(clean).all()
    for nan, scale in ((0x7F, 255), (0xFF, 0), (0x7E, 255), (0x7E, 254)):
        values[tokens:], scales[tokens:] = nan, scale
        poisoned = storage_of(values, scales, scale_group)
        assert_same_bits(
            np.asarray(mm_quantized(poisoned, packed, tokens=tokens)), clean
        )
        out = jnp.asarray(before.view(BF16))
        got = mm_quantized_into(poisoned, packed, out, tokens=tokens)
        assert_same_bits(np.asarray(got), want)


def test_no_tokens_give_an_empty_result(rng: np.random.Generator) -> None:
    storage = mxfp8.empty_input(8, 128)
    storage = stage(np.zeros((0, 128), BF16), storage, column=0)
    packed = pack(gaussian(rng, NUM_OUTPUTS, 128))
    got = mm_quantized(storage, packed, tokens=0, bias=np.ones(NUM_OUTPUTS, F32))
    assert (got.shape, got.dtype) == ((0, NUM_OUTPUTS), BF16)
    out = np.full((3, NUM_OUTPUTS), 7, F32)
    assert_same_bits(
        np.asarray(mm_quantized_into(storage, packed, jnp.asarray(out), tokens=0)), out
    )
    nothing = mxfp8.quantize_input_slice(
        np.zeros((0, 128), BF16), mxfp8.empty_input(0, 128), column=0
    )
    assert mxfp8.mm_quantized(nothing, packed).shape == (0, NUM_OUTPUTS)
