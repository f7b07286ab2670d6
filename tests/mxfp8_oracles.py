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


def product(x: Array, w: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """``x @ w.T + bias`` of float64 operands, and how far an fp32 result may be off.

    K products and K - 1 additions in any order, and one addition per group of 32 and
    one of the bias, are each off by 2^-24 of their result, or by 2^-126 if it is
    subnormal and flushed; Higham 2002, section 3.1.
    """
    terms = x.shape[1] + x.shape[1] // 32 + 1
    unit = terms * 2.0**-24
    total, absolute = x @ w.T, np.abs(x) @ np.abs(w).T
    if bias is not None:
        total, absolute = total + bias, absolute + np.abs(bias)
    float64_error = 2.0**-20 * unit  # of the oracle itself: K * 2^-53
    gamma = unit / (1 - unit) + float64_error
    return total, gamma * absolute + 2 * terms * SMALLEST_NORMAL


def assert_within(got: Array, want: Array, bound: Array) -> None:
    """`got` is within `bound`, and half a unit of its own dtype, of `want`."""
    half_unit = 2.0 ** -PRECISION[got.dtype]
    with np.errstate(invalid="ignore"):  # NaN
        got = got.astype(np.float64)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    allowed = bound + half_unit * (np.abs(want) + bound)
    wrong = np.abs(got - want) > allowed
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} outside, worst by a factor of "
        f"{np.nanmax(np.abs(got - want) / allowed)}"
    )
