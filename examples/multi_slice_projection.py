"""A small model with a projection whose input arrives in slices, kept only as MXFP8.

Four branches each make one slice of a wide feature vector, and one projection reads all
of them. Training multiplies the concatenation (`mm`, which has gradients); inference
stages each slice as it appears (`mm_quantized`) and gives the same bits, without the
wide bf16 array. Runs anywhere: ``python examples/multi_slice_projection.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_pcie import mxfp8

TOKENS, WIDTH, BRANCHES, SLICE, OUTPUTS = 256, 64, 4, 512, 132
LEARNING_RATE = 0.5
Params = dict[str, Array]


def init(key: Array) -> Params:
    branch_key, projection_key = jax.random.split(key)
    branches = jax.random.normal(branch_key, (BRANCHES, WIDTH, SLICE)) * WIDTH**-0.5
    projection = jax.random.normal(projection_key, (OUTPUTS, BRANCHES * SLICE))
    return {
        "branches": branches.astype(jnp.bfloat16),
        "projection": (projection * (BRANCHES * SLICE) ** -0.5).astype(jnp.bfloat16),
        "bias": jnp.zeros(OUTPUTS),
    }


def branch(params: Params, x: Array, i: int) -> Array:
    """[tokens, SLICE]: one slice of the projection's input."""
    return jax.nn.silu(x @ params["branches"][i])


def concatenated(params: Params, x: Array, weight: Array | mxfp8.PackedWeight) -> Array:
    wide = jnp.concatenate([branch(params, x, i) for i in range(BRANCHES)], axis=1)
    return mxfp8.mm(wide, weight, bias=params["bias"])


def staged(
    params: Params, x: Array, weight: mxfp8.PackedWeight, storage: mxfp8.StagedInput
) -> tuple[Array, mxfp8.StagedInput]:
    storage = storage.reset()
    for i in range(BRANCHES):
        storage = mxfp8.quantize_input_slice(
            branch(params, x, i), storage, column=i * SLICE
        )
    y = mxfp8.mm_quantized(storage, weight, tokens=len(x), bias=params["bias"])
    return y, storage


@jax.jit
def train_step(params: Params, x: Array, target: Array) -> tuple[Params, Array]:
    def loss(params: Params) -> Array:
        y = concatenated(params, x, params["projection"])
        return jnp.mean((y.astype(jnp.float32) - target) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    step = jax.tree.map(
        lambda p, g: (p - LEARNING_RATE * g).astype(p.dtype), params, gradients
    )
    return step, value


def tokens_per_second(run: Callable[[], Array], repeats: int = 20) -> float:
    """By the median time of a call that was compiled before."""
    run().block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return TOKENS / float(np.median(seconds))


def main() -> None:
    params_key, x_key, target_key = jax.random.split(jax.random.key(0), 3)
    params = init(params_key)
    x = jax.random.normal(x_key, (TOKENS, WIDTH), jnp.bfloat16)
    target = jax.random.normal(target_key, (TOKENS, OUTPUTS))

    losses = []
    for _ in range(5):
        params, loss = train_step(params, x, target)
        losses.append(float(loss))
    print("loss                 ", " ".join(f"{loss:.4f}" for loss in losses))

    weight = mxfp8.pack_weight(params["projection"])
    run_concatenated = jax.jit(concatenated)
    run_staged = jax.jit(staged, donate_argnames="storage")
    storage = mxfp8.empty_input(TOKENS, BRANCHES * SLICE)

    def next_staged() -> Array:
        nonlocal storage
        y, storage = run_staged(params, x, weight, storage)
        return y

    whole, parts = np.asarray(run_concatenated(params, x, weight)), next_staged()
    differ = np.count_nonzero(
        whole.view(np.uint16) != np.asarray(parts).view(np.uint16)
    )
    print(f"bits that differ      {differ} of {whole.size} outputs")

    wide_bytes = TOKENS * BRANCHES * SLICE * 2
    staged_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(storage))
    print(f"input alive           {wide_bytes} bytes concatenated in bf16, to be")
    print(f"                      quantised; {staged_bytes} bytes staged, all there is")
    rate = tokens_per_second(partial(run_concatenated, params, x, weight))
    print(f"concatenated          {rate:.0f} tokens/s on {jax.default_backend()}")
    print(f"staged                {tokens_per_second(next_staged):.0f} tokens/s")
    if differ:
        raise SystemExit("staged and concatenated differ")


if __name__ == "__main__":
    main()
