"""Whether products and quantised bytes are right: sampled rows and columns in float64.

Owns the verdict. The reference is the tests' NumPy oracle on the decoded operands, so a
quantiser that is wrong shows in the bytes, a product that is wrong in the product.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from mxfp8_cases import as_bytes

from jax_pcie import mxfp8

sys.path.append(str(harness.ROOT / "tests"))
import mxfp8_oracles as oracles

NUM_SAMPLED = 64  # rows and columns: 4096 outputs
NUM_RUNS = 5
# Hopper's fp8 product aligns the 32 terms of a step and the sum so far to the largest
# and keeps 13 bits below it; cuBLASLt adds every four steps (128 columns) in fp32.
FP8_ACCUMULATION = 4 * 33 * 2.0**-13


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some rows and columns of a product, and what they should be, in float64."""

    rows: np.ndarray
    columns: np.ndarray
    product: np.ndarray  # [rows, columns], of the decoded operands
    magnitude: np.ndarray  # [rows, columns], sums of |a b|
    bound: np.ndarray  # [rows, columns], how far fp32 may be from `product`
    num_terms: int

    def pick(self, output: Any) -> np.ndarray:  # noqa: ANN401
        """float64 [rows, columns] of a whole output, JAX's or PyTorch's."""
        if isinstance(output, jax.Array):
            part = output[self.rows][:, self.columns].astype(jnp.float32)
            return np.asarray(part, np.float64)
        return output[self.rows][:, self.columns].double().cpu().numpy()

    def error(self, output: Any) -> dict[str, float]:  # noqa: ANN401
        """Norm of the error over that of the product; largest error over sum |a b|."""
        difference = self.pick(output) - self.product
        norm = np.linalg.norm(difference) / np.linalg.norm(self.product)
        largest = np.max(np.abs(difference) / self.magnitude)
        return {"relative": float(norm), "largest_of_sum_abs": float(largest)}

    def verdict(self, output: Array, scale_group: int) -> list[str]:
        """What is wrong with an output of ours, in words; nothing, if it is right.

        Elementwise the bound of an fp32 sum, which a lost block of 32 terms may pass;
        so in norm as well: roundings of many outputs do not add up.
        """
        half_unit = 2.0 ** -oracles.PRECISION[np.dtype(output.dtype)]
        accumulation = FP8_ACCUMULATION if scale_group == 128 else 0.0
        bound = self.bound + accumulation * self.magnitude
        allowed = bound + half_unit * (np.abs(self.product) + bound)
        got = self.pick(output)
        outside = int(np.sum(~(np.abs(got - self.product) <= allowed)))
        norm = np.linalg.norm(got - self.product) / np.linalg.norm(self.product)
        norm_allowed = half_unit + accumulation + self.num_terms * 2.0**-24
        wrong = []
        if outside:
            wrong.append(f"{outside} of {got.size} sampled outputs outside the bound")
        if not norm <= norm_allowed:
            wrong.append(f"error of {norm:.2e} in norm, more than {norm_allowed:.2e}")
        if not_finite := int(jnp.sum(~jnp.isfinite(output))):
            wrong.append(f"{not_finite} outputs are not finite")
        return wrong


def _spread(num: int, rng: np.random.Generator) -> np.ndarray:
    """Up to 64 sorted indices below `num`, the first and the last among them."""
    if num <= NUM_SAMPLED:
        return np.arange(num)
    inner = rng.choice(np.arange(1, num - 1), NUM_SAMPLED - 2, replace=False)
    return np.concatenate([[0], np.sort(inner), [num - 1]])


def _decoded(operand: Any, rows: np.ndarray) -> np.ndarray:  # noqa: ANN401
    values, scales = as_bytes(operand.values)[rows], as_bytes(operand.scales)[rows]
    return oracles.decode(np.asarray(values), np.asarray(scales))


def sample_quantized(
    storage: mxfp8.StagedInput, weight: mxfp8.PackedWeight, seed: int = 0
) -> Sample:
    rng = np.random.default_rng(seed)
    rows = _spread(storage.max_tokens, rng)
    columns = _spread(weight.shape[0], rng)
    num_terms = weight.shape[1]
    x = _decoded(storage, rows)
    w = _decoded(weight, columns)[:, :num_terms]
    product, bound = oracles.product(x, w)
    return Sample(rows, columns, product, np.abs(x) @ np.abs(w).T, bound, num_terms)


def sample_raw(x: Array, w: Array, like: Sample) -> Sample:
    """The same rows and columns of the product of what was not quantised."""
    rows = np.asarray(x[like.rows]).astype(np.float64)
    columns = np.asarray(w[like.columns]).astype(np.float64)
    product, bound = oracles.product(rows, columns)
    magnitude = np.abs(rows) @ np.abs(columns).T
    return dataclasses.replace(like, product=product, magnitude=magnitude, bound=bound)


def num_differing(a: Array, b: Array) -> int:
    """Elements of two arrays of 16-bit floats that differ in a bit."""
    bits = [jax.lax.bitcast_convert_type(v, jnp.uint16) for v in (a, b)]
    return int(jnp.sum(bits[0] != bits[1]))


def num_unstable(call: Callable[[], Array]) -> int:
    """Outputs that differ between runs, which write to memory full of NaN."""
    first = call()
    total = 0
    for _ in range(NUM_RUNS - 1):
        # The allocator hands out next what was freed last.
        poison = [jax.block_until_ready(jnp.full_like(first, jnp.nan)) for _ in "12"]
        for array in poison:
            array.delete()
        total += num_differing(first, call())
    return total


def wrong_bytes(
    x: Array, storage: mxfp8.StagedInput, column: int = 0
) -> tuple[int, int]:
    """Values and scale bytes of a written slice that are not the oracle's; sampled."""
    rows = _spread(x.shape[0], np.random.default_rng(0))
    values, scales = oracles.quantize(np.asarray(x[rows]), columns=storage.scale_group)
    end = column + x.shape[1]
    got_values = np.asarray(as_bytes(storage.values)[rows, column:end])
    got_scales = np.asarray(as_bytes(storage.scales)[rows, column // 32 : end // 32])
    return int(np.sum(got_values != values)), int(np.sum(got_scales != scales))
