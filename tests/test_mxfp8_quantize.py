"""Quantised bytes against the format's definition, exactly, on every platform."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from mxfp8_cases import finite_codes, gaussian, stage, staged, storage_of, stored_bytes
from mxfp8_oracles import BF16, DTYPES, F16, F32, Array

from jax_pcie import mxfp8

pytestmark = pytest.mark.usefixtures("device")
with_scale_group = pytest.mark.parametrize("scale_group", [32, 128])


def all_codes(dtype: np.dtype, order: Array) -> Array:
    """Every 16-bit value once, [128, 512]."""
    return order.astype(np.uint16).view(dtype).reshape(128, 512)


def float32_corners(rng: np.random.Generator) -> Array:
    """[128, 512]: every octave, subnormals, ties, the edge of a scale, non-finite."""
    octave = np.repeat(np.arange(64) * 4, 512).reshape(64, 512)
    any_octave = octave + rng.integers(0, 4, (64, 512))
    spread = (octave + rng.integers(-20, 4, (64, 512))).clip(0, 254)
    exponent = np.concatenate([any_octave, spread]).astype(np.uint32)
    fraction = rng.integers(0, 1 << 23, (128, 512), np.uint32)
    ties = rng.random((128, 512)) < 0.3
    fraction = np.where(ties, fraction & 0x780000, fraction)  # 3 bits and a half
    bits = (exponent << 23) | fraction | (rng.integers(0, 2, (128, 512)) << 31)
    x = bits.astype(np.uint32).view(F32)
    x[:, :32] = 0
    edge = np.ldexp(np.float32(448), np.arange(128) - 66)  # exactly what a scale holds
    x[:, 0] = edge
    x[1::2, 0] = np.nextafter(edge[1::2], np.float32(np.inf))
    x[::3, 32:64] = np.where(np.arange(32) % 2, 0.0, -0.0)
    x[5, 64:96] = np.float32(1e-45)
    x[6, 64:96] = [np.nan, np.inf, -np.inf, *np.full(29, 3e-39)]
    x[7, 64:96] = np.nan
    return x


def every_code_beside(dtype: np.dtype, group: int, rng: np.random.Generator) -> Array:
    """Every 16-bit value [rows, 128] in groups that a larger one sets the scale of.

    Values of one octave share a group; its last element is 0 to 20 octaves larger, so
    that each value meets each distance at which E4M3 rounds it.
    """
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[np.argsort(codes & 0x7FFF, kind="stable")]
    codes = np.resize(codes, (-(-len(codes) // (group - 1)), group - 1))
    largest = codes.max(axis=1, initial=0, where=codes < 0x8000)
    with np.errstate(invalid="ignore"):  # NaN
        largest = largest.view(dtype).astype(np.float64)
    highest = float(np.finfo(F16).max) if dtype == F16 else 2.0**127
    groups = []
    for octaves in range(rng.integers(3), 21, 3):
        amax = np.minimum(np.ldexp(np.nan_to_num(largest, posinf=1), octaves), highest)
        amax = amax.astype(dtype).view(np.uint16)
        groups.append(np.concatenate([codes, amax[:, None]], axis=1))
    groups = np.concatenate(groups)
    groups = np.resize(groups, (-(-len(groups) * group // 128) * 128 // group, group))
    return groups.reshape(-1, 128).view(dtype)


def float32_ties(rng: np.random.Generator) -> Array:
    """[247, 512]: under each scale byte, the ties of E4M3 and their neighbours."""
    ties = (oracles.MAGNITUDES[1:] + oracles.MAGNITUDES[:-1]) / 2
    values = np.resize(ties, 16 * 31).reshape(16, 31)
    values = np.append(values, np.full((16, 1), 448.0), axis=1).reshape(-1)
    x = np.ldexp(values, np.arange(247)[:, None] - 127).astype(F32)
    bits = x.view(np.uint32) + rng.integers(-1, 2, x.shape).astype(np.uint32)
    sign = rng.integers(0, 2, x.shape).astype(np.uint32) << 31
    last = np.arange(512) % 32 == 31
    return (np.where(last, x.view(np.uint32), bits) | sign).view(F32)


QUANTIZER_INPUTS: dict[str, Callable[[np.random.Generator], Array]] = {
    "bfloat16 in order": lambda rng: all_codes(BF16, np.arange(1 << 16)),
    "bfloat16 shuffled": lambda rng: all_codes(BF16, rng.permutation(1 << 16)),
    "float16 in order": lambda rng: all_codes(F16, np.arange(1 << 16)),
    "float16 shuffled": lambda rng: all_codes(F16, rng.permutation(1 << 16)),
    "float32": float32_corners,
    "float32 ties": float32_ties,
}


@with_scale_group
@pytest.mark.parametrize("kind", QUANTIZER_INPUTS)
def test_quantised_bytes_are_those_of_the_definition(
    kind: str, scale_group: int, rng: np.random.Generator
) -> None:
    x = QUANTIZER_INPUTS[kind](rng)
    values, scales = stored_bytes(staged(x, scale_group=scale_group))
    want_values, want_scales = oracles.quantize(x, columns=scale_group)
    assert_same_bits(scales, want_scales)
    assert_same_bits(values, want_values)
    assert scales.max() < 255


def test_a_value_that_is_not_finite_stays_in_its_place() -> None:
    x = np.ones((1, 128), F32)
    x[0, [3, 40, 70]] = [np.nan, np.inf, -np.inf]
    values, scales = stored_bytes(staged(x))
    assert np.flatnonzero(values == 0x7F).tolist() == [3, 40, 70]
    decoded = oracles.decode(values, scales)
    assert (np.delete(decoded, [3, 40, 70]) == 1).all()


def test_a_group_of_zeros_has_scale_one_and_keeps_its_signs() -> None:
    x = np.zeros((1, 128), BF16)
    x[0, 1] = -0.0
    values, scales = stored_bytes(staged(x))
    assert (scales == 127).all()
    assert values[0, :3].tolist() == [0, 0x80, 0]


@with_scale_group
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_value_is_rounded_right_beside_a_larger_one(
    dtype: np.dtype, scale_group: int, rng: np.random.Generator
) -> None:
    x = every_code_beside(dtype, scale_group, rng)
    values, scales = stored_bytes(staged(x, scale_group=scale_group))
    want_values, want_scales = oracles.quantize(x, columns=scale_group)
    assert_same_bits(scales, want_scales)
    assert_same_bits(values, want_values)


SLICES = [  # rows, columns, first column: odd multiples of 128
    (1, 128, 128),
    (2, 384, 640),
    (3, 256, 384),
    (4, 128, 896),
    (5, 512, 128),
    (6, 640, 384),
    (7, 896, 128),
    (8, 256, 640),
    (257, 384, 128),
]


@pytest.mark.parametrize(("num_rows", "width", "column"), SLICES)
def test_a_slice_changes_its_own_bytes_only(
    num_rows: int, width: int, column: int, rng: np.random.Generator
) -> None:
    dtype = DTYPES[num_rows % 3]
    values = finite_codes(rng, 260, 1024)
    scales = rng.integers(0, 256, (260, 32), np.uint8)
    x = gaussian(rng, num_rows, width, dtype=dtype)
    storage = stage(x, storage_of(values, scales), column=column)
    got_values, got_scales = stored_bytes(storage)
    want = oracles.quantize(x)
    values[:num_rows, column : column + width] = want[0]
    scales[:num_rows, column // 32 : (column + width) // 32] = want[1]
    assert_same_bits(got_values, values)
    assert_same_bits(got_scales, scales)


@with_scale_group
def test_a_computed_column_writes_there_or_makes_what_it_touches_nan(
    scale_group: int, rng: np.random.Generator
) -> None:
    write = jax.jit(lambda x, s, c: mxfp8.quantize_input_slice(x, s, column=c))
    storage = mxfp8.empty_input(5, 640, scale_group=scale_group, track=False)
    x = gaussian(rng, 5, 256)
    want_values, want_scales = oracles.quantize(x, columns=scale_group)
    for column in (0, 128, 256, 384):
        values, scales = stored_bytes(write(x, storage, jnp.int32(column)))
        assert_same_bits(values[:, column : column + 256], want_values)
        assert_same_bits(scales[:, column // 32 : column // 32 + 8], want_scales)
    full = staged(gaussian(rng, 5, 640), scale_group=scale_group)
    before = stored_bytes(full)[1]
    full = storage_of(*stored_bytes(full), scale_group)
    full = jax.tree.map(jnp.copy, full)
    unknown = mxfp8.StagedInput(full.values, full.scales, scale_group, None)
    for column in (-128, -1, 1, 64, 512, 640, 1 << 20, -(1 << 31), (1 << 31) - 1):
        _, scales = stored_bytes(write(x, unknown, jnp.int32(column)))
        is_nan = scales == 255
        assert is_nan.sum() == 5 * 8, column
        assert_same_bits(scales[~is_nan], before[~is_nan])
