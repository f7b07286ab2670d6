"""The staged MXFP8 linear against its definition in `mxfp8_oracles`.

Quantised bytes are compared exactly, products within a bound that follows from K, and
staged with concatenated bit for bit. Runs on whatever device JAX has by default.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import mxfp8_oracles as oracles
import numpy as np
import pytest
from conftest import assert_same_bits
from jax import P, lax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from mxfp8_oracles import BF16, DTYPES, F16, F32, Array

from jax_pcie import mxfp8

NUM_OUTPUTS = 132
NUM_TOKENS = [1, 2, 3, 8, 15, 16, 17, 32, 99, 257]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

SLICES = [[640], [128] * 5, [128, 384, 128]]

with_scale_group = pytest.mark.parametrize("scale_group", [32, 128])

stage = jax.jit(
    mxfp8.quantize_input_slice, static_argnames="column", donate_argnames="storage"
)
mm = jax.jit(mxfp8.mm, static_argnames=("scale_group", "dtype"))
mm_quantized = jax.jit(mxfp8.mm_quantized, static_argnames=("tokens", "dtype"))
mm_quantized_into = jax.jit(
    mxfp8.mm_quantized_into, static_argnames="tokens", donate_argnames="out"
)


def gaussian(rng: np.random.Generator, *shape: int, dtype: np.dtype = F32) -> Array:
    """Normal values whose magnitude varies by four octaves from column to column."""
    octaves = rng.integers(-2, 3, shape[-1:])
    return np.ldexp(rng.standard_normal(shape), octaves).astype(dtype)


def stored_bytes(
    operand: mxfp8.StagedInput | mxfp8.PackedWeight,
) -> tuple[Array, Array]:
    values, scales = np.asarray(operand.values), np.asarray(operand.scales)
    assert (values.dtype, scales.dtype) == (E4M3, E8M0)
    return values.view(np.uint8), scales.view(np.uint8)


def staged(
    x: Array,
    widths: list[int] | None = None,
    *,
    max_tokens: int | None = None,
    scale_group: int = 32,
) -> mxfp8.StagedInput:
    storage = mxfp8.empty_input(
        len(x) if max_tokens is None else max_tokens,
        x.shape[1],
        scale_group=scale_group,
    )
    column = 0
    for width in widths or [x.shape[1]]:
        storage = stage(x[:, column : column + width], storage, column=column)
        column += width
    return storage


def with_scales(storage: mxfp8.StagedInput, scales: Array) -> mxfp8.StagedInput:
    return dataclasses.replace(storage, scales=jnp.asarray(scales.view(E8M0)))


# --- Quantisation


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


QUANTIZER_INPUTS: dict[str, Callable[[np.random.Generator], Array]] = {
    "bfloat16 in order": lambda rng: all_codes(BF16, np.arange(1 << 16)),
    "bfloat16 shuffled": lambda rng: all_codes(BF16, rng.permutation(1 << 16)),
    "float16 in order": lambda rng: all_codes(F16, np.arange(1 << 16)),
    "float16 shuffled": lambda rng: all_codes(F16, rng.permutation(1 << 16)),
    "float32": float32_corners,
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


@pytest.mark.parametrize("shape", [(132, 64), (128, 128), (5, 160)])
@with_scale_group
def test_a_packed_weight_is_padded_to_128_with_zeros_of_scale_one(
    shape: tuple[int, int], scale_group: int, rng: np.random.Generator
) -> None:
    w = gaussian(rng, *shape, dtype=BF16)
    packed = mxfp8.pack_weight(w, scale_group=scale_group)
    values, scales = stored_bytes(packed)
    whole = np.zeros((-shape[0] % 128 + shape[0], -shape[1] % 128 + shape[1]), BF16)
    whole[: shape[0], : shape[1]] = w
    tile = (128, 128) if scale_group == 128 else (1, 32)
    want_values, want_scales = oracles.quantize(whole, *tile)
    want_scales[shape[0] :], want_scales[:, shape[1] // 32 :] = 127, 127
    assert_same_bits(values, want_values)
    assert_same_bits(scales, want_scales)
    assert (packed.shape, packed.realign_error) == (shape, None)


def test_a_quantised_weight_is_packed_as_it_is(rng: np.random.Generator) -> None:
    values = rng.integers(0, 256, (132, 64), np.uint8)
    scales = rng.integers(0, 256, (132, 2), np.uint8)
    packed = mxfp8.pack_weight(values.view(E4M3), scales.view(E8M0))
    got_values, got_scales = stored_bytes(packed)
    assert_same_bits(got_values[:132, :64], values)
    assert_same_bits(got_scales[:132, :2], scales)


@pytest.mark.parametrize("octaves", [3, 9])
def test_moving_a_weight_to_128_reports_what_it_lost(
    octaves: int, rng: np.random.Generator
) -> None:
    # One bit of fraction: a shift of 3 octaves loses nothing above 2^-7.
    code = rng.integers(0, 15, (132, 160)) * 8 + rng.integers(0, 2, (132, 160)) * 4
    values = np.where(code < 4 * 8, 0, code).astype(np.uint8)
    scales = rng.integers(100, 100 + octaves, (132, 5), np.uint8)
    values[0, :32], scales[0, 0] = 0, 250  # nothing to hold: must not raise the scale
    values[3, 40], scales[7, 1] = 0x7F, 255
    packed = mxfp8.pack_weight(values.view(E4M3), scales.view(E8M0), scale_group=128)
    got_values, got_scales = stored_bytes(packed)
    assert (got_scales[:128, :4] == got_scales[0, 0]).all()
    assert got_scales[0, 0] == 99 + octaves
    old = oracles.decode(values, scales)
    new = oracles.decode(got_values, got_scales)[:132, :160]
    np.testing.assert_array_equal(np.isnan(new), np.isnan(old))
    assert packed.realign_error == np.nanmax(np.abs(new - old))
    assert (packed.realign_error == 0) == (octaves < 9)


# --- Products


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_staged_equals_concatenated_bit_for_bit(
    num_tokens: int, rng: np.random.Generator
) -> None:
    x = gaussian(rng, 257, 640, dtype=BF16)
    w = gaussian(rng, NUM_OUTPUTS, 640, dtype=BF16)
    bias = gaussian(rng, NUM_OUTPUTS)
    packed = mxfp8.pack_weight(w)
    whole = mm(x[:num_tokens], packed, bias=bias, dtype=F32)
    for widths in SLICES:
        storage = staged(x, widths)
        got = mm_quantized(storage, packed, tokens=num_tokens, bias=bias, dtype=F32)
        assert_same_bits(np.asarray(got), np.asarray(whole), widths)
    want = oracles.product(
        oracles.quantized(x[:num_tokens]), oracles.quantized(w), bias
    )
    oracles.assert_within(np.asarray(whole), *want)


def test_one_program_that_stages_and_multiplies_gives_the_same_bits(
    rng: np.random.Generator,
) -> None:
    x = gaussian(rng, 17, 384, dtype=BF16)
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 384, dtype=BF16))

    @jax.jit
    def both(x: jax.Array, packed: mxfp8.PackedWeight) -> tuple[jax.Array, jax.Array]:
        storage = mxfp8.empty_input(17, 384)
        for column in (0, 128, 256):
            part = x[:, column : column + 128]
            storage = mxfp8.quantize_input_slice(part, storage, column=column)
        return mxfp8.mm_quantized(storage, packed), mxfp8.mm(x, packed)

    once, whole = both(x, packed)
    assert_same_bits(np.asarray(once), np.asarray(whole))
    assert_same_bits(np.asarray(once), np.asarray(mm(x, packed)))


@pytest.mark.parametrize(
    ("num_columns", "scale_group"), [(32, 32), (160, 32), (96, 128)]
)
def test_any_number_of_groups_multiplies_within_the_bound(
    num_columns: int, scale_group: int, rng: np.random.Generator
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
    oracles.assert_within(np.asarray(got), *oracles.product(want_x, want_w))


def test_groups_of_128_staged_equal_concatenated(rng: np.random.Generator) -> None:
    x = gaussian(rng, 17, 384, dtype=BF16)
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 384), scale_group=128)
    storage = staged(x, [128, 256], scale_group=128)
    scales = stored_bytes(storage)[1].reshape(17, 3, 4)
    assert (scales == scales[:, :, :1]).all()
    assert_same_bits(
        np.asarray(mm_quantized(storage, packed)),
        np.asarray(mm(x, packed, scale_group=128)),
    )


def test_small_integers_multiply_exactly(rng: np.random.Generator) -> None:
    x = rng.integers(-15, 16, (16, 256)).astype(F32)
    w = rng.integers(-15, 16, (NUM_OUTPUTS, 256)).astype(F32)
    got = np.asarray(mm(x, w))
    np.testing.assert_array_equal(got, x.astype(int) @ w.astype(int).T)


def test_the_result_is_rounded_once_to_its_dtype(rng: np.random.Generator) -> None:
    storage = staged(gaussian(rng, 16, 256, dtype=BF16))
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 256, dtype=BF16))
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


def test_scales_of_0_and_254_are_powers_of_two(rng: np.random.Generator) -> None:
    # The products are all near 1, whatever the scales on either side.
    sign = rng.integers(0, 2, (16, 256), np.uint8) << 7
    values = rng.integers(7 * 8 - 16, 7 * 8 + 16, (16, 256), np.uint8) | sign
    byte = np.array([0, 254, 9, 245, 10, 246, 127, 1], np.uint8)
    x_scales = np.tile(byte, (16, 1))
    x_scales[1] = 0
    codes = rng.integers(0, 127, (NUM_OUTPUTS, 256), np.uint8)
    w_scales = np.tile(254 - byte, (NUM_OUTPUTS, 1))
    w_scales[5] = 0
    storage = with_scales(staged(np.ones((16, 256), F32)), x_scales)
    storage = dataclasses.replace(storage, values=jnp.asarray(values.view(E4M3)))
    packed = mxfp8.pack_weight(codes.view(E4M3), w_scales.view(E8M0))
    got = np.asarray(mm_quantized(storage, packed, dtype=jnp.float32))
    want = oracles.product(
        oracles.decode(values, x_scales), oracles.decode(codes, w_scales)
    )
    oracles.assert_within(got, *want)


def test_scale_255_is_nan_for_its_rows_and_outputs_only(
    rng: np.random.Generator,
) -> None:
    x = gaussian(rng, 16, 256)
    w_values, w_scales = oracles.quantize(gaussian(rng, NUM_OUTPUTS, 256))
    storage = staged(x)
    x_scales = stored_bytes(storage)[1].copy()
    x_scales[2, 1] = 255
    w_scales[5, 3] = 255
    packed = mxfp8.pack_weight(w_values.view(E4M3), w_scales.view(E8M0))
    got = mm_quantized(with_scales(storage, x_scales), packed)
    want = np.zeros((16, NUM_OUTPUTS), bool)
    want[2], want[:, 5] = True, True
    np.testing.assert_array_equal(np.isnan(got), want)


def test_a_row_does_not_depend_on_other_rows(rng: np.random.Generator) -> None:
    x = gaussian(rng, 16, 256)
    w = gaussian(rng, NUM_OUTPUTS, 256)
    want = np.asarray(mm(x, w))
    others = gaussian(rng, 16, 256)
    others[:4] = [[np.nan], [np.inf], [3e38], [1e-44]]
    others[7] = x[7]
    assert_same_bits(np.asarray(mm(others, w))[7], want[7])


def test_rows_beyond_tokens_never_reach_the_result(rng: np.random.Generator) -> None:
    x = gaussian(rng, 16, 256)
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 256))
    values, scales = map(np.copy, stored_bytes(staged(x)))
    clean = np.asarray(mm_quantized(staged(x), packed, tokens=14))
    values[14:], scales[14], scales[15] = 0x7F, 255, 0
    poisoned = with_scales(staged(x), scales)
    poisoned = dataclasses.replace(poisoned, values=jnp.asarray(values.view(E4M3)))
    assert_same_bits(np.asarray(mm_quantized(poisoned, packed, tokens=14)), clean)


def test_no_tokens_give_an_empty_result(rng: np.random.Generator) -> None:
    storage = mxfp8.empty_input(8, 128)
    storage = stage(np.zeros((0, 128), BF16), storage, column=0)
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 128))
    got = mm_quantized(storage, packed, tokens=0, bias=np.ones(NUM_OUTPUTS, F32))
    assert (got.shape, got.dtype) == ((0, NUM_OUTPUTS), BF16)
    out = np.full((3, NUM_OUTPUTS), 7, F32)
    assert_same_bits(
        np.asarray(mm_quantized_into(storage, packed, jnp.asarray(out), tokens=0)), out
    )
    nothing = mxfp8.quantize_input_slice(
        np.zeros((0, 128), BF16), mxfp8.empty_input(0, 128), column=0
    )
    assert mxfp8.mm_quantized(nothing, packed).shape == (0, NUM_OUTPUTS)


# --- Storage


def test_what_was_never_written_is_nan(rng: np.random.Generator) -> None:
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 256))
    storage = mxfp8.empty_input(16, 256, track=False)
    storage = stage(gaussian(rng, 16, 128), storage, column=128)
    assert np.isnan(mm_quantized(storage, packed)).all()
    storage = stage(gaussian(rng, 15, 128), storage, column=0)
    got = np.asarray(mm_quantized(storage, packed)).astype(F32)
    assert np.isnan(got[15]).all()
    assert np.isfinite(got[:15]).all()
    assert np.isnan(mm_quantized(storage.reset(), packed)).all()


def test_missing_columns_are_named_at_trace_time() -> None:
    packed = mxfp8.pack_weight(np.ones((4, 640), F32))

    def multiply(columns: list[int], forget: bool = False) -> jax.Array:
        storage = mxfp8.empty_input(4, 640)
        for column in columns:
            x = ones(4, 128)
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
    packed = mxfp8.pack_weight(np.ones((NUM_OUTPUTS, 256), F32))
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
    packed = mxfp8.pack_weight(gaussian(rng, NUM_OUTPUTS, 128))
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


# --- Transformations


def test_gradients_take_quantisation_for_the_identity(
    rng: np.random.Generator,
) -> None:
    x, w = gaussian(rng, 6, 96), gaussian(rng, 8, 96)
    bias, weights = gaussian(rng, 8), gaussian(rng, 6, 8)

    def loss(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return (mxfp8.mm(x, w, bias=bias) * weights).sum()

    dx, dw, dbias = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, w, bias)
    g = weights.astype(np.float64)
    for got, a, b in (
        (dx, g, oracles.quantized(w).T),
        (dw, g.T, oracles.quantized(x).T),
    ):
        oracles.assert_within(np.asarray(got), *oracles.product(a, b))
    np.testing.assert_allclose(dbias, g.sum(axis=0), rtol=6 * 2.0**-24)
    packed_dx = jax.jit(jax.grad(loss))(x, mxfp8.pack_weight(w), bias)
    assert_same_bits(np.asarray(packed_dx), np.asarray(dx))


def test_gradients_have_the_dtypes_of_their_operands(rng: np.random.Generator) -> None:
    x, w = gaussian(rng, 2, 32, dtype=F16), gaussian(rng, 4, 32, dtype=BF16)
    loss = jax.grad(lambda x, w: mxfp8.mm(x, w, dtype=jnp.float32).sum(), (0, 1))
    assert [leaf.dtype for leaf in loss(x, w)] == [F16, BF16]


def test_ranks_that_share_a_raw_weight_sum_its_gradients(
    rng: np.random.Generator,
) -> None:
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    x, w = gaussian(rng, 4, 64), gaussian(rng, 8, 64)
    per_rank = jax.shard_map(
        mxfp8.mm, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp")
    )
    got = jax.jit(jax.grad(lambda x, w: per_rank(x, w).sum(), (0, 1)))(x, w)
    ones = np.ones((4, 8))
    want_dx = oracles.product(ones, oracles.quantized(w).T)
    want_dw = oracles.product(ones.T, oracles.quantized(x).T)
    oracles.assert_within(np.asarray(got[0]), *want_dx)
    oracles.assert_within(np.asarray(got[1]), *want_dw)


@pytest.mark.parametrize("of", ["slice", "storage", "packed weight", "pack_weight"])
def test_a_gradient_that_is_not_defined_says_so(of: str) -> None:
    x, w = jnp.ones((2, 128), F32), jnp.ones((4, 128), F32)
    packed = mxfp8.pack_weight(w)
    storage = mxfp8.quantize_input_slice(x, mxfp8.empty_input(2, 128), column=0)

    def staged_loss(x: jax.Array) -> jax.Array:
        written = mxfp8.quantize_input_slice(x, storage, column=0)
        return mxfp8.mm_quantized(written, packed, dtype=jnp.float32).sum()

    losses: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "slice": (staged_loss, x),
        "storage": (lambda s: mxfp8.mm_quantized(s, packed).sum(), storage),
        "packed weight": (lambda p: mxfp8.mm(x, p).sum(), packed),
        "pack_weight": (lambda w: mxfp8.mm(x, mxfp8.pack_weight(w)).sum(), w),
    }
    loss, at = losses[of]
    with pytest.raises(NotImplementedError, match="mm"):
        jax.grad(loss)(at)


def test_vmap_maps_every_operation(rng: np.random.Generator) -> None:
    x = gaussian(rng, 3, 5, 128)
    x[1] *= np.float32(2.0**-130)  # one element of the batch takes the slow path
    w = gaussian(rng, 8, 128)
    packed = mxfp8.pack_weight(w)

    def staged_product(x: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
        storage = mxfp8.empty_input(5, 128)
        storage = mxfp8.quantize_input_slice(x, storage, column=0)
        return (
            mxfp8.mm_quantized(storage, packed, dtype=jnp.float32),
            mxfp8.mm_quantized_into(storage, packed, out, tokens=5),
            mxfp8.mm(x, packed),
        )

    outs = jax.jit(jax.vmap(staged_product))(x, np.zeros((3, 6, 8), F32))
    for i in range(3):
        want = oracles.product(oracles.quantized(x[i]), oracles.quantized(w))
        for got in outs:
            oracles.assert_within(np.asarray(got[i])[:5], *want)


# --- Errors


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
    (multiply(tokens=2.0), TypeError, "tokens must be a Python int, not float"),
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
        "the storage has 256 columns, and the weight has 128",
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
        "num_columns is 96, not a multiple of 128",
    ),
    (
        lambda: mxfp8.swizzle_scales(jnp.zeros((1, 3), jnp.uint8)),
        ValueError,
        "3 groups a row, not a multiple of 4",
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


# --- Blackwell's scale layout


def test_swizzled_scales_lie_where_the_hardware_looks() -> None:
    assert mxfp8.swizzled_scale_offset(5, 2, 7168) == 82
    assert mxfp8.swizzled_scale_offset(5, 5, 7168) == 593
    scales = np.arange(132 * 8).reshape(132, 8).astype(np.uint8)
    got = np.asarray(mxfp8.swizzle_scales(jnp.asarray(scales)))
    row, group = np.indices((256, 8))
    offset = mxfp8.swizzled_scale_offset(row, group, 256)
    assert sorted(offset.ravel()) == list(range(256 * 8))
    assert_same_bits(got[offset[:132]], scales)
    assert (got[offset[132:]] == 127).all()
