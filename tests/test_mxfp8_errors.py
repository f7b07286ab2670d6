"""What does not fit raises at trace time, before any device is touched."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from mxfp8_cases import E4M3, E8M0
from mxfp8_oracles import F32, Array

from jax_pcie import mxfp8


def storage_of(num_columns: int = 256, scale_group: int = 32) -> mxfp8.StagedInput:
    return mxfp8.quantize_input_slice(
        ones(4, num_columns),
        mxfp8.empty_input(4, num_columns, scale_group=scale_group),
        column=0,
    )


def ones(*shape: int, dtype: DTypeLike = F32) -> Array:
    return np.ones(shape, dtype)


def put(x: Array, column: int | jax.Array = 0) -> Callable[[], Any]:
    return lambda: mxfp8.quantize_input_slice(
        x, mxfp8.empty_input(4, 256), column=column
    )


def multiply(**kwargs: object) -> Callable[[], Any]:
    return lambda: mxfp8.mm_quantized(
        storage_of(), mxfp8.pack_weight(ones(6, 256)), **kwargs
    )


def multiply_into(out: Array, **kwargs: object) -> Callable[[], Any]:
    return lambda: mxfp8.mm_quantized_into(
        storage_of(), mxfp8.pack_weight(ones(6, 256)), out, **kwargs
    )


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: mxfp8.pack_weight(ones(4, 40)), ValueError, "40 columns, not a positive"),
    (lambda: mxfp8.pack_weight(ones(4, 0)), ValueError, "0 columns, not a positive"),
    (lambda: mxfp8.pack_weight(ones(32)), ValueError, r"shape \(32,\)"),
    (lambda: mxfp8.pack_weight(ones(4, 32, dtype=int)), TypeError, "not int64"),
    (lambda: mxfp8.pack_weight(ones(4, 32, dtype=float)), TypeError, "not float64"),
    (
        lambda: mxfp8.pack_weight(ones(4, 32), scale_group=64),
        ValueError,
        "scale_group is 64, and must be 32 or 128",
    ),
    (
        lambda: mxfp8.pack_weight(ones(4, 32), ones(4, 1, dtype=E8M0)),
        TypeError,
        "only with a float8_e4m3fn w, and w is float32",
    ),
    (
        lambda: mxfp8.pack_weight(ones(4, 32, dtype=E4M3)),
        ValueError,
        "needs the scale",
    ),
    (
        lambda: mxfp8.pack_weight(ones(4, 32, dtype=E4M3), ones(4, 1)),
        TypeError,
        "must be float8_e8m0fnu, not float32",
    ),
    (
        lambda: mxfp8.pack_weight(ones(4, 64, dtype=E4M3), ones(4, 1, dtype=E8M0)),
        ValueError,
        r"scale has shape \(4, 1\); a w of shape \(4, 64\) needs \(4, 2\)",
    ),
    (lambda: mxfp8.empty_input(4, 96), ValueError, "96, not a positive multiple"),
    (lambda: mxfp8.empty_input(-1, 128), ValueError, "-1, which is negative"),
    (
        lambda: mxfp8.empty_input(4, 128, scale_group=16),
        ValueError,
        "scale_group is 16",
    ),
    (put(ones(4, 96)), ValueError, "x has 96 columns, not a multiple of 128"),
    (put(ones(5, 128)), ValueError, "x has 5 rows, and the storage holds 4"),
    (put(ones(4, 384)), ValueError, "x has 384 columns, and the storage holds 256"),
    (put(ones(128)), ValueError, r"x has shape \(128,\)"),
    (put(ones(4, 128), 64), ValueError, "column is 64, not a multiple of 128"),
    (put(ones(4, 256), 128), ValueError, "128:384 are outside the storage's 0:256"),
    (put(ones(4, 128), -128), ValueError, "-128:0 are outside"),
    (put(ones(4, 128), jnp.int32(0)), ValueError, "track=False"),
    (put(ones(4, 128), 0.0), TypeError, "column must be an integer, not float"),
    (put(ones(4, 128, dtype=np.int8)), TypeError, "not int8"),
    (
        lambda: mxfp8.quantize_input_slice(ones(4, 128), ones(4, 128), column=0),
        TypeError,
        "takes storage from empty_input, not ndarray",
    ),
    (multiply(tokens=5), ValueError, "tokens is 5, and the storage holds 0 to 4"),
    (multiply(tokens=-1), ValueError, "tokens is -1"),
    (multiply(tokens=2.0), TypeError, "tokens must be an integer, not 2.0"),
    (multiply(bias=ones(5)), ValueError, r"shape \(5,\), and must be \(6,\)"),
    (multiply(bias=ones(6, dtype=np.int32)), TypeError, "bias takes .* not int32"),
    (multiply(dtype=jnp.int8), TypeError, "dtype takes .* not int8"),
    (multiply_into(ones(3, 6)), ValueError, r"\(3, 6\); 4 tokens .* \(4, 6\)"),
    (multiply_into(ones(4, 7)), ValueError, r"out has shape \(4, 7\)"),
    (multiply_into(ones(4, 6, dtype=int)), TypeError, "out takes .* not int64"),
    (
        lambda: mxfp8.mm_quantized(storage_of(), ones(6, 256)),
        TypeError,
        "takes a weight from pack_weight, not ndarray",
    ),
    (
        lambda: mxfp8.mm_quantized(storage_of(), mxfp8.pack_weight(ones(6, 128))),
        ValueError,
        r"the storage has 256 columns, and the weight has 128: it is \[outputs, K\]",
    ),
    (
        lambda: mxfp8.mm_quantized(
            storage_of(scale_group=128), mxfp8.pack_weight(ones(6, 256))
        ),
        ValueError,
        "scale_group is 128, and the weight was packed with 32",
    ),
    (
        lambda: mxfp8.mm(ones(2, 32), mxfp8.pack_weight(ones(6, 32)), scale_group=128),
        ValueError,
        "mm's scale_group is 128, and the weight was packed with 32",
    ),
    (lambda: mxfp8.mm(ones(2, 64), ones(6, 32)), ValueError, "x has 64 columns"),
    (lambda: mxfp8.mm(np.float32(1), ones(6, 32)), ValueError, "x is a scalar"),
    (lambda: mxfp8.mm(ones(2, 32, dtype=int), ones(6, 32)), TypeError, "not int64"),
    (
        lambda: mxfp8.swizzled_scale_offset(0, 0, 96),
        ValueError,
        "num_columns is 96, not a positive multiple of 128",
    ),
    (
        lambda: mxfp8.swizzle_scales(jnp.zeros((1, 3), jnp.uint8)),
        ValueError,
        "3 groups a row, not a multiple of 4",
    ),
    (
        lambda: mxfp8.swizzle_scales(jnp.zeros((1, 4), F32)),
        TypeError,
        "scales must be uint8 or float8_e8m0fnu, not float32",
    ),
    (
        lambda: mxfp8.mm(storage_of(), ones(6, 256)),
        TypeError,
        "mm: x must be an array, not StagedInput",
    ),
    (lambda: mxfp8.mm(None, ones(6, 32)), TypeError, "mm: x must be an array, not No"),
    (
        lambda: mxfp8.pack_weight(mxfp8.pack_weight(ones(6, 32))),
        TypeError,
        "pack_weight: w must be an array, not PackedWeight",
    ),
    (
        lambda: mxfp8.quantize_input_slice(ones(2, 128), storage_of(), column=None),
        TypeError,
        "column must be an array, not NoneType",
    ),
    (
        lambda: mxfp8.empty_input(16.0, 128),
        TypeError,
        "max_tokens must be an integer, not 16.0",
    ),
    (lambda: mxfp8.empty_input(1 << 62, 128), ValueError, "is too large"),
    (
        lambda: mxfp8.empty_input(16, 128, track="no"),
        TypeError,
        "track must be True or False, not 'no'",
    ),
    (
        lambda: mxfp8.empty_input(16, 128, scale_group=32.0),
        ValueError,
        "scale_group is 32.0",
    ),
    (
        lambda: mxfp8.plan("8", 8, 32),
        TypeError,
        "num_tokens must be an integer, not '8'",
    ),
    (
        lambda: mxfp8.plan(8, 8, 32, device="cpu"),
        TypeError,
        "device must be a jax.Device, not 'cpu'",
    ),
    (
        lambda: mxfp8.mm(ones(2, 32), ones(6, 32), dtype="bf16"),
        TypeError,
        "mm's dtype takes bfloat16, float16, float32, not bf16",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), ERRORS, ids=[message for _, _, message in ERRORS]
)
def test_what_does_not_fit_raises_at_trace_time(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(call)
