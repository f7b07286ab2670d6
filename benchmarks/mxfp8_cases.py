"""What `mxfp8.py` multiplies, and the ways to multiply it.

Owns data, compilation and the baselines; `mxfp8_check.py` says whether results are
right, `mxfp8.py` times them. The one surprise: all calls of a program that makes many
are held apart by optimization barriers, which XLA removes only after it has fused,
merged and scheduled; without them it would merge small products of one weight into one.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from harness import Arm
from jax import Array, lax

from jax_pcie import mxfp8

Shape = tuple[int, int, int]  # M, N, K
# XLA's own choice between cuBLAS and Triton takes half a minute a shape to compile and
# is cuBLAS at these sizes.
CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}
_FP8_TARGET = "__cublas$lt$matmul$f8"


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles a function for given arguments with the same options everywhere."""

    options: dict[str, Any]

    def __call__(
        self,
        function: Callable,
        *args: Any,  # noqa: ANN401
        donate: Sequence[int] = (),
    ) -> jax.stages.Compiled:
        jitted = jax.jit(function, donate_argnums=donate, compiler_options=self.options)
        return jitted.lower(*args).compile()


def compiled_to(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a program calls which library or kernel; fusions and copies too."""
    text = compiled.as_text()
    calls = re.findall(r'custom_call_target="([^"]+)"', text)
    calls += re.findall(r"[\])}] (fusion|copy|copy-start|while)\(", text)
    return dict(sorted(collections.Counter(calls).items()))


# --- Data


@partial(jax.jit, static_argnums=(1, 2))
def gaussian(key: Array, rows: int, columns: int, scale: float = 1.0) -> Array:
    """bfloat16 [rows, columns], rounded from float32: its fractions are all used."""
    return (jax.random.normal(key, (rows, columns)) * scale).astype(jnp.bfloat16)


def inputs(num: int, rows: int, columns: int, seed: int = 0) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(seed), num)
    return tuple(gaussian(key, rows, columns) for key in keys)


def weights(num: int, rows: int, columns: int, seed: int = 1) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(seed), num)
    return tuple(gaussian(key, rows, columns, columns**-0.5) for key in keys)


@partial(jax.jit, donate_argnames="storage")
def _write(x: Array, storage: mxfp8.StagedInput) -> mxfp8.StagedInput:
    return mxfp8.quantize_input_slice(x, storage, column=0)


_pack = jax.jit(mxfp8.pack_weight, static_argnames="scale_group")


def staged(x: Array, scale_group: int) -> mxfp8.StagedInput:
    """`x` as the operand of a product, written in one slice."""
    return _write(x, mxfp8.empty_input(*x.shape, scale_group=scale_group))


def packed(w: Array, scale_group: int) -> mxfp8.PackedWeight:
    return _pack(w, scale_group=scale_group)


def empty(rows: int, columns: int, scale_group: int) -> mxfp8.StagedInput:
    """Storage whose type does not change when it is written."""
    return mxfp8.empty_input(rows, columns, scale_group=scale_group, track=False)


# --- Products, all [M, N] in bfloat16 from K-major operands


def bf16_product(x: Array, w: Array) -> Array:
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


def scaled_matmul(storage: mxfp8.StagedInput, weight: mxfp8.PackedWeight) -> Array:
    return jax.nn.scaled_matmul(
        storage.values[None],
        weight.values[None],
        storage.scales[None],
        weight.scales[None],
        preferred_element_type=jnp.bfloat16,
    )[0]


def _fp8_direct(x: Array, w: Array, scale: Array) -> Array:
    return bf16_product(x, w) * scale.astype(jnp.bfloat16)


def _fp8_scaled(x: Array, w: Array, scale: Array) -> Array:
    """The form that XLA documents as becoming cuBLASLt's product of fp8."""
    wide_x = x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    wide_w = w.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return bf16_product(wide_x, wide_w)


def fp8_product(compiler: Compiler, x: Array, w: Array) -> jax.stages.Compiled:
    """E4M3 values as they are, one scale for all; takes (x, w, scale)."""
    forms = [
        compiler(form, x, w, jnp.float32(1)) for form in (_fp8_scaled, _fp8_direct)
    ]
    return next((f for f in forms if _FP8_TARGET in f.as_text()), forms[0])


# --- Baselines on quantised operands


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another library's product.

    Attributes:
        compiled_to: as `compiled_to` gives it; empty if not XLA's.
        is_same_product: it is that of the decoded operands, scales and all.
    """

    arm: Arm
    compiled_to: dict[str, int]
    is_same_product: bool = True


def baselines(
    compiler: Compiler,
    storage: mxfp8.StagedInput,
    weight: mxfp8.PackedWeight,
    use_torch: bool,
) -> dict[str, Callable[[], Baseline]]:
    """How to make each baseline for operands of this scale group."""

    def with_scaled_matmul() -> Baseline:
        compiled = compiler(scaled_matmul, storage, weight)
        return Baseline(Arm(partial(compiled, storage, weight)), compiled_to(compiled))

    def with_one_scale() -> Baseline:
        compiled = fp8_product(compiler, storage.values, weight.values)
        call = partial(compiled, storage.values, weight.values, jnp.float32(1))
        return Baseline(Arm(call), compiled_to(compiled), is_same_product=False)

    if storage.scale_group == 32:
        return {
            "jax.nn.scaled_matmul": with_scaled_matmul,
            "fp8 dot, one scale": with_one_scale,
        }
    if use_torch:
        return {
            "torch fp8, group 128": lambda: Baseline(torch_arm(storage, weight), {})
        }
    return {}


def has_torch() -> bool:
    """Whether PyTorch can multiply on the GPU that JAX uses."""
    if jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def torch_arm(storage: mxfp8.StagedInput, weight: mxfp8.PackedWeight) -> Arm:
    """`torch._scaled_mm`: cuBLASLt's fp8 with scales 1 x 128 and 128 x 128.

    Takes the very operands of scale group 128; gives a bfloat16 tensor.
    """
    import torch

    def tensor(x: Array) -> torch.Tensor:
        return torch.from_dlpack(jax.block_until_ready(x))

    def values(x: Array) -> torch.Tensor:
        return tensor(as_bytes(x)).view(torch.float8_e4m3fn)

    def factors(scales: Array, rows: int) -> torch.Tensor:
        bits = as_bytes(scales)[::rows, ::4].astype(jnp.uint32) << 23
        return tensor(lax.bitcast_convert_type(bits, jnp.float32))

    x, w = values(storage.values), values(weight.values).t()
    # cuBLASLt wants the scales of x column by column, those of w row by row.
    scale_x = factors(storage.scales, 1).t().contiguous().t()  # [M, K / 128]
    scale_w = factors(weight.scales, 128).contiguous().t()  # [K / 128, N / 128]

    def start() -> torch.Tensor:
        return torch._scaled_mm(
            x, w, scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16
        )

    def wait(_: torch.Tensor) -> None:
        torch.cuda.synchronize()

    return Arm(start, wait=wait)


# --- Many calls in one program, for what is over before the host can start the next


def apart(x: Any, previous: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Both, such that what is made of `x` comes after `previous`."""
    leaves, structure = jax.tree.flatten((x, previous))
    # One-byte floats as bytes: nothing then has a reason to widen and narrow them.
    held = [as_bytes(leaf) if leaf.dtype.itemsize == 1 else leaf for leaf in leaves]
    held = lax.optimization_barrier(held)
    held = [
        lax.bitcast_convert_type(h, leaf.dtype) if h.dtype != leaf.dtype else h
        for h, leaf in zip(held, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, held)


def as_bytes(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def many_products(product: Callable, num_calls: int) -> Callable:
    """A function of lists of inputs and weights that makes `num_calls` products.

    Lengths of the lists without a common divisor: no pair comes twice, and a weight
    comes back only after all others, when the cache has forgotten it.
    """

    def run(xs: Sequence[Any], ws: Sequence[Any]) -> list[Array]:
        results: list[Array] = []
        for i in range(num_calls):
            x, w = xs[i % len(xs)], ws[i % len(ws)]
            if results:
                (x, w), results[-1] = apart((x, w), results[-1])
            results.append(product(x, w))
        return results

    return run


def many_copies(xs: Sequence[Array], num_calls: int) -> list[Array]:
    """Arrays in turn through a kernel that reads and writes one."""
    copies = list(xs)
    for i in range(num_calls):
        this, previous = i % len(copies), (i - 1) % len(copies)
        if i > 0:
            held = apart(copies[this], copies[previous])
            copies[this], copies[previous] = held
        copies[this] = copies[this] ^ jnp.ones((), copies[this].dtype)
    return copies


# --- Slices


def write(xs: Sequence[Array], storage: mxfp8.StagedInput) -> mxfp8.StagedInput:
    """Quantises slices in turn into `storage`, from left to right until it is full."""
    width = xs[0].shape[1]
    for i in range(storage.num_columns // width):
        x = xs[i % len(xs)]
        storage = mxfp8.quantize_input_slice(x, storage, column=i * width)
    return storage


def fill(xs: Sequence[Array], storage: mxfp8.StagedInput) -> mxfp8.StagedInput:
    """As `write`, but of all that was in `storage` before nothing is left."""
    return write(xs, storage.reset())


def fill_and_multiply(
    xs: Sequence[Array], weight: mxfp8.PackedWeight, storage: mxfp8.StagedInput
) -> tuple[Array, mxfp8.StagedInput]:
    storage = fill(xs, storage)
    return mxfp8.mm_quantized(storage, weight), storage


def concatenated(product: Callable, xs: Sequence[Array], weight: Any) -> Array:  # noqa: ANN401
    return product(jnp.concatenate(xs, axis=1), weight)
