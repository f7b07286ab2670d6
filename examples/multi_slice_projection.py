"""A small model with a projection whose input arrives in slices, kept only as MXFP8.

Branches each make one slice of a wide feature vector, and one projection reads all of
them. Training multiplies the concatenation (`mm`, which has gradients); inference
stages each slice as it appears (`mm_quantized`) and gives the same bits, without the
wide bf16 array. Runs anywhere, larger on a GPU:
``python examples/multi_slice_projection.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_pcie import mxfp8

NUM_STEPS = 5
LEARNING_RATE = 16.0  # over the projection's columns
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch; `slice_width` is what one branch gives a token."""

    tokens: int
    width: int
    branches: int
    slice_width: int
    outputs: int

    @property
    def wide(self) -> int:
        """Columns of the projection's input."""
        return self.branches * self.slice_width


LAPTOP = Sizes(tokens=256, width=64, branches=4, slice_width=512, outputs=132)
GPU = Sizes(tokens=4096, width=512, branches=6, slice_width=4096, outputs=4096)


def init(key: Array, sizes: Sizes) -> Params:
    """In float32, so that no small step is lost; products are of bf16 and MXFP8."""
    branch_key, projection_key = jax.random.split(key)
    branches = jax.random.normal(
        branch_key, (sizes.branches, sizes.width, sizes.slice_width)
    )
    projection = jax.random.normal(projection_key, (sizes.outputs, sizes.wide))
    return {
        "branches": branches * sizes.width**-0.5,
        "projection": projection * sizes.wide**-0.5,
        "bias": jnp.zeros(sizes.outputs),
    }


def branch(params: Params, x: Array, i: int) -> Array:
    """bfloat16 [tokens, slice_width]: one slice of the projection's input."""
    return jax.nn.silu(x @ params["branches"][i].astype(jnp.bfloat16))


def concatenated(params: Params, x: Array, weight: Array | mxfp8.PackedWeight) -> Array:
    slices = [branch(params, x, i) for i in range(len(params["branches"]))]
    return mxfp8.mm(jnp.concatenate(slices, axis=1), weight, bias=params["bias"])


def staged(
    params: Params, x: Array, weight: mxfp8.PackedWeight, storage: mxfp8.StagedInput
) -> tuple[Array, mxfp8.StagedInput]:
    storage = storage.reset()
    for i in range(len(params["branches"])):
        part = branch(params, x, i)
        column = i * part.shape[1]
        storage = mxfp8.quantize_input_slice(part, storage, column=column)
    y = mxfp8.mm_quantized(storage, weight, tokens=len(x), bias=params["bias"])
    return y, storage


@jax.jit
def train_step(params: Params, x: Array, target: Array) -> tuple[Params, Array]:
    def loss(params: Params) -> Array:
        y = concatenated(params, x, params["projection"])
        return jnp.mean((y.astype(jnp.float32) - target) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    # Per output, and smaller the more columns add up.
    num_outputs, num_columns = params["projection"].shape
    rate = LEARNING_RATE * num_outputs / num_columns / 2
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value


def median_seconds(runs: dict[str, Callable[[], Array]], repeats: int = 20) -> dict:
    """Of a call that was compiled before; the runs take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run().block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(samples[1:])) for name, samples in seconds.items()}


def output_bits(y: Array) -> np.ndarray:
    return np.asarray(y).view(np.uint16)


def print_side_by_side(rows: dict[str, tuple[str, str]]) -> None:
    print(f"{'':24}{'concatenated':>16}{'staged':>16}")
    for name, (left, right) in rows.items():
        print(f"{name:24}{left:>16}{right:>16}")


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    sizes = GPU if on_gpu else LAPTOP
    params_key, x_key, target_key = jax.random.split(jax.random.key(0), 3)
    params = init(params_key, sizes)
    x = jax.random.normal(x_key, (sizes.tokens, sizes.width), jnp.bfloat16)
    target = jax.random.normal(target_key, (sizes.tokens, sizes.outputs))
    print(
        f"{sizes.tokens} tokens, {sizes.branches} slices of {sizes.slice_width}, "
        f"{sizes.outputs} outputs, on {jax.devices()[0].device_kind}"
    )

    losses = []
    for _ in range(NUM_STEPS):
        params, loss = train_step(params, x, target)
        losses.append(float(loss))
    print("training loss through mm:", *(f"{loss:.4f}" for loss in losses))
    if not losses[-1] < losses[0]:
        raise SystemExit("training does not lower the loss")

    weight = jax.jit(mxfp8.pack_weight)(params["projection"])
    run_concatenated = partial(jax.jit(concatenated), params, x, weight)
    step = jax.jit(staged, donate_argnames="storage")
    storage = mxfp8.empty_input(sizes.tokens, sizes.wide)

    def run_staged() -> Array:
        nonlocal storage
        y, storage = step(params, x, weight, storage)
        return y

    run_staged()  # storage that was written is of another type: compiles again
    whole, parts = output_bits(run_concatenated()), output_bits(run_staged())
    seconds = median_seconds({"concatenated": run_concatenated, "staged": run_staged})
    rate = {name: f"{sizes.tokens / s:,.0f}" for name, s in seconds.items()}
    wide_bytes = sizes.tokens * sizes.wide * 2
    staged_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(storage))
    print_side_by_side(
        {
            "tokens per second": (rate["concatenated"], rate["staged"]),
            "input in bf16, bytes": (f"{wide_bytes:,}", "one slice"),
            "input in MXFP8, bytes": (f"{staged_bytes:,}", f"{staged_bytes:,}"),
            "first outputs, bits": (
                " ".join(f"{bits:04x}" for bits in whole[0, :3]),
                " ".join(f"{bits:04x}" for bits in parts[0, :3]),
            ),
        }
    )
    differ = np.count_nonzero(whole != parts)
    print(f"{differ} of {whole.size:,} outputs differ in a bit")
    if differ:
        raise SystemExit("staged and concatenated differ")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
