"""What the wire format says, in NumPy: slow, obvious and exact.

Owns the expected bytes of every codec and the expected bits of every topology, written
from the definitions of the formats alone; knows nothing of `jax_pcie`. Values are fp32
where the format says fp32 and float64 only where that is exact, so a test compares with
``==``. The one surprise: what an array's dtype cannot hold counts as non-finite for
every encode, partial sums included, and so leaves the block's amax alone.
"""

import dataclasses
import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray
Rng = np.random.Generator

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
DTYPES = (BF16, F16, F32)

SHARD_QUANTUM = 128
MAX_F32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A small binary format: sign, biased exponent, fraction, with subnormals.

    The first `num_finite` codes without the sign bit are finite, in rising order.
    """

    exponent_bits: int
    fraction_bits: int
    num_finite: int
    has_infinity: bool

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits)

    @functools.cached_property
    def magnitudes(self) -> Array:
        """float64 [num_finite + 1]; the last is what the next code would be worth."""
        code = np.arange(self.num_finite + 1)
        exponent = code >> self.fraction_bits
        fraction = code & ((1 << self.fraction_bits) - 1)
        significand = fraction + np.where(exponent > 0, 1 << self.fraction_bits, 0)
        bias = (1 << (self.exponent_bits - 1)) - 1
        ulp = np.maximum(exponent, 1) - bias - self.fraction_bits
        return np.ldexp(significand.astype(np.float64), ulp)

    def values(self, codes: Array) -> Array:
        """float64 of `codes`, sign bit included."""
        table = np.full(self.sign_bit, np.nan)
        table[: self.num_finite] = self.magnitudes[:-1]
        if self.has_infinity:
            table[self.num_finite] = np.inf
        codes = codes.astype(np.int64)
        magnitude = table[codes & (self.sign_bit - 1)]
        return np.where(codes & self.sign_bit, -magnitude, magnitude)

    def nearest(self, values: Array) -> Array:
        """Codes of `values` (no NaN), ties to even; `num_finite` means overflow."""
        magnitude = np.abs(values.astype(np.float64))
        above = np.searchsorted(self.magnitudes, magnitude).clip(1, self.num_finite)
        to_above = self.magnitudes[above] - magnitude
        to_below = magnitude - self.magnitudes[above - 1]
        tie_goes_up = (to_above == to_below) & (above % 2 == 0)
        code = np.where((to_above < to_below) | tie_goes_up, above, above - 1)
        return code | np.where(np.signbit(values), self.sign_bit, 0)


E4M3FN = FloatFormat(4, 3, num_finite=0x7F, has_infinity=False)
FORMATS = {
    BF16: FloatFormat(8, 7, num_finite=0x7F80, has_infinity=True),
    F16: FloatFormat(5, 10, num_finite=0x7C00, has_infinity=True),
}


def bits(x: Array) -> Array:
    """The raw bits of `x`, as unsigned integers."""
    return np.asarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))


def from_bits(codes: Array, dtype: np.dtype) -> Array:
    return codes.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)


def infinity_bits(dtype: np.dtype) -> int:
    return {BF16: 0x7F80, F16: 0x7C00, F32: 0x7F800000}[dtype]


def fraction_bits(dtype: np.dtype) -> int:
    return {BF16: 7, F16: 10, F32: 23}[dtype]


def widen(x: Array) -> Array:
    """`x` in fp32, exactly; a NaN becomes a quiet one."""
    if x.dtype == F32:
        return np.where(np.isnan(x), np.float32(np.nan), x)
    return FORMATS[x.dtype].values(bits(x)).astype(np.float32)


def narrow(values: Array, dtype: np.dtype, *, clamp: bool = False) -> Array:
    """fp32 `values` rounded once to `dtype`; NaN gets its one spelling.

    With `clamp` a finite value stays finite, as a decoder's must.
    """
    is_nan = np.isnan(values)
    nan = 0x7FFFFFFF if dtype == F32 else 0x7FFF
    if dtype == F32:
        return from_bits(np.where(is_nan, nan, bits(values)), dtype)
    fmt = FORMATS[dtype]
    code = fmt.nearest(np.where(is_nan, 0, values))
    if clamp:
        overflows = np.isfinite(values) & (
            (code & (fmt.sign_bit - 1)) >= fmt.num_finite
        )
        code = np.where(overflows, code - 1, code)
    return from_bits(np.where(is_nan, nan, code), dtype)


def add(a: Array, b: Array) -> Array:
    """fp32 a + b, rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        return a + b


@dataclasses.dataclass(frozen=True)
class Codec:
    """One block format. Functions work on [blocks, block] values and [blocks] scales.

    `half_step` is a rounding's error relative to the block's amax.
    """

    block: int
    nan: int
    scale_type: np.dtype
    make_scale: Callable[[Array], Array]
    encode: Callable[[Array, Array], Array]
    decode: Callable[[Array, Array], Array]
    half_step: float


def _reciprocal(scale: Array) -> Array:
    return np.float32(1) / scale[:, None]


def _fp32_scale(largest: float, amax: Array) -> Array:
    scale = np.maximum(amax / np.float32(largest), np.float32(2.0**-126))
    return np.where(amax == 0, np.float32(1), scale)


def _int8_encode(v: Array, scale: Array) -> Array:
    return (
        np.rint(v * _reciprocal(scale)).clip(-127, 127).astype(np.int8).view(np.uint8)
    )


def _int8_decode(payload: Array, scale: Array) -> Array:
    q = payload.view(np.int8).astype(np.float64)
    return np.where(q == -128, np.nan, q * scale[:, None].astype(np.float64))


def _saturated_e4m3(v: Array) -> Array:
    code = E4M3FN.nearest(v)
    return np.where(code & 0x7F == 0x7F, code - 1, code).astype(np.uint8)


def _e4m3_encode(v: Array, scale: Array) -> Array:
    return _saturated_e4m3(v * _reciprocal(scale))


def _e4m3_decode(payload: Array, scale: Array) -> Array:
    return E4M3FN.values(payload) * scale[:, None].astype(np.float64)


def _e8m0_scale(amax: Array) -> Array:
    largest = np.ldexp(448.0, np.arange(255) - 127)  # what each scale byte can hold
    byte = np.searchsorted(
        largest, amax.astype(np.float64)
    )  # the first that is >= amax
    return np.where(amax == 0, 127, byte).astype(np.uint8)


def _mxfp8_encode(v: Array, scale: Array) -> Array:
    exponent = 127 - scale[:, None].astype(np.int32)
    return _saturated_e4m3(np.ldexp(v.astype(np.float64), exponent))


def _mxfp8_decode(payload: Array, scale: Array) -> Array:
    power = np.ldexp(1.0, scale.astype(np.int32) - 127)
    return E4M3FN.values(payload) * np.where(scale == 255, np.nan, power)[:, None]


_E4M3_HALF_STEP = 2.0**-4 * (1 + 2.0**-20)
CODECS = {
    "int8": Codec(
        block=128,
        nan=0x80,
        scale_type=np.dtype("<f4"),
        make_scale=functools.partial(_fp32_scale, 127),
        encode=_int8_encode,
        decode=_int8_decode,
        half_step=(0.5 + 2.0**-15) / 127,
    ),
    "e4m3": Codec(
        block=128,
        nan=0x7F,
        scale_type=np.dtype("<f4"),
        make_scale=functools.partial(_fp32_scale, 448),
        encode=_e4m3_encode,
        decode=_e4m3_decode,
        half_step=_E4M3_HALF_STEP,
    ),
    "mxfp8": Codec(
        block=32,
        nan=0x7F,
        scale_type=np.dtype("u1"),
        make_scale=_e8m0_scale,
        encode=_mxfp8_encode,
        decode=_mxfp8_decode,
        half_step=_E4M3_HALF_STEP,
    ),
}


@dataclasses.dataclass(frozen=True)
class Record:
    """One byte a value, and the scales of its blocks as bytes."""

    payload: Array
    scales: Array


def in_blocks(x: Array, block: int) -> Array:
    """[N] -> [ceil(N / block), block]; what lies past the end is zero, i.e. absent."""
    return np.pad(x, (0, -len(x) % block)).reshape(-1, block)


def encode(codec: str, values: Array, dtype: np.dtype) -> Record:
    """The record of fp32 `values` [N] that belong to an array of `dtype`."""
    c = CODECS[codec]
    usable = np.isfinite(widen(narrow(values, dtype)))
    v = in_blocks(np.where(usable, values, np.float32(0)), c.block)
    scale = c.make_scale(np.abs(v).max(axis=1)).astype(c.scale_type)
    payload = c.encode(v, scale).reshape(-1)[: len(values)]
    return Record(np.where(usable, payload, np.uint8(c.nan)), scale.view(np.uint8))


def decode(codec: str, record: Record) -> Array:
    """fp32 values [N]; a finite record gives finite values."""
    c = CODECS[codec]
    values = c.decode(
        in_blocks(record.payload, c.block), record.scales.view(c.scale_type)
    )
    values = values.clip(-MAX_F32, MAX_F32).astype(np.float32)
    return values.reshape(-1)[: len(record.payload)]


def rounding_bound(codec: str, values: Array, record: Record) -> Array:
    """float64 [N]: how far one encode may move each finite value of `values`.

    The format's bound; where a product is subnormal, fp32's own half step comes on top.
    """
    c = CODECS[codec]
    scale = record.scales.view(c.scale_type)
    if codec == "mxfp8":
        scale = np.ldexp(1.0, scale.astype(np.int32) - 127)
    scale = np.repeat(scale.astype(np.float64), c.block)[: len(values)]
    if codec == "int8":
        return scale * (0.5 + 2.0**-15)
    relative = 2.0**-4 * np.abs(values.astype(np.float64))
    return np.maximum(relative, 2.0**-10 * scale) * (1 + 2.0**-20) + 2.0**-150


def ring_order(owner: int, world: int) -> list[int]:
    """The ranks in the order in which a ring sums a shard, its owner last."""
    return [(owner + 1 + step) % world for step in range(world)]


def _last_ring_sum(owner: int, xs: Array) -> Array:
    """fp32 sum at the owner of an uncompressed ring, which keeps their dtype."""
    order = ring_order(owner, len(xs))
    partial = xs[order[0]]
    for rank in order[1:-1]:
        partial = narrow(add(widen(partial), widen(xs[rank])), xs.dtype)
    return add(widen(partial), widen(xs[order[-1]]))


def _ring(codec: str, owner: int, xs: Array) -> Array:
    if codec == "raw":
        return narrow(_last_ring_sum(owner, xs), xs.dtype)
    order = ring_order(owner, len(xs))
    record = encode(codec, widen(xs[order[0]]), xs.dtype)
    for rank in order[1:]:
        record = encode(codec, add(decode(codec, record), widen(xs[rank])), xs.dtype)
    return narrow(decode(codec, record), xs.dtype, clamp=True)


def _a2a(codec: str, owner: int, xs: Array) -> Array:
    arrived = [widen(x) for x in xs]
    if codec != "raw":
        for rank, x in enumerate(arrived):
            if rank != owner:
                arrived[rank] = decode(codec, encode(codec, x, xs.dtype))
    total = functools.reduce(add, arrived)
    if codec == "raw":
        return narrow(total, xs.dtype)
    return narrow(decode(codec, encode(codec, total, xs.dtype)), xs.dtype, clamp=True)


def _ag(codec: str, owner: int, xs: Array) -> Array:
    record = encode(codec, _last_ring_sum(owner, xs), xs.dtype)
    return narrow(decode(codec, record), xs.dtype, clamp=True)


TOPOLOGIES = {"ring": _ring, "a2a": _a2a, "ag": _ag}


def all_reduce(codec: str, topology: str, xs: Array) -> Array:
    """What every rank holds after an all-reduce of xs[rank]."""
    world = len(xs)
    if world == 1:
        return xs[0]
    flat = xs.reshape(world, -1) if xs.size else np.empty((world, 0), xs.dtype)
    length = SHARD_QUANTUM * -(-flat.shape[1] // (SHARD_QUANTUM * world))
    shards = [
        TOPOLOGIES[topology](codec, c, flat[:, c * length : (c + 1) * length])
        for c in range(world)
    ]
    return np.concatenate(shards).reshape(xs.shape[1:])


def num_roundings(topology: str, world: int) -> int:
    return {"ring": world, "a2a": 2, "ag": 1}[topology]


def sum_bound(
    codec: str, topology: str, xs: Array, *, block: int | None = None
) -> Array:
    """float64, like xs[0]: how far an all-reduce of finite `xs` may be from the sum.

    Every value on the way is at most S = sum over ranks of the block's amax, and grows
    by a factor of 1 + half_step at an encode, 1 + 2^-24 at an add, 1 + ulp / 2 when
    it is narrowed; below the normal numbers a step has a fixed size instead.
    """
    world, dtype = len(xs), xs.dtype
    flat = np.abs(widen(xs).reshape(world, -1).astype(np.float64))
    half_step = CODECS[codec].half_step if codec != "raw" else 0.0
    block = block or (CODECS[codec].block if codec != "raw" else 1)
    total = sum(in_blocks(x, block).max(axis=1) for x in flat)
    roundings = num_roundings(topology, world) if codec != "raw" else 0
    half_ulp = 2.0 ** -(fraction_bits(dtype) + 1)
    growth = (1 + half_step) ** roundings * ((1 + 2.0**-24) * (1 + half_ulp)) ** world
    smallest = {BF16: 2.0**-133, F16: 2.0**-24, F32: 2.0**-149}[dtype]
    smallest_step = 2 * world * (smallest + (2.0**-126 if codec != "raw" else 0))
    bound = np.repeat(total * (growth - 1) + smallest_step, block)[: flat.shape[1]]
    return bound.reshape(xs.shape[1:])


def exact_input(codec: str, num: int, rng: Rng) -> Array:
    """fp32 [num] whose multiples by 1 to 16 survive `codec` without any rounding.

    Every block holds the value that makes its scale a whole number or a power of two.
    """
    if codec == "raw":
        return rng.integers(-16, 17, num).astype(np.float32)
    if codec == "int8":
        x, largest = rng.integers(-127, 128, num), 127
    elif codec == "e4m3":
        x, largest = E4M3FN.values(rng.integers(0, 127, num)), 448
        x *= rng.choice([-1, 1], num)
    else:
        x, largest = (
            np.ldexp(rng.choice([-1.0, 0.0, 1.0], num), rng.integers(-6, 3, num)),
            4,
        )
    x[:: CODECS[codec].block] = largest
    return x.astype(np.float32)


def _random_bits(rng: Rng, dtype: np.dtype) -> Array:
    """Any 128 values of `dtype` at all."""
    return from_bits(rng.integers(0, 1 << (8 * dtype.itemsize), 128), dtype)


def _with_exponent(rng: Rng, dtype: np.dtype, low: int, high: int) -> Array:
    """Random values whose exponent field is in [low, high)."""
    fraction = bits(_random_bits(rng, dtype)) & ((1 << fraction_bits(dtype)) - 1)
    exponent = rng.integers(low, high, 128) << fraction_bits(dtype)
    return from_bits(fraction | exponent, dtype)


def _with_some(rng: Rng, x: Array, special: Array) -> Array:
    """`x` with about a tenth of its values replaced."""
    return from_bits(np.where(rng.random(128) < 0.1, bits(special), bits(x)), x.dtype)


def _with_signs(rng: Rng, x: Array, share_negative: float) -> Array:
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return from_bits(
        bits(x) | np.where(rng.random(128) < share_negative, sign, 0), x.dtype
    )


def _gaussian(rng: Rng, dtype: np.dtype) -> Array:
    return narrow(rng.standard_normal(128).astype(np.float32), dtype)


def _spiky(rng: Rng, dtype: np.dtype) -> Array:
    x = rng.standard_normal(128).astype(np.float32) * np.float32(1e-2)
    x[rng.integers(0, 128)] = 1e4
    return narrow(x, dtype)


def _halves(rng: Rng, dtype: np.dtype) -> Array:
    """Ties of the INT8 grid, and of E4M3's above 16."""
    x = rng.integers(-127, 127, 128) + 0.5
    x[rng.integers(0, 128)] = 127
    return narrow(x.astype(np.float32), dtype)


def _constant(rng: Rng, dtype: np.dtype) -> Array:
    return np.repeat(_gaussian(rng, dtype)[:1], 128)


def _lonely(rng: Rng, dtype: np.dtype) -> Array:
    x = np.zeros(128, np.float32)
    x[rng.integers(0, 128)] = rng.standard_normal()
    return narrow(x, dtype)


def _zeros(rng: Rng, dtype: np.dtype) -> Array:
    return np.zeros(128, dtype)


def _negative_zeros(rng: Rng, dtype: np.dtype) -> Array:
    return _with_signs(rng, np.zeros(128, dtype), 1.0)


def _zeros_of_both_signs(rng: Rng, dtype: np.dtype) -> Array:
    return _with_signs(rng, np.zeros(128, dtype), 0.5)


def _subnormals(rng: Rng, dtype: np.dtype) -> Array:
    return _with_signs(rng, _with_exponent(rng, dtype, 0, 1), 0.5)


def _tiny(rng: Rng, dtype: np.dtype) -> Array:
    return _with_signs(rng, _with_exponent(rng, dtype, 0, 9), 0.5)


def _huge(rng: Rng, dtype: np.dtype) -> Array:
    """The topmost binades, mostly positive, so that many sums overflow."""
    top = infinity_bits(dtype) >> fraction_bits(dtype)
    return _with_signs(rng, _with_exponent(rng, dtype, top - 3, top), 0.2)


def _infinities(rng: Rng, dtype: np.dtype) -> Array:
    infinity = from_bits(np.full(128, infinity_bits(dtype)), dtype)
    return _with_some(rng, _gaussian(rng, dtype), _with_signs(rng, infinity, 0.5))


def _nans(rng: Rng, dtype: np.dtype) -> Array:
    """NaN of both signs, quiet and signalling, with payloads."""
    payload = rng.integers(1, 1 << fraction_bits(dtype), 128)
    nan = from_bits(payload | infinity_bits(dtype), dtype)
    return _with_some(rng, _gaussian(rng, dtype), _with_signs(rng, nan, 0.5))


def _only_nans(rng: Rng, dtype: np.dtype) -> Array:
    return from_bits(np.full(128, infinity_bits(dtype) | 1), dtype)


BLOCK_KINDS = (
    _random_bits,
    _gaussian,
    _spiky,
    _halves,
    _constant,
    _lonely,
    _zeros,
    _negative_zeros,
    _zeros_of_both_signs,
    _subnormals,
    _tiny,
    _huge,
    _infinities,
    _nans,
    _only_nans,
)


def varied_input(world: int, dtype: np.dtype, rng: Rng) -> Array:
    """[world, N]: each kind of block on all, on some and on one rank; a tail."""
    kinds = np.arange(len(BLOCK_KINDS))
    same = np.tile(kinds, (world, 1))
    mixed = np.stack([rng.permutation(kinds) for _ in range(world)])
    gaussian = BLOCK_KINDS.index(_gaussian)
    one_odd = np.full((world, len(kinds) + 1), gaussian)
    one_odd[rng.integers(0, world, len(kinds)), kinds] = kinds
    plan = np.concatenate([same, mixed, one_odd], axis=1)
    rows = [np.concatenate([BLOCK_KINDS[k](rng, dtype) for k in row]) for row in plan]
    return np.stack(rows)[
        :, :-51
    ]  # the last block is neither whole nor a multiple of 32


def ordinary_input(
    world: int, dtype: np.dtype, shape: tuple[int, ...], rng: Rng
) -> Array:
    """[world, *shape]: finite values of several magnitudes."""
    x = rng.standard_normal((world, *shape)) * np.exp2(
        rng.integers(-6, 4, (world, *shape))
    )
    return narrow(x.astype(np.float32), dtype)
