"""The oracles against ml_dtypes and against numbers worked out by hand.

Nothing here touches `jax_pcie`; a fault found here is a fault of the tests.
"""

import ml_dtypes
import numpy as np
import oracles
import pytest
from oracles import BF16, DTYPES, F16, F32, Rng

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def random_f32(rng: Rng, num: int) -> np.ndarray:
    """Any bit pattern that is not a NaN."""
    x = rng.integers(0, 1 << 32, num, dtype=np.uint32).view(np.float32)
    return x[~np.isnan(x)]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_widening_equals_ml_dtypes_for_every_pattern(dtype: np.dtype) -> None:
    x = ALL_16_BITS.view(dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(oracles.widen(x), x.astype(np.float32))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrowing_equals_ml_dtypes(dtype: np.dtype, rng: Rng) -> None:
    x = random_f32(rng, 1 << 18)
    x = np.concatenate([x, rng.standard_normal(1 << 16).astype(np.float32) * 2.0**-14])
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    np.testing.assert_array_equal(
        oracles.bits(oracles.narrow(x, dtype)), oracles.bits(want)
    )


def test_e4m3_decodes_as_ml_dtypes_for_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracles.E4M3FN.values(codes), want)


def test_e4m3_rounds_as_ml_dtypes_up_to_its_overflow_threshold(rng: Rng) -> None:
    x = np.concatenate([rng.uniform(-464, 464, 1 << 16), rng.normal(0, 0.02, 1 << 16)])
    x = np.concatenate([x, oracles.E4M3FN.magnitudes[:-1]]).astype(np.float32)
    halves = (oracles.E4M3FN.magnitudes[1:] + oracles.E4M3FN.magnitudes[:-1]) / 2
    x = np.concatenate([x, halves.astype(np.float32), -x])
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(oracles.E4M3FN.nearest(x), want)


@pytest.mark.parametrize(
    ("dtype", "nan", "largest"),
    [(BF16, 0x7FFF, 0x7F7F), (F16, 0x7FFF, 0x7BFF), (F32, 0x7FFFFFFF, 0x7F7FFFFF)],
    ids=str,
)
def test_narrowing_spells_nan_one_way_and_clamps_on_request(
    dtype: np.dtype, nan: int, largest: int
) -> None:
    x = f32(np.nan, -np.nan, np.inf, oracles.MAX_F32, -oracles.MAX_F32)
    x[1] = np.uint32(0xFF800001).view(np.float32)
    sign = 1 << (8 * dtype.itemsize - 1)
    infinity = oracles.infinity_bits(dtype)
    clamped = [nan, nan, infinity, largest, largest | sign]
    assert oracles.bits(oracles.narrow(x, dtype, clamp=True)).tolist() == clamped
    if dtype != F32:
        rounded = [nan, nan, infinity, infinity, infinity | sign]
        assert oracles.bits(oracles.narrow(x, dtype)).tolist() == rounded


def test_numpy_keeps_subnormals() -> None:
    smallest = f32(2.0**-149)
    assert oracles.add(smallest, smallest)[0] == 2.0**-148


def record_of(codec: str, *values: float) -> tuple[list[int], list[int]]:
    record = oracles.encode(codec, f32(*values), F32)
    return record.payload.tolist(), record.scales.tolist()


NAN, INF = float("nan"), float("inf")
SCALE_1 = [0x00, 0x00, 0x80, 0x3F]
SCALE_2 = [0x00, 0x00, 0x00, 0x40]
SCALE_FLOOR = [0x00, 0x00, 0x80, 0x00]  # 2^-126


@pytest.mark.parametrize(
    ("codec", "values", "payload", "scales"),
    [
        # INT8: q = rint(v / scale), ties to even, negative ones in two's complement.
        ("int8", (254, 3, 1, 5, -3, -254), [127, 2, 0, 2, 0xFE, 0x81], SCALE_2),
        ("int8", (0, -0.0), [0, 0], SCALE_1),
        ("int8", (2.0**-149, -(2.0**-126)), [0, 0xFF], SCALE_FLOOR),
        ("int8", (127, NAN, INF, -INF, 1), [127, 0x80, 0x80, 0x80, 1], SCALE_1),
        ("int8", (NAN, INF), [0x80, 0x80], SCALE_1),
        # E4M3: 17 lies between 16 (0x58) and 18 (0x59), 19 between 18 and 20 (0x5A).
        ("e4m3", (448, 1, -1, 17, 19), [0x7E, 0x38, 0xB8, 0x58, 0x5A], SCALE_1),
        ("e4m3", (896, 2, -0.0, 0), [0x7E, 0x38, 0x80, 0x00], SCALE_2),
        # The smallest E4M3 is 2^-9; half of it is a tie and becomes zero of its sign.
        ("e4m3", (448, 2.0**-9, -(2.0**-10), 1.5 * 2**-9), [0x7E, 1, 0x80, 2], SCALE_1),
        ("e4m3", (0, -0.0), [0x00, 0x80], SCALE_1),
        ("e4m3", (448, -NAN, INF, -INF), [0x7E, 0x7F, 0x7F, 0x7F], SCALE_1),
        ("e4m3", (2.0**-126, 2.0**-149), [0x38, 0x00], SCALE_FLOOR),
        # MXFP8: 448 fits at 2^0, the next value needs 2^1.
        ("mxfp8", (448, 1), [0x7E, 0x38], [127]),
        ("mxfp8", (448.0001, 1), [0x76, 0x30], [128]),
        # 1 <= 448 * 2^-8 = 1.75, but 448 * 2^-9 = 0.875: 1 becomes 256 * 2^-8.
        ("mxfp8", (1, -0.5), [0x78, 0xF0], [119]),
        ("mxfp8", (0, -0.0), [0x00, 0x80], [127]),
        ("mxfp8", (NAN, -INF), [0x7F, 0x7F], [127]),
        # 2^-127 * 2^-9 is the smallest value of all: 2^-136, i.e. 2^-149 is lost.
        ("mxfp8", (2.0**-136, 2.0**-149), [0x01, 0x00], [0]),
        # 2^128 / 448 is just above 2^119.
        ("mxfp8", (oracles.MAX_F32,), [0x78], [247]),
        ("mxfp8", (1.0,) * 33, [0x78] * 33, [119, 119]),
    ],
)
def test_records_worked_out_by_hand(
    codec: str, values: tuple[float, ...], payload: list[int], scales: list[int]
) -> None:
    assert record_of(codec, *values) == (payload, scales)


def test_values_that_the_dtype_cannot_hold_are_not_finite() -> None:
    over = f32(65520, 65519, 1)  # f16 rounds 65520 to infinity, 65519 to 65504
    record = oracles.encode("int8", over, F16)
    assert record.payload.tolist() == [0x80, 127, 0]
    assert record.scales.view("<f4")[0] == np.float32(65519) / np.float32(127)
    assert oracles.encode("int8", over, F32).payload.tolist() == [127, 127, 0]


@pytest.mark.parametrize(
    ("codec", "payload", "scales", "want"),
    [
        ("int8", [127, 0x81, 0, 0x80], SCALE_2, [254, -254, 0, NAN]),
        ("e4m3", [0x7E, 0x38, 0x80, 0x7F, 0xFF], SCALE_2, [896, 2, -0.0, NAN, NAN]),
        ("mxfp8", [0x7E, 0xB8, 0x01, 0x7F], [128], [896, -2, 2.0**-8, NAN]),
        ("mxfp8", [0x38, 0x01], [0], [2.0**-127, 2.0**-136]),
        ("mxfp8", [0x7E, 0xFE], [254], [oracles.MAX_F32, -oracles.MAX_F32]),
        ("mxfp8", [0x38, 0x00], [255], [NAN, NAN]),
    ],
)
def test_values_worked_out_by_hand(
    codec: str, payload: list[int], scales: list[int], want: list[float]
) -> None:
    record = oracles.Record(np.uint8(payload), np.uint8(scales))
    got = oracles.decode(codec, record)
    np.testing.assert_array_equal(got, f32(*want))
    signs = np.signbit(got)[~np.isnan(got)]
    np.testing.assert_array_equal(signs, np.signbit(f32(*want))[~np.isnan(got)])


@pytest.mark.parametrize("codec", oracles.CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_finite_array_comes_back_finite(
    codec: str, dtype: np.dtype, rng: Rng
) -> None:
    top = oracles.infinity_bits(dtype) - 1
    x = oracles.from_bits(top - rng.integers(0, 1 << 6, 4096), dtype)
    values = oracles.decode(codec, oracles.encode(codec, oracles.widen(x), dtype))
    assert np.isfinite(values).all()
    assert np.isfinite(oracles.widen(oracles.narrow(values, dtype, clamp=True))).all()


@pytest.mark.parametrize("codec", oracles.CODECS)
def test_a_record_is_132_bytes_per_128_values(codec: str) -> None:
    record = oracles.encode(codec, np.ones(1280, np.float32), F32)
    assert len(record.payload) + len(record.scales) == 1320


def test_a_ring_sums_each_shard_with_its_owner_last() -> None:
    """bf16 has 8 significant bits: 256 + 1 rounds to 256, but 1 + 1 + 256 is 258."""
    xs = np.stack([np.full(384, v, np.float32) for v in (256, 1, 1)])
    got = oracles.all_reduce("raw", "ring", oracles.narrow(xs, BF16)).astype(np.float32)
    # Shard 0 is summed in the order 1 2 0, shard 1 in 2 0 1, shard 2 in 0 1 2.
    # Shard 1: 1 + 256 -> 256, + 1 = 257 -> 256.
    np.testing.assert_array_equal(got, np.repeat(f32(258, 256, 256), 128))


def test_a_lossless_a2a_rounds_once() -> None:
    xs = np.stack([np.full(384, v, np.float32) for v in (256, 1, 1)])
    got = oracles.all_reduce("raw", "a2a", oracles.narrow(xs, BF16)).astype(np.float32)
    np.testing.assert_array_equal(got, np.full(384, 258, np.float32))


def test_an_int8_a2a_leaves_the_owners_own_values_alone() -> None:
    """Two shards of one block; scale 1 throughout, so 0.375 survives only unencoded."""
    xs = np.zeros((2, 256), np.float32)
    xs[0, 0::128], xs[1, 1::128] = 127, 127
    xs[:, 2::128] = [[0.375], [0.375]]
    got = oracles.all_reduce("int8", "a2a", xs)
    # Shard 0 is 0 + 0.375 at its owner, below half a step: lost in the last encode.
    np.testing.assert_array_equal(got[:3], f32(127, 127, 0))
    xs[:, 2::128] = [[0.625], [0.375]]
    # Shard 0 at rank 0: 0.625 + rint(0.375) -> 1; shard 1: rint(0.625) + 0.375 -> 1.
    np.testing.assert_array_equal(
        oracles.all_reduce("int8", "a2a", xs)[[2, 130]], [1, 1]
    )
    xs[:, 2::128] = [[0.75], [0.75]]  # 0.75 + 1 = 1.75 -> 2 either way, not 1.5 -> 2
    np.testing.assert_array_equal(
        oracles.all_reduce("int8", "a2a", xs)[[2, 130]], [2, 2]
    )


def test_an_int8_ring_rounds_at_each_hop_and_ag_only_at_the_end() -> None:
    """Three ranks each add 0.375 next to a 127 of the first: INT8 steps are whole."""
    xs = np.zeros((3, 384), np.float32)
    xs[:, 1] = 0.375
    xs[1, 0] = 127  # shard 0 starts at rank 1
    # Ring: rint(0.375) = 0 three times. AG: 1.125 -> 1.
    np.testing.assert_array_equal(oracles.all_reduce("int8", "ring", xs)[:2], [127, 0])
    np.testing.assert_array_equal(oracles.all_reduce("int8", "ag", xs)[:2], [127, 1])


def test_a_sum_that_does_not_fit_is_nan_when_compressed_and_inf_when_not() -> None:
    xs = np.full((2, 128), 60000, np.float16)
    assert np.isposinf(oracles.all_reduce("raw", "ring", xs)).all()
    for topology in oracles.TOPOLOGIES:
        got = oracles.all_reduce("e4m3", topology, xs)
        assert set(oracles.bits(got).tolist()) == {0x7FFF}


def test_an_overflow_on_the_way_is_nan_in_a_ring_though_the_sum_would_fit() -> None:
    xs = np.array([[-60000], [60000], [60000]], np.float16)  # summed 1, 2, 0
    assert np.isnan(oracles.all_reduce("int8", "ring", xs)).all()
    assert np.isfinite(oracles.all_reduce("int8", "a2a", xs)).all()


@pytest.mark.parametrize("num", [0, 1, 127, 128, 129, 385])
@pytest.mark.parametrize("topology", oracles.TOPOLOGIES)
def test_every_size_is_covered_by_the_shards(topology: str, num: int, rng: Rng) -> None:
    xs = np.stack([oracles.exact_input("int8", num, rng)] * 3)
    np.testing.assert_array_equal(oracles.all_reduce("int8", topology, xs), 3 * xs[0])


MODES = [("raw", "ring"), ("raw", "a2a")]
MODES += [
    (codec, topology) for codec in oracles.CODECS for topology in oracles.TOPOLOGIES
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("codec", "topology"), MODES)
def test_sums_stay_within_the_bound(
    codec: str, topology: str, world: int, dtype: np.dtype, rng: Rng
) -> None:
    xs = oracles.ordinary_input(world, dtype, (1000,), rng)
    got = oracles.widen(oracles.all_reduce(codec, topology, xs)).astype(np.float64)
    want = oracles.widen(xs).astype(np.float64).sum(axis=0)
    assert (np.abs(got - want) <= oracles.sum_bound(codec, topology, xs)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", oracles.CODECS)
def test_one_rounding_stays_within_the_formats_bound(
    codec: str, dtype: np.dtype, rng: Rng
) -> None:
    x = np.concatenate([make(rng, dtype) for make in oracles.BLOCK_KINDS * 8])
    values = oracles.widen(x)
    record = oracles.encode(codec, values, dtype)
    finite = np.isfinite(values)
    error = oracles.decode(codec, record)[finite].astype(np.float64) - values[finite]
    bound = oracles.rounding_bound(codec, values, record)[finite]
    assert (np.abs(error) <= bound).all()


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("codec", "topology"), MODES)
def test_exact_inputs_are_exact(
    codec: str, topology: str, world: int, rng: Rng
) -> None:
    x = oracles.exact_input(codec, 1000, rng)
    got = oracles.all_reduce(codec, topology, np.stack([x] * world))
    np.testing.assert_array_equal(got, world * x)
