"""Products of normal operands: exact where sums are, else within a derived bound."""

from collections.abc import Callable
from functools import partial

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
    pack,
    staged,
    with_sizes,
)
from mxfp8_oracles import BF16, DTYPES, F16, F32, Array

from jax_pcie import mxfp8

pytestmark = pytest.mark.usefixtures("device")


# Every M with some N and K, so that all tiles and part tiles occur.
EXACT_CASES = [
    (1, 264, 1056),
    (2, 8, 96),
    (3, 132, 256),
    (8, 130, 32),
    (15, 128, 1056),
    (16, 256, 128),
    (17, 1, 256),
    (32, 132, 1056),
    (64, 130, 96),
    (65, 264, 32),
    (99, 8, 128),
    (256, 128, 256),
    (257, 256, 96),
    (300, 132, 1056),
]


def whole_numbers(
    rng: np.random.Generator, rows: int, columns: int, largest: int
) -> Array:
    """float32 integers up to `largest`, every group of 32 doubled 0, 1 or 2 times."""
    doubled = rng.integers(0, 3, (rows, -(-columns // 32))).repeat(32, 1)[:, :columns]
    numbers = rng.integers(-largest, largest + 1, (rows, columns))
    return np.ldexp(numbers.astype(F32), doubled)


@with_sizes(
    "num_tokens, num_outputs, num_columns", cpu=EXACT_CASES[1::2], cuda=EXACT_CASES
)
def test_integers_multiply_exactly(
    num_tokens: int, num_outputs: int, num_columns: int, rng: np.random.Generator
) -> None:
    # 15 has four significant bits, and 60 * 60 * 1056 < 2^24.
    x = whole_numbers(rng, num_tokens, num_columns, 15)
    w = whole_numbers(rng, num_outputs, num_columns, 15)
    bias = rng.integers(-1000, 1000, num_outputs).astype(F32)
    got = np.asarray(mm(x, w, bias=bias))
    np.testing.assert_array_equal(got, x.astype(int) @ w.astype(int).T + bias)


@with_sizes(
    "num_tokens, num_outputs, num_columns", cpu=EXACT_CASES[::8], cuda=EXACT_CASES
)
def test_integers_multiply_exactly_in_groups_of_128(
    num_tokens: int, num_outputs: int, num_columns: int, rng: np.random.Generator
) -> None:
    # Sums over 128 columns stay below 7 * 7 * 128 < 2^13: exact in 14 bits also.
    octaves = np.arange(-(-num_columns // 128)).repeat(128)[:num_columns] % 3
    x = rng.integers(-7, 8, (num_tokens, num_columns)) << octaves
    w = rng.integers(-7, 8, (num_outputs, num_columns))
    got = mm(x.astype(F32), w.astype(F32), scale_group=128)
    np.testing.assert_array_equal(np.asarray(got), x @ w.T)


@pytest.mark.parametrize(
    ("num_columns", "scale_group"), [(32, 32), (160, 32), (96, 128)]
)
def test_any_number_of_groups_multiplies_within_the_bound(
    num_columns: int, scale_group: int, device: jax.Device, rng: np.random.Generator
) -> None:
    x = gaussian(rng, 3, num_columns, dtype=F16)
    w = gaussian(rng, NUM_OUTPUTS, num_columns, dtype=F16)
    got = mm(x, w, scale_group=scale_group, dtype=jnp.float32)

    def padded(values: Array) -> Array:
        rows, columns = values.shape
        return np.pad(values, ((0, -rows % 128), (0, -columns % 128)))

    tile = (128, 128) if scale_group == 128 else (1, 32)
    want_x = oracles.quantized(padded(x), columns=scale_group)[:3]
    want_w = oracles.quantized(padded(w), *tile)[:NUM_OUTPUTS]
    fp8 = scale_group == 128 and device.platform != "cpu"
    oracles.assert_within(np.asarray(got), *oracles.product(want_x, want_w, fp8=fp8))


def reports(
    record: Callable[[str, object], None], got: Array, x: Array, w: Array
) -> None:
    """Notes the error, which the bound leaves much room for, in `--junit-xml`."""
    record(
        "log2 of error / sum|xw|", np.log2(oracles.worst_error(got, x, w) + 2.0**-60)
    )


@with_sizes("num_tokens", cpu=[70], cuda=[5, 70, 300])
@pytest.mark.parametrize("scale_group", [32, 128])
def test_a_product_is_within_the_bound_of_its_accumulator(
    scale_group: int,
    num_tokens: int,
    device: jax.Device,
    rng: np.random.Generator,
    record_property: Callable[[str, object], None],
) -> None:
    x = any_octaves(rng, num_tokens, 1024, 3)
    w = any_octaves(rng, NUM_OUTPUTS, 1024, 3)
    got = np.asarray(mm(x, w, scale_group=scale_group, dtype=F32))
    tile = (128, 128) if scale_group == 128 else (1, 32)
    padded = np.pad(w, ((0, -NUM_OUTPUTS % 128), (0, 0)))
    want_x = oracles.quantized(x, columns=scale_group)
    want_w = oracles.quantized(padded, *tile)[:NUM_OUTPUTS]
    fp8 = scale_group == 128 and device.platform != "cpu"
    oracles.assert_within(got, *oracles.product(want_x, want_w, fp8=fp8))
    reports(record_property, got, want_x, want_w)


def test_4096_tokens_staged_equal_concatenated(rng: np.random.Generator) -> None:
    x = gaussian(rng, 4096, 256, dtype=BF16)
    w = gaussian(rng, 136, 256, dtype=BF16)
    packed = pack(w)
    got = np.asarray(mm(x, packed, dtype=F32))
    want = oracles.product(oracles.quantized(x), oracles.quantized(w))
    oracles.assert_within(got, *want)
    both = mm_quantized(staged(x, [128, 128]), packed, dtype=F32)
    assert_same_bits(np.asarray(both), got)


def test_the_result_is_rounded_once_to_its_dtype(rng: np.random.Generator) -> None:
    storage = staged(gaussian(rng, 16, 256, dtype=BF16))
    packed = pack(gaussian(rng, NUM_OUTPUTS, 256, dtype=BF16))
    bias = gaussian(rng, NUM_OUTPUTS, dtype=BF16)
    multiply = partial(mxfp8.mm_quantized, storage, packed, bias=bias)
    sums = np.asarray(multiply(dtype=jnp.float32))
    for dtype in DTYPES:
        assert_same_bits(np.asarray(multiply(dtype=dtype)), sums.astype(dtype))
    assert multiply().dtype == BF16


def test_mm_returns_the_dtype_and_leading_dimensions_of_x() -> None:
    w = np.ones((4, 32), BF16)
    for leading in ((2, 3), (), (2, 0)):
        got = mxfp8.mm(np.ones((*leading, 32), F16), w)
        assert_same_bits(np.asarray(got), np.full((*leading, 4), 32, F16))


def test_overflow_is_infinite_only_where_rounding_makes_it() -> None:
    half = np.float32(0.5)
    edges = {
        F16: np.array([65504, 65519, 65519.996, 65520, 1e5], F32),
        BF16: np.array([0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF], np.uint32),
        F32: np.array([0x7F7FFFFF, 0x7F7FFFFE], np.uint32),
    }
    for dtype, sums in edges.items():
        bias = sums.view(F32)
        bias = np.concatenate([bias, -bias, half * bias])
        w = np.zeros((len(bias), 128), F32)
        got = np.asarray(mm(np.ones((3, 128), F32), w, bias=bias, dtype=dtype))
        with np.errstate(over="ignore"):
            want = np.broadcast_to(bias.astype(dtype), got.shape)
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_beyond_fp32_are_infinite(dtype: np.dtype) -> None:
    # Products of 2^120: 256 of them are 2^128, 128 are the largest power of two.
    x = np.full((4, 256), 2.0**60, F32)
    x[1] *= -1
    x[2, ::2] = 0
    got = np.asarray(mm(x, np.full((9, 256), 2.0**60, F32), dtype=dtype))
    largest = np.inf if dtype == F16 else 2.0**127
    want = np.array([np.inf, -np.inf, largest, np.inf], F32).astype(dtype)
    assert_same_bits(got, np.broadcast_to(want[:, None], (4, 9)))


@with_sizes("num_tokens", cpu=[300], cuda=[1, 16, 40, 300])
def test_the_same_call_gives_the_same_bits_each_time(
    num_tokens: int, rng: np.random.Generator
) -> None:
    packed = pack(gaussian(rng, NUM_OUTPUTS, 1024, dtype=BF16))
    x = gaussian(rng, num_tokens, 1024, dtype=BF16)
    first = np.asarray(mm(x, packed, dtype=F32))
    for _ in range(4):
        assert_same_bits(np.asarray(mm(x, packed, dtype=F32)), first)
