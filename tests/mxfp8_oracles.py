"""What MXFP8 and the staged linear say, in NumPy: float64, from the definitions.

Owns the expected bytes of a quantised matrix, the expected products and how far fp32
may be from them; knows nothing of `jax_pcie`. Quantisation is exact. A product comes
with a bound from the number of its terms, never with a tolerance.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
DTYPES = (BF16, F16, F32)
PRECISION = {BF16: 8, F16: 11, F32: 24}  # significant bits
MAX_EXPONENT = {BF16: 128, F16: 16, F32: 128}  # all finite values are below 2^this
SMALLEST_NORMAL = 2.0**-126

_NAN = 0x7F
_SIGN = 0x80
_LARGEST = 448.0


def _e4m3_magnitudes() -> Array:
    """float64 [127]: the finite magnitudes in the order of their codes."""
    magnitudes = []
    for code in range(_NAN):
        exponent, fraction = divmod(code, 8)
        if exponent == 0:
            magnitudes.append(fraction / 8 * 2.0**-6)
        else:
            magnitudes.append((1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.array(magnitudes)


MAGNITUDES = _e4m3_magnitudes()


def nearest_code(values: Array) -> Array:
    """E4M3 codes of finite float64 `values`: saturating, ties to the even code."""
    magnitude = np.minimum(np.abs(values), _LARGEST)
    above = np.searchsorted(MAGNITUDES, magnitude).clip(1, len(MAGNITUDES) - 1)
    below = above - 1
    to_above = MAGNITUDES[above] - magnitude
    to_below = magnitude - MAGNITUDES[below]
    even = np.where(above % 2 == 0, above, below)
    code = np.where(to_above < to_below, above, below)
    code = np.where(to_above == to_below, even, code)
    return (code | np.where(np.signbit(values), _SIGN, 0)).astype(np.uint8)


def scale_byte(amax: Array) -> Array:
    """The smallest b in 0..254 with amax <= 448 * 2^(b - 127); 127 for 0."""
    largest = np.ldexp(_LARGEST, np.arange(255) - 127)
    return np.where(amax == 0, 127, np.searchsorted(largest, amax))


def quantize(x: Array, rows: int = 1, columns: int = 32) -> tuple[Array, Array]:
    """E4M3 bytes [M, K] and E8M0 bytes [M, K / 32], a scale per `rows` x `columns`."""
    with np.errstate(invalid="ignore"):  # NaN
        values = x.astype(np.float64)
    tiles = values.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    finite = np.isfinite(tiles)
    kept = np.where(finite, tiles, 0)
    byte = scale_byte(np.abs(kept).max(axis=(1, 3), keepdims=True))
    code = nearest_code(np.ldexp(kept, 127 - byte))
    codes = np.where(finite, code, _NAN).astype(np.uint8).reshape(x.shape)
    scales = byte.astype(np.uint8)[:, 0, :, 0]
    return codes, scales.repeat(rows, axis=0).repeat(columns // 32, axis=1)


def decode(codes: Array, scales: Array) -> Array:
    """float64 [M, K]; scale 255 is NaN, 0 is 2^-127."""
    table = np.append(MAGNITUDES, np.nan)
    magnitude = table[codes & _NAN]
    payload = np.where(codes & _SIGN, -magnitude, magnitude)
    scale = np.ldexp(1.0, scales.astype(np.int32) - 127)
    scale = np.where(scales == 255, np.nan, scale)
    return payload * np.repeat(scale, 32, axis=1)


def quantized(x: Array, rows: int = 1, columns: int = 32) -> Array:
    """`x` after a round trip, float64."""
    return decode(*quantize(x, rows, columns))


def _truncations(columns: int) -> int:
    """Units of a sum's absolute value that tensor cores may lose over `columns`.

    An instruction adds 16 exact products and the accumulator: it aligns these 17 to the
    largest, cuts each off there, and cuts off their sum once more, so that it loses at
    most 18 units of the largest number that it meets. (No guard bits are assumed: there
    are none on V100, Fasi et al. 2021, and two on later devices.) Instructions of 32
    columns lose 34, which is less. Adding one by one and to nearest, as a CPU does,
    loses half a unit a column.
    """
    return 18 * -(-columns // 16)


def product(
    x: Array, w: Array, bias: Array | None = None, *, fp8: bool = False
) -> tuple[Array, Array]:
    """``x @ w.T + bias`` of float64 operands, and how far an fp32 result may be off.

    The bound holds for any order of the columns. Every step, as counted by
    `_truncations`, is off by 2^-23 of sum |x w|, as are one addition for each group of
    32 (loops and warps add their parts) and one of the bias, or by 2^-126 if a result
    is subnormal and flushed; Higham 2002, section 3.1.

    With `fp8` the tensor cores multiply E4M3 and their accumulator is narrower. Its
    format is not published. 14 significant bits are assumed, as seen from outside on
    Hopper (DeepSeek-V3, 2024, section 3.5.2), for 128 columns at a time, after which a
    sum is added in fp32; so 2^-13 takes the place of 2^-23 in the steps.
    """
    terms = x.shape[1] + x.shape[1] // 32 + 1
    if fp8:
        blocks = -(-x.shape[1] // 128)
        unit = _truncations(128) * 2.0**-13 + (2 * blocks + 1) * 2.0**-23
    else:
        steps = _truncations(x.shape[1]) + x.shape[1] // 32 + 1
        unit = steps * 2.0**-23
    with np.errstate(invalid="ignore"):  # NaN
        total, absolute = x @ w.T, np.abs(x) @ np.abs(w).T
    if bias is not None:
        total, absolute = total + bias, absolute + np.abs(bias)
    float64_error = 2.0**-20 * unit  # of the oracle itself: K * 2^-53
    gamma = unit / (1 - unit) + float64_error
    return total, gamma * absolute + 2 * terms * SMALLEST_NORMAL


def assert_within(got: Array, want: Array, bound: Array) -> None:
    """`got` is within `bound`, and half a unit of its own dtype, of `want`.

    It is infinite where all numbers that near round to infinity, and may be where one
    does.
    """
    half_unit = 2.0 ** -PRECISION[got.dtype]
    infinite_from = 2.0 ** MAX_EXPONENT[got.dtype] * (1 - half_unit / 2)
    with np.errstate(invalid="ignore"):  # NaN
        got = got.astype(np.float64)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    allowed = bound + half_unit * (np.abs(want) + bound)
    is_off = np.abs(got - want) > allowed
    must_be_infinite = np.abs(want) - bound >= infinite_from
    may_be_infinite = np.abs(want) + bound >= infinite_from
    infinity_is_wrong = ~may_be_infinite | (np.sign(got) != np.sign(want))
    wrong = np.where(np.isinf(got), infinity_is_wrong, is_off | must_be_infinite)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} outside, first at "
        f"{tuple(np.argwhere(wrong)[0])}, worst by a factor of "
        f"{np.nanmax(np.abs(got - want) / allowed)}"
    )


def worst_error(got: Array, x: Array, w: Array) -> float:
    """The largest error of `got` over its sum |x w|, for reports."""
    return float(np.max(np.abs(got - x @ w.T) / (np.abs(x) @ np.abs(w).T)))
