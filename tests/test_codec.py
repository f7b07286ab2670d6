"""The CPU core's scalar codecs, byte for byte against the oracles.

A span here is what a record holds: it starts at a block boundary and may end anywhere.
GPUs and the vectorised paths see the same patterns in `test_all_reduce.py`.
"""

import hypothesis
import hypothesis.extra.numpy
import numpy as np
import oracles
import pytest
from conftest import assert_same_bits, with_dtypes
from hypothesis import strategies as st
from oracles import BF16, F16, F32, Rng

from jax_pcie import Codec, _ffi

CODECS = {"int8": Codec.INT8, "e4m3": Codec.E4M3, "mxfp8": Codec.MXFP8}
with_codecs = pytest.mark.parametrize("codec", CODECS)
with_16_bit_dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def encode(codec: str, x: np.ndarray) -> oracles.Record:
    payload, scales = _ffi.codec_encode(CODECS[codec], x)
    return oracles.Record(payload, scales)


def decode(codec: str, record: oracles.Record, dtype: np.dtype) -> np.ndarray:
    return _ffi.codec_decode(CODECS[codec], record.payload, record.scales, dtype)


def check_both_ways(codec: str, x: np.ndarray) -> None:
    """Encodes `x` and decodes it again, to every dtype, and compares every bit."""
    got = encode(codec, x)
    want = oracles.encode(codec, oracles.widen(x), x.dtype)
    assert_same_bits(got.scales, want.scales, "scales:")
    assert_same_bits(got.payload, want.payload, "payload:")
    values = oracles.decode(codec, want)
    for dtype in oracles.DTYPES:
        narrowed = oracles.narrow(values, dtype, clamp=True)
        assert_same_bits(decode(codec, want, dtype), narrowed, f"decoded to {dtype}:")


@with_codecs
@with_16_bit_dtypes
def test_every_16_bit_pattern_in_order(dtype: np.dtype, codec: str) -> None:
    """Neighbours share their exponent, so scales take every value."""
    check_both_ways(codec, ALL_16_BITS.view(dtype))


@with_codecs
@with_16_bit_dtypes
def test_every_16_bit_pattern_shuffled(dtype: np.dtype, codec: str, rng: Rng) -> None:
    """Blocks span the whole range, so most values are far below their scale."""
    check_both_ways(codec, rng.permutation(ALL_16_BITS).view(dtype))


@with_codecs
@with_16_bit_dtypes
def test_every_16_bit_pattern_alone_in_its_block(dtype: np.dtype, codec: str) -> None:
    blocks = np.zeros((1 << 15, oracles.CODECS[codec].block), dtype)
    blocks[:, 0] = ALL_16_BITS[: 1 << 15].view(dtype)
    check_both_ways(codec, blocks.reshape(-1))


@with_codecs
@with_16_bit_dtypes
def test_every_16_bit_pattern_beside_a_moderate_one(
    dtype: np.dtype, codec: str
) -> None:
    """Each pattern shares a block with one of sixteen times its magnitude."""
    x = oracles.widen(ALL_16_BITS.view(dtype)).reshape(-1, 32)
    with np.errstate(over="ignore"):
        x = np.stack([x, np.roll(x, 1, axis=1) * np.float32(16)], axis=1)
    check_both_ways(codec, oracles.narrow(x.reshape(-1), dtype))


@with_codecs
def test_random_f32_patterns(codec: str, rng: Rng) -> None:
    check_both_ways(codec, rng.integers(0, 1 << 32, 1 << 18, np.uint32).view(F32))


@with_codecs
def test_f32_blocks_of_one_magnitude(codec: str, rng: Rng) -> None:
    """A narrow range around a random exponent in each block: every payload is used."""
    exponent = np.repeat(rng.integers(-149, 128, 1 << 11), 128)
    x = np.ldexp(rng.uniform(-1, 1, exponent.size), exponent).astype(np.float32)
    check_both_ways(codec, x)


@with_codecs
def test_f32_subnormals(codec: str, rng: Rng) -> None:
    sign = rng.integers(0, 2, 1 << 15, np.uint32) << np.uint32(31)
    bits = rng.integers(0, 1 << 23, 1 << 15, np.uint32) >> rng.integers(0, 23, 1 << 15)
    check_both_ways(codec, (bits.astype(np.uint32) | sign).view(F32))


@with_codecs
def test_amax_at_and_beside_every_edge_of_the_scale(codec: str) -> None:
    """Largest payload times each power of two, and its two neighbours in fp32."""
    largest = {"int8": 127.0, "e4m3": 448.0, "mxfp8": 448.0}[codec]
    edge = np.ldexp(largest, np.arange(-157, 120)).astype(np.float32)
    above, below = (
        np.nextafter(edge, np.float32(np.inf)),
        np.nextafter(edge, F32.type(0)),
    )
    amax = np.concatenate([edge, above, below])
    blocks = np.zeros((len(amax), oracles.CODECS[codec].block), np.float32)
    blocks[:, 5] = -amax
    blocks[:, 6] = amax / np.float32(3)
    check_both_ways(codec, blocks.reshape(-1))


@with_codecs
def test_ties_go_to_even(codec: str) -> None:
    """Midpoints of neighbouring payloads under a scale of exactly one."""
    if codec == "int8":
        middle = np.arange(-126.5, 127)
        largest = 127.0
    else:
        steps = oracles.E4M3FN.magnitudes[:-1]
        middle = np.concatenate([steps[1:] + steps[:-1], -(steps[1:] + steps[:-1])]) / 2
        largest = 448.0
    per_block = oracles.CODECS[codec].block - 1
    blocks = oracles.in_blocks(middle.astype(np.float32), per_block)
    blocks = np.pad(blocks, ((0, 0), (1, 0)), constant_values=largest)
    check_both_ways(codec, blocks.reshape(-1))


@with_codecs
@with_dtypes
def test_every_kind_of_block(dtype: np.dtype, codec: str, rng: Rng) -> None:
    for row in oracles.varied_input(4, dtype, rng):
        check_both_ways(codec, row)


@with_codecs
@with_dtypes
@pytest.mark.parametrize("num", [0, 1, 31, 32, 33, 127, 128, 129, 1000])
def test_a_span_may_end_inside_a_block(
    num: int, dtype: np.dtype, codec: str, rng: Rng
) -> None:
    x = oracles.ordinary_input(1, dtype, (num,), rng)[0]
    record = encode(codec, x)
    num_blocks = -(-num // oracles.CODECS[codec].block)
    assert record.payload.shape == (num,)
    assert record.scales.shape == (
        num_blocks * oracles.CODECS[codec].scale_type.itemsize,
    )
    check_both_ways(codec, x)


@with_codecs
@with_dtypes
def test_every_payload_decodes_under_every_kind_of_scale(
    dtype: np.dtype, codec: str
) -> None:
    codes = np.arange(256, dtype=np.uint8)
    if codec == "mxfp8":
        scales = np.arange(256, dtype=np.uint8)
    else:
        powers = np.ldexp(1.0, np.arange(-126, 128))
        scales = np.concatenate([powers, powers * 1.7, [oracles.MAX_F32]])
        scales = scales[scales <= oracles.MAX_F32].astype("<f4")
    blocks_a_scale = 256 // oracles.CODECS[codec].block
    record = oracles.Record(
        np.tile(codes, len(scales)), np.repeat(scales, blocks_a_scale).view(np.uint8)
    )
    want = oracles.narrow(oracles.decode(codec, record), dtype, clamp=True)
    assert_same_bits(decode(codec, record, dtype), want)


@with_codecs
@with_dtypes
def test_a_value_moves_by_no_more_than_the_formats_bound(
    dtype: np.dtype, codec: str, rng: Rng
) -> None:
    x = np.concatenate([make(rng, dtype) for make in oracles.BLOCK_KINDS * 16])
    record = encode(codec, x)
    finite = np.isfinite(oracles.widen(x))
    got = decode(codec, record, F32)[finite].astype(np.float64)
    bound = oracles.rounding_bound(codec, oracles.widen(x), record)
    assert (np.abs(got - oracles.widen(x)[finite]) <= bound[finite]).all()


@with_codecs
@with_dtypes
def test_a_non_finite_value_stays_in_its_place_and_spoils_no_other(
    dtype: np.dtype, codec: str, rng: Rng
) -> None:
    x = oracles.ordinary_input(1, dtype, (4096,), rng)[0]
    at = rng.choice(4096, 300, replace=False)
    special = [np.nan, np.inf, -np.inf]
    x[at] = np.array(special, np.float32)[np.arange(300) % 3].astype(dtype)
    absent = x.copy()
    absent[at] = 0
    got, without = (decode(codec, encode(codec, v), dtype) for v in (x, absent))
    np.testing.assert_array_equal(
        np.isnan(oracles.widen(got)).nonzero()[0], np.sort(at)
    )
    keep = np.delete(np.arange(4096), at)
    assert_same_bits(got[keep], without[keep])


@with_codecs
@with_dtypes
def test_finite_values_come_back_finite_up_to_the_largest(
    dtype: np.dtype, codec: str, rng: Rng
) -> None:
    top = oracles.infinity_bits(dtype) - 1
    near_top = top - (rng.integers(0, 1 << 30, 4096) >> rng.integers(6, 31, 4096))
    x = oracles.from_bits(np.maximum(near_top, 1), dtype)
    assert np.isfinite(oracles.widen(decode(codec, encode(codec, x), dtype))).all()
    check_both_ways(codec, x)


@with_codecs
def test_an_mxfp8_or_e4m3_zero_keeps_its_sign_and_an_int8_zero_has_none(
    codec: str,
) -> None:
    x = np.array([-0.0, 0.0, -0.0, 1.0, -1.0], np.float32)
    got = np.signbit(decode(codec, encode(codec, x), F32))
    assert got.tolist() == [codec != "int8", False, codec != "int8", False, True]


def test_no_mxfp8_element_saturates_and_no_scale_is_larger_than_it_must_be(
    rng: Rng,
) -> None:
    x = np.abs(rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(F32))
    x = np.where(np.isfinite(x), x, np.float32(0))
    scales = encode("mxfp8", x).scales.astype(np.int32)
    amax = x.reshape(-1, 32).max(axis=1).astype(np.float64)
    assert (amax <= np.ldexp(448.0, scales - 127)).all()
    assert ((amax > np.ldexp(448.0, scales - 128)) | (scales == 0)).all()


@with_dtypes
def test_a_raw_record_is_the_bytes_of_the_array(dtype: np.dtype) -> None:
    x = oracles.from_bits(np.arange(1 << 16) * 0x10001, dtype)
    payload, scales = _ffi.codec_encode(Codec.RAW, x)
    assert_same_bits(payload, x.view(np.uint8))
    assert scales.shape == (0,)
    assert_same_bits(_ffi.codec_decode(Codec.RAW, payload, scales, dtype), x)


@with_codecs
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    bits=hypothesis.extra.numpy.arrays(np.uint32, st.integers(0, 300)),
)
def test_any_f32_bits_of_any_length(codec: str, bits: np.ndarray) -> None:
    check_both_ways(codec, bits.view(F32))
