"""Packed weights: padding, moving to 128 x 128 scales, Blackwell's layout."""

import jax.numpy as jnp
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from mxfp8_cases import E4M3, E8M0, gaussian, pack, stored_bytes
from mxfp8_oracles import BF16

from jax_pcie import mxfp8

pytestmark = pytest.mark.usefixtures("device")
with_scale_group = pytest.mark.parametrize("scale_group", [32, 128])


@pytest.mark.parametrize("shape", [(132, 64), (128, 128), (5, 160)])
@with_scale_group
def test_a_packed_weight_is_padded_to_128_with_zeros_of_scale_one(
    shape: tuple[int, int], scale_group: int, rng: np.random.Generator
) -> None:
    w = gaussian(rng, *shape, dtype=BF16)
    packed = pack(w, scale_group=scale_group)
    values, scales = stored_bytes(packed)
    whole = np.zeros((-shape[0] % 128 + shape[0], -shape[1] % 128 + shape[1]), BF16)
    whole[: shape[0], : shape[1]] = w
    tile = (128, 128) if scale_group == 128 else (1, 32)
    want_values, want_scales = oracles.quantize(whole, *tile)
    want_scales[shape[0] :], want_scales[:, shape[1] // 32 :] = 127, 127
    assert_same_bits(values, want_values)
    assert_same_bits(scales, want_scales)
    assert (packed.shape, packed.realign_error) == (shape, None)


def test_a_quantised_weight_is_packed_as_it_is(rng: np.random.Generator) -> None:
    values = rng.integers(0, 256, (132, 64), np.uint8)
    scales = rng.integers(0, 256, (132, 2), np.uint8)
    packed = pack(values.view(E4M3), scales.view(E8M0))
    got_values, got_scales = stored_bytes(packed)
    assert_same_bits(got_values[:132, :64], values)
    assert_same_bits(got_scales[:132, :2], scales)


@pytest.mark.parametrize("octaves", [3, 9])
def test_moving_a_weight_to_128_reports_what_it_lost(
    octaves: int, rng: np.random.Generator
) -> None:
    # One bit of fraction: a shift of 3 octaves loses nothing above 2^-7.
    code = rng.integers(0, 15, (132, 160)) * 8 + rng.integers(0, 2, (132, 160)) * 4
    values = np.where(code < 4 * 8, 0, code).astype(np.uint8)
    scales = rng.integers(100, 100 + octaves, (132, 5), np.uint8)
    values[0, :32], scales[0, 0] = 0, 250  # nothing to hold: must not raise the scale
    values[3, 40], scales[7, 1] = 0x7F, 255
    packed = pack(values.view(E4M3), scales.view(E8M0), scale_group=128)
    got_values, got_scales = stored_bytes(packed)
    assert (got_scales[:128, :4] == got_scales[0, 0]).all()
    assert got_scales[0, 0] == 99 + octaves
    old = oracles.decode(values, scales)
    new = oracles.decode(got_values, got_scales)[:132, :160]
    np.testing.assert_array_equal(np.isnan(new), np.isnan(old))
    assert packed.realign_error == np.nanmax(np.abs(new - old))
    assert (packed.realign_error == 0) == (octaves < 9)


def test_swizzled_scales_lie_where_the_hardware_looks() -> None:
    assert mxfp8.swizzled_scale_offset(5, 2, 7168) == 82
    assert mxfp8.swizzled_scale_offset(5, 5, 7168) == 593
    scales = np.arange(132 * 8).reshape(132, 8).astype(np.uint8)
    got = np.asarray(mxfp8.swizzle_scales(jnp.asarray(scales)))
    row, group = np.indices((256, 8))
    offset = mxfp8.swizzled_scale_offset(row, group, 256)
    assert sorted(offset.ravel()) == list(range(256 * 8))
    assert_same_bits(got[offset[:132]], scales)
    assert (got[offset[132:]] == 127).all()


def test_what_aligning_the_smallest_scale_loses_is_told() -> None:
    w = np.full((128, 128), 0x7E, np.uint8).view(E4M3)
    scales = np.zeros((128, 4), np.uint8)
    scales[0] = 100  # the scale of the whole tile, with which the others become 0
    packed = mxfp8.pack_weight(
        jnp.asarray(w), jnp.asarray(scales.view(E8M0)), scale_group=128
    )
    assert packed.realign_error == np.float32(448 * 2.0**-127)
