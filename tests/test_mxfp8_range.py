"""Scales at both ends and far apart, zero groups, NaN: what they reach and what not.

A product of a huge and a tiny element is an ordinary number. Kernels that decode
relative to a row's largest scale have to notice when that is not enough.
"""

from collections.abc import Callable

import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from mxfp8_cases import (
    NAN_CODES,
    NUM_COLUMNS,
    NUM_OUTPUTS,
    finite_codes,
    gaussian,
    mm,
    multiply_bytes,
    pack,
    with_sizes,
)
from mxfp8_oracles import BF16, F32, Array

pytestmark = pytest.mark.usefixtures("device")
NUM_GROUPS = NUM_COLUMNS // 32
with_num_tokens = with_sizes("num_tokens", cpu=[3, 300], cuda=[3, 40, 300])
Bytes = tuple[Array, Array]


def assert_multiplies(x: Bytes, w: Bytes) -> None:
    got = multiply_bytes(x, w)
    oracles.assert_within(got, *oracles.product(oracles.decode(*x), oracles.decode(*w)))


def normal(rng: np.random.Generator, rows: int) -> Bytes:
    return oracles.quantize(gaussian(rng, rows, NUM_COLUMNS))


@with_num_tokens
@pytest.mark.parametrize("octaves", [1, 7, 14, 20, 21, 22, 23, 30, 60, 130, 200])
def test_groups_of_a_row_may_be_far_apart(
    octaves: int, num_tokens: int, rng: np.random.Generator
) -> None:
    low, high = 127 - octaves // 2, 127 + (octaves + 1) // 2

    def rows(num_rows: int, scales: Array) -> Bytes:
        values = finite_codes(rng, num_rows, NUM_COLUMNS)
        return values, np.broadcast_to(scales, (num_rows, NUM_GROUPS)).astype(np.uint8)

    def far_apart(num_rows: int) -> Bytes:
        return rows(num_rows, rng.choice([low, high], (num_rows, NUM_GROUPS)))

    def flat(num_rows: int) -> Bytes:
        return rows(num_rows, rng.integers(126, 129, (num_rows, NUM_GROUPS)))

    assert_multiplies(far_apart(num_tokens), flat(NUM_OUTPUTS))
    assert_multiplies(flat(num_tokens), far_apart(NUM_OUTPUTS))
    # Both, and opposite, so that large and small groups give terms of one size.
    x_scales = rng.permutation(np.resize([low, high], NUM_GROUPS))
    x = rows(num_tokens, x_scales)
    assert_multiplies(x, rows(NUM_OUTPUTS, 254 - x_scales))
    x[1][::2] = 127
    assert_multiplies(x, rows(NUM_OUTPUTS, 254 - x_scales))


@with_num_tokens
def test_every_distance_from_0_to_30_octaves_in_one_product(
    num_tokens: int, rng: np.random.Generator
) -> None:
    def rows(num_rows: int) -> Bytes:
        distance = np.arange(num_rows)[:, None] % 31
        scales = 127 - distance * rng.integers(0, 2, (num_rows, NUM_GROUPS))
        return finite_codes(rng, num_rows, NUM_COLUMNS), scales.astype(np.uint8)

    assert_multiplies(rows(num_tokens), rows(NUM_OUTPUTS))


@with_num_tokens
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("run", [32, 64, 128])
def test_huge_times_tiny_is_one(run: int, dtype: np.dtype, num_tokens: int) -> None:
    octaves = np.resize([100] * run + [-100] * run, NUM_COLUMNS)
    x = np.broadcast_to(np.ldexp(1.0, octaves).astype(dtype), (num_tokens, NUM_COLUMNS))
    w = np.broadcast_to(np.ldexp(1.0, -octaves), (NUM_OUTPUTS, NUM_COLUMNS))
    got = np.asarray(mm(x, pack(w.astype(F32)), dtype=F32))
    np.testing.assert_array_equal(got, np.full((num_tokens, NUM_OUTPUTS), NUM_COLUMNS))


@with_num_tokens
@pytest.mark.parametrize("reverse", [False, True])
def test_scales_at_both_ends_are_powers_of_two(
    reverse: bool, num_tokens: int, rng: np.random.Generator
) -> None:
    # The products are all near 1, whatever the scales on either side.
    ends = np.array([[0, 254, 1, 253, 9, 245, 127, 2], [246, 8, 247, 7, 10, 244, 3, 0]])
    byte = ends[int(reverse)]
    sign = rng.integers(0, 2, (num_tokens, NUM_COLUMNS), np.uint8) << 7
    values = rng.integers(7 * 8 - 16, 7 * 8 + 16, sign.shape, np.uint8) | sign
    x_scales = np.tile(byte, (num_tokens, 1)).astype(np.uint8)
    x_scales[1] = 0
    codes = rng.integers(0, 127, (NUM_OUTPUTS, NUM_COLUMNS), np.uint8)
    w_scales = np.tile(254 - byte, (NUM_OUTPUTS, 1)).astype(np.uint8)
    w_scales[5] = 0
    assert_multiplies((values, x_scales), (codes, w_scales))


@with_num_tokens
@pytest.mark.parametrize("scale", [0, 2, 40, 100, 150, 210, 252])
def test_groups_of_zeros_do_not_count_whatever_their_scale(
    scale: int, num_tokens: int, rng: np.random.Generator
) -> None:
    def rows(num_rows: int, scale: int, zeros: list[int]) -> Bytes:
        values = finite_codes(rng, num_rows, NUM_GROUPS, 32)
        scales = np.full((num_rows, NUM_GROUPS), scale, np.uint8)
        values[:, zeros] &= 0x80
        scales[:, zeros[0]], scales[:, zeros[1]] = 127, 254 - scale
        values[1] &= 0x80  # and a row of nothing else
        return values.reshape(num_rows, NUM_COLUMNS), scales

    x, w = rows(num_tokens, scale, [1, 4]), rows(NUM_OUTPUTS, 254 - scale, [3, 6])
    assert_multiplies(x, w)
    assert (multiply_bytes(x, w)[1] == 0).all()


@with_num_tokens
@pytest.mark.parametrize("code", NAN_CODES)
def test_a_nan_reaches_its_row_and_its_output_only(
    code: int, num_tokens: int, rng: np.random.Generator
) -> None:
    x, w = normal(rng, num_tokens), normal(rng, NUM_OUTPUTS)
    clean = multiply_bytes(x, w)
    x[0][2, 33], w[0][5, 255], w[0][131, 0] = code, code, code
    w[0][:, 32:64] = 0  # NaN times 0
    x[0][:2, :] = 0
    got = multiply_bytes(x, w)
    want = np.zeros(got.shape, bool)
    want[2], want[:, [5, 131]] = True, True
    np.testing.assert_array_equal(np.isnan(got), want)
    assert np.isfinite(clean).all()


@with_num_tokens
@pytest.mark.parametrize("values_too", [False, True])
def test_scale_255_is_nan_for_its_row_and_its_output_only(
    values_too: bool, num_tokens: int, rng: np.random.Generator
) -> None:
    x, w = normal(rng, num_tokens), normal(rng, NUM_OUTPUTS)
    x[1][2, 1], w[1][5, 3], w[1][131, 7] = 255, 255, 255
    if values_too:  # of zeros
        x[0][2, 32:64], w[0][5, 96:128], w[0][131, 224:] = 0, 0, 0
    x[1][0], w[1][7] = 20, 230  # and groups far out of range beside them
    got = multiply_bytes(x, w)
    want = np.zeros(got.shape, bool)
    want[2], want[:, [5, 131]] = True, True
    np.testing.assert_array_equal(np.isnan(got), want)


def spoiled(rng: np.random.Generator, kind: str) -> Bytes:
    """One row that a kernel may have to treat apart."""
    values, scales = finite_codes(rng, NUM_COLUMNS), np.full(NUM_GROUPS, 127, np.uint8)
    if kind == "far apart":
        scales[::2] = 67
    elif kind == "both ends":
        scales[:3] = 0, 254, 1
    elif kind == "scale 255":
        scales[3] = 255
    elif kind == "NaN":
        values[40] = 0x7F
    return values, scales


def uneven(rng: np.random.Generator, rows: int) -> Bytes:
    """Rows with every distance of scales that f16 holds: some groups are subnormal."""
    scales = rng.integers(117, 139, (rows, NUM_GROUPS), np.uint8)
    scales[:, :2] = 117, 138
    return finite_codes(rng, rows, NUM_COLUMNS), scales


@with_sizes(
    "make, num_tokens",
    cpu=[(normal, 300)],
    cuda=[(make, rows) for make in (normal, uneven) for rows in (16, 64, 300)],
)
@pytest.mark.parametrize("kind", ["far apart", "both ends", "scale 255", "NaN"])
def test_one_bad_row_changes_no_bit_of_other_rows_and_outputs(
    make: Callable[[np.random.Generator, int], Bytes],
    kind: str,
    num_tokens: int,
    rng: np.random.Generator,
) -> None:
    x, w = make(rng, num_tokens), make(rng, NUM_OUTPUTS)
    clean = multiply_bytes(x, w)
    for bad_x, bad_w in ((num_tokens - 9, 70), (0, 131)):
        spoiled_x, spoiled_w = ((v.copy(), s.copy()) for v, s in (x, w))
        spoiled_x[0][bad_x], spoiled_x[1][bad_x] = spoiled(rng, kind)
        spoiled_w[0][bad_w], spoiled_w[1][bad_w] = spoiled(rng, kind)
        want = np.delete(clean, bad_x, axis=0)
        got = multiply_bytes(spoiled_x, w)
        assert_same_bits(np.delete(got, bad_x, axis=0), want)
        want = np.delete(clean, bad_w, axis=1)
        got = multiply_bytes(x, spoiled_w)
        assert_same_bits(np.delete(got, bad_w, axis=1), want)


@with_sizes("num_tokens", cpu=[300], cuda=[16, 300])
def test_one_bad_row_does_not_make_sums_of_others_overflow(
    num_tokens: int, rng: np.random.Generator
) -> None:
    x, w = normal(rng, num_tokens), normal(rng, NUM_OUTPUTS)
    # Terms of 2^126, whose sum over half the columns is beyond fp32, and over all is 0.
    x[0][3, : NUM_COLUMNS // 2], x[0][3, NUM_COLUMNS // 2 :] = 0x38, 0xB8
    w[0][7], x[1][3], w[1][7] = 0x38, 190, 190
    clean = multiply_bytes(x, w)
    x[0][9], x[1][9] = spoiled(rng, "far apart")
    got = multiply_bytes(x, w)
    assert_same_bits(np.delete(got, 9, axis=0), np.delete(clean, 9, axis=0))


def test_a_row_does_not_depend_on_other_rows(rng: np.random.Generator) -> None:
    x = gaussian(rng, 16, 256)
    w = gaussian(rng, NUM_OUTPUTS, 256)
    want = np.asarray(mm(x, w))
    others = gaussian(rng, 16, 256)
    others[:4] = [[np.nan], [np.inf], [3e38], [1e-44]]
    others[7] = x[7]
    assert_same_bits(np.asarray(mm(others, w))[7], want[7])


def test_products_beyond_fp32_are_infinite(rng: np.random.Generator) -> None:
    values = rng.integers(0x38, 0x7F, (8, NUM_COLUMNS), np.uint8)  # 1 to 448
    codes = rng.integers(0x38, 0x7F, (NUM_OUTPUTS, NUM_COLUMNS), np.uint8)
    codes[1::2] |= 0x80
    scales = np.array([254, 200, 127, 90, 60, 30, 2, 0], np.uint8)
    x_scales = scales[:, None].repeat(NUM_GROUPS, 1)
    w_scales = np.resize(scales, (NUM_OUTPUTS, 1)).repeat(NUM_GROUPS, 1)
    assert_multiplies((values, x_scales), (codes, w_scales))
