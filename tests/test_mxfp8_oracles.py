"""The oracle's bounds against tensor cores simulated at their worst."""

import mxfp8_oracles as oracles
import numpy as np
import pytest
from mxfp8_oracles import BF16, F16, F32, Array


def truncated(values: Array, unit: Array) -> Array:
    return np.trunc(values / unit) * unit


def simulated(x: Array, w: Array, *, columns: int, bits: int, block: int) -> Array:
    """``x @ w.T`` with `bits` bits and no guard bits, `columns` an instruction.

    Sums over `block` columns start from zero and are then added to nearest.
    """
    total = np.zeros((len(x), len(w)))
    for start in range(0, x.shape[1], block):
        sums = np.zeros_like(total)
        for k in range(start, min(start + block, x.shape[1]), columns):
            part = slice(k, k + columns)
            terms = x[:, None, part] * w[None, :, part]
            terms = np.append(terms, sums[..., None], axis=2)
            exponent = np.frexp(np.abs(terms).max(axis=2))[1]
            unit = np.ldexp(1.0, exponent - bits)[..., None]
            sums = truncated(terms, unit).sum(axis=2)
            sums = truncated(sums, np.ldexp(1.0, np.frexp(sums)[1] - bits))
        total = (total + sums).astype(F32).astype(np.float64)
    return total


@pytest.mark.parametrize("same_sign", [False, True])
def test_the_bounds_hold_for_simulated_tensor_cores(
    same_sign: bool, rng: np.random.Generator
) -> None:
    x, w = (rng.standard_normal((8, 1024)) for _ in range(2))
    if same_sign:
        x, w = np.abs(x), np.abs(w)
    x, w = oracles.quantized(x), oracles.quantized(w)
    fp32 = simulated(x, w, columns=16, bits=24, block=1024).astype(F32)
    oracles.assert_within(fp32, *oracles.product(x, w))
    fp8 = simulated(x, w, columns=32, bits=14, block=128).astype(F32)
    oracles.assert_within(fp8, *oracles.product(x, w, fp8=True))
    if same_sign:  # and are not so wide that 3 % or the narrow sums pass
        for got, is_fp8 in ((fp8 * F32.type(1.03), True), (fp8, False)):
            with pytest.raises(AssertionError, match="outside"):
                oracles.assert_within(got, *oracles.product(x, w, fp8=is_fp8))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_infinity_is_accepted_only_where_rounding_gives_it(dtype: np.dtype) -> None:
    largest = 2.0 ** oracles.MAX_EXPONENT[dtype] * (
        1 - 2.0 ** -oracles.PRECISION[dtype]
    )
    edge = (largest + 2.0 ** oracles.MAX_EXPONENT[dtype]) / 2
    infinity = np.array([np.inf], F32).astype(dtype)
    finite = np.array([largest]).astype(dtype)
    for got, want in (
        (infinity, edge),
        (finite, np.nextafter(edge, 0)),
        (finite, largest),
    ):
        oracles.assert_within(got, np.array([want]), np.zeros(1))
    for got, want in (
        (infinity, np.nextafter(edge, 0)),
        (finite, edge),
        (-infinity, edge),
    ):
        with pytest.raises(AssertionError, match="outside"):
            oracles.assert_within(got, np.array([want]), np.zeros(1))
    for got in (infinity, finite):
        oracles.assert_within(got, np.array([edge]), np.array([edge / 1024]))
