"""The retained operand: what it knows, what it keeps, and that it stays in place."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from jax import lax
from mxfp8_cases import (
    NUM_OUTPUTS,
    gaussian,
    mm_quantized,
    mm_quantized_into,
    pack,
    stage,
    staged,
    stored_bytes,
)
from mxfp8_oracles import BF16, DTYPES, F32

from jax_pcie import mxfp8

pytestmark = pytest.mark.usefixtures("device")


def test_what_was_never_written_is_nan(rng: np.random.Generator) -> None:
    packed = pack(gaussian(rng, NUM_OUTPUTS, 256))
    storage = mxfp8.empty_input(16, 256, track=False)
    storage = stage(gaussian(rng, 16, 128), storage, column=128)
    assert np.isnan(mm_quantized(storage, packed)).all()
    storage = stage(gaussian(rng, 15, 128), storage, column=0)
    got = np.asarray(mm_quantized(storage, packed)).astype(F32)
    assert np.isnan(got[15]).all()
    assert np.isfinite(got[:15]).all()
    assert np.isnan(mm_quantized(storage.reset(), packed)).all()


def test_missing_columns_are_named_at_trace_time() -> None:
    packed = pack(np.ones((4, 640), F32))

    def multiply(columns: list[int], forget: bool = False) -> jax.Array:
        storage = mxfp8.empty_input(4, 640)
        for column in columns:
            x = np.ones((4, 128), F32)
            storage = mxfp8.quantize_input_slice(x, storage, column=column)
        storage = storage.reset() if forget else storage
        mxfp8.mm_quantized_into(storage, packed, jnp.zeros((4, 4), F32))
        return mxfp8.mm_quantized(storage, packed)

    for columns, forget, named in (
        ([512, 128], False, "0:128, 256:512"),
        ([0, 512, 128, 256, 128], False, "384:512"),
        ([0, 128, 256, 384, 512], True, "0:640"),
    ):
        with pytest.raises(ValueError, match=f"columns {named} were never written"):
            jax.eval_shape(partial(multiply, columns, forget))
    assert jax.eval_shape(partial(multiply, [512, 384, 0, 128, 256])).shape == (4, 4)


def test_storage_knows_what_was_written_through_jit() -> None:
    storage = mxfp8.empty_input(16, 256)
    assert storage.missing == ((0, 256),)
    storage = stage(np.ones((16, 128), F32), storage, column=128)
    assert (storage.written, storage.missing) == (((128, 256),), ((0, 128),))


def test_writing_fewer_rows_leaves_the_rows_below(rng: np.random.Generator) -> None:
    first, second = gaussian(rng, 8, 256), gaussian(rng, 3, 128)
    storage = stage(second, staged(first, max_tokens=10), column=128)
    want = first.copy()
    want[:3, 128:] = second
    values, scales = stored_bytes(storage)
    want_values, want_scales = oracles.quantize(want)
    assert_same_bits(values[:8], want_values)
    assert_same_bits(scales[:8], want_scales)
    assert (scales[8:] == 255).all()


def test_a_scan_carries_storage_and_computes_columns(rng: np.random.Generator) -> None:
    slices = gaussian(rng, 3, 5, 128, dtype=BF16)

    @jax.jit
    def run(storage: mxfp8.StagedInput, slices: jax.Array) -> mxfp8.StagedInput:
        def body(
            storage: mxfp8.StagedInput, step: tuple[jax.Array, jax.Array]
        ) -> tuple[mxfp8.StagedInput, None]:
            x, i = step
            return mxfp8.quantize_input_slice(x, storage, column=128 * i), None

        return lax.scan(body, storage, (slices, jnp.arange(3)))[0]

    got = run(mxfp8.empty_input(5, 384, track=False), slices)
    want = staged(np.concatenate(slices, axis=1), [128] * 3)
    for a, b in zip(stored_bytes(got), stored_bytes(want), strict=True):
        assert_same_bits(a, b)
    assert got.written is None


def test_a_computed_column_that_does_not_fit_gives_nan(
    rng: np.random.Generator,
) -> None:
    full = staged(gaussian(rng, 16, 256))
    full = dataclasses.replace(full, written=None)
    write = jax.jit(lambda x, s, c: mxfp8.quantize_input_slice(x, s, column=c))
    packed = pack(np.ones((NUM_OUTPUTS, 256), F32))
    for column in (-128, 64, 256, 1 << 20):
        got = write(gaussian(rng, 16, 128), full, jnp.int32(column))
        assert np.isnan(mm_quantized(got, packed)).all(), column


def parameter_aliases(hlo: str) -> set[int]:
    config = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo)
    return (
        {int(n) for n in re.findall(r"\((\d+), \{\}", config[1])} if config else set()
    )


def copies_of(shape: str, hlo: str) -> list[str]:
    return [line for line in hlo.splitlines() if f"{shape}{{1,0}} copy(" in line]


def test_a_slice_is_written_in_place(rng: np.random.Generator) -> None:
    x = gaussian(rng, 64, 128, dtype=BF16)
    storage = mxfp8.empty_input(64, 8192)
    compiled = stage.lower(x, storage, column=256).compile()
    assert parameter_aliases(compiled.as_text()) == {1, 2}
    for shape in ("f8e4m3fn[64,8192]", "u8[64,8192]", "u8[64,256]"):
        assert not copies_of(shape, compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 8192 * 33 // 32
    assert memory.temp_size_in_bytes < 64 * 8192 // 2
    buffers = storage.values, storage.scales
    pointers = [buffer.unsafe_buffer_pointer() for buffer in buffers]
    written = stage(x, storage, column=256)
    assert written.values.unsafe_buffer_pointer() == pointers[0]
    assert written.scales.unsafe_buffer_pointer() == pointers[1]
    assert all(buffer.is_deleted() for buffer in buffers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_written_in_place_and_below_it_nothing_changes(
    dtype: np.dtype, rng: np.random.Generator
) -> None:
    storage = staged(gaussian(rng, 8, 128))
    packed = pack(gaussian(rng, NUM_OUTPUTS, 128))
    bias = gaussian(rng, NUM_OUTPUTS)
    code = np.dtype(f"u{dtype.itemsize}")
    before = rng.integers(0, 1 << (8 * dtype.itemsize), (9, NUM_OUTPUTS), code)
    out = jnp.asarray(before.view(dtype))  # any bits, NaN payloads included
    hlo = mm_quantized_into.lower(storage, packed, out, tokens=5, bias=bias).compile()
    assert parameter_aliases(hlo.as_text()) == {4}
    for name in ("bf16", "f16", "f32", "u16", "u32"):
        assert not copies_of(f"{name}[9,{NUM_OUTPUTS}]", hlo.as_text())
    pointer = out.unsafe_buffer_pointer()
    got = mm_quantized_into(storage, packed, out, tokens=5, bias=bias)
    assert got.unsafe_buffer_pointer() == pointer
    want = mxfp8.mm_quantized(storage, packed, tokens=5, bias=bias, dtype=dtype)
    assert_same_bits(np.asarray(got)[:5], np.asarray(want))
    assert_same_bits(np.asarray(got)[5:], before.view(dtype)[5:])


def test_storage_that_was_not_donated_is_intact(rng: np.random.Generator) -> None:
    storage = staged(gaussian(rng, 4, 128))
    before = tuple(map(np.copy, stored_bytes(storage)))
    jax.jit(lambda x, s: mxfp8.quantize_input_slice(x, s, column=0))(
        gaussian(rng, 4, 128), storage
    )
    for a, b in zip(stored_bytes(storage), before, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint32], ids=str)
def test_a_traced_column_is_judged_before_it_is_narrowed(dtype: type) -> None:
    with jax.enable_x64(True):
        storage = mxfp8.empty_input(2, 512, track=False)
        column = jnp.asarray(np.iinfo(dtype).max // 128 * 128, dtype)
        x = np.ones((2, 128), F32)
        written = jax.jit(mxfp8.quantize_input_slice)(x, storage, column=column)
        _, scales = stored_bytes(written)
    if dtype is np.int8:  # 0: the one multiple of 128 that it has
        assert (scales[:, :4] != 255).all()
    else:
        assert (scales == 255).all()
