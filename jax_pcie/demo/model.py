"""The sentence encoder (BERT, 6 layers) in plain JAX, whole or one tensor rank's part.

One forward pass serves both: a rank holds some of the heads and some of the MLP, and
`row_sum` adds up what the ranks contribute; for the whole model it is the identity. The
layers are stacked and scanned, so XLA compiles one layer and not six.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jax_pcie.demo.packing import Batch

NUM_LAYERS = 6
NUM_HEADS = 12
HIDDEN = 384
HEAD = HIDDEN // NUM_HEADS
MAX_TOKENS = 512
# The output projections of attention and MLP are row-parallel: each ends in a sum.
NUM_SUMS = 2 * NUM_LAYERS
_NORM_EPSILON = 1e-12


class Norm(NamedTuple):
    """A layer normalisation's parameters."""

    scale: Array
    bias: Array


class Layers(NamedTuple):
    """All layers, stacked along the first axis, or one of them without it."""

    qkv_kernel: Array  # [layers, hidden, 3, heads, head]
    qkv_bias: Array  # [layers, 3, heads, head]
    mix_kernel: Array  # [layers, heads, head, hidden]: the attention's output
    mix_bias: Array  # [layers, hidden]
    mix_norm: Norm
    up_kernel: Array  # [layers, hidden, intermediate]
    up_bias: Array  # [layers, intermediate]
    down_kernel: Array  # [layers, intermediate, hidden]: the MLP's output
    down_bias: Array  # [layers, hidden]
    down_norm: Norm


class Weights(NamedTuple):
    """The whole model."""

    words: Array  # [vocabulary, hidden]
    positions: Array  # [positions, hidden], with the only token type added in
    norm: Norm
    layers: Layers


def from_tensors(tensors: Mapping[str, np.ndarray]) -> Weights:
    """Arranges the published tensors as the forward pass wants them."""

    def stack(name: str) -> np.ndarray:
        parts = [tensors[f"encoder.layer.{i}.{name}"] for i in range(NUM_LAYERS)]
        return np.stack(parts)

    def kernel(name: str) -> np.ndarray:
        return stack(f"{name}.weight").swapaxes(1, 2)  # published as [out, in]

    def norm(name: str) -> Norm:
        return Norm(stack(f"{name}.weight"), stack(f"{name}.bias"))

    qkv = [f"attention.self.{part}" for part in ("query", "key", "value")]
    qkv_kernel = np.stack([kernel(part) for part in qkv], axis=2)
    qkv_bias = np.stack([stack(f"{part}.bias") for part in qkv], axis=1)
    mix_kernel = kernel("attention.output.dense")
    return Weights(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"]
        + tensors["embeddings.token_type_embeddings.weight"][0],
        norm=Norm(
            tensors["embeddings.LayerNorm.weight"],
            tensors["embeddings.LayerNorm.bias"],
        ),
        layers=Layers(
            qkv_kernel=qkv_kernel.reshape(NUM_LAYERS, HIDDEN, 3, NUM_HEADS, HEAD),
            qkv_bias=qkv_bias.reshape(NUM_LAYERS, 3, NUM_HEADS, HEAD),
            mix_kernel=mix_kernel.reshape(NUM_LAYERS, NUM_HEADS, HEAD, HIDDEN),
            mix_bias=stack("attention.output.dense.bias"),
            mix_norm=norm("attention.output.LayerNorm"),
            up_kernel=kernel("intermediate.dense"),
            up_bias=stack("intermediate.dense.bias"),
            down_kernel=kernel("output.dense"),
            down_bias=stack("output.dense.bias"),
            down_norm=norm("output.LayerNorm"),
        ),
    )


def keep_used_words(weights: Weights, batch: Batch) -> tuple[Weights, Batch]:
    """Drops the words that `batch` does not name and renumbers the ones it does.

    Every rank holds the table: 47 MB, half of the model, of which a batch of 256
    sentences reads a thirtieth.
    """
    used, ids = np.unique(batch.ids, return_inverse=True)
    ids = ids.reshape(batch.ids.shape).astype(np.int32)
    return weights._replace(words=weights.words[used]), batch._replace(ids=ids)


def partition(axis: str) -> Weights:
    """Returns each weight's `PartitionSpec` when `axis` splits heads and MLP."""
    whole = Norm(P(), P())
    return Weights(
        words=P(),
        positions=P(),
        norm=whole,
        layers=Layers(
            qkv_kernel=P(None, None, None, axis),
            qkv_bias=P(None, None, axis),
            mix_kernel=P(None, axis),
            mix_bias=P(),
            mix_norm=whole,
            up_kernel=P(None, None, axis),
            up_bias=P(None, axis),
            down_kernel=P(None, axis),
            down_bias=P(),
            down_norm=whole,
        ),
    )


def embed(
    weights: Weights,
    batch: Batch,
    num_segments: int,
    row_sum: Callable[[Array], Array] = lambda partial: partial,
) -> Array:
    """Embeds sentences: encoder, mean over a sentence's tokens, unit length.

    Args:
        weights: the model, or a tensor rank's part of it as `partition` cuts it.
        batch: packed sentences, ids being rows of ``weights.words``.
        num_segments: the most sentences that a row has.
        row_sum: sums float32 ``[rows * tokens, hidden]`` over the tensor ranks.
    Returns:
        float32 ``[rows, num_segments, hidden]``; zero where a row has no such segment.
    Source: Devlin et al. 2019 (BERT); Reimers and Gurevych 2019 (pooling).
    """
    num_rows, num_tokens = batch.ids.shape
    # [rows, 1, tokens, tokens]: who sees whom, for all heads
    visible = (batch.segments[:, :, None] == batch.segments[:, None, :])[:, None]
    # Tokens stay flat: XLA's CPU backend multiplies [8192, 384] by [384, 1536] in
    # 61 ms and [256, 32, 384] by the same in 88 ms (two cores).
    x = (weights.words[batch.ids] + weights.positions[batch.positions]).reshape(
        num_rows * num_tokens, HIDDEN
    )
    x = _normalize(x, weights.norm)

    def run_layer(x: Array, layer: Layers) -> tuple[Array, None]:
        # The biases of row-parallel products come after the sum: once, not once a rank.
        mixed = row_sum(_attend(x, layer, visible)) + layer.mix_bias
        x = _normalize(x + mixed, layer.mix_norm)
        expanded = jax.nn.gelu(x @ layer.up_kernel + layer.up_bias, approximate=False)
        contracted = row_sum(expanded @ layer.down_kernel) + layer.down_bias
        return _normalize(x + contracted, layer.down_norm), None

    x, _ = lax.scan(run_layer, x, weights.layers)
    members = jax.nn.one_hot(batch.segments, num_segments)  # [rows, tokens, segments]
    # A sum serves for the mean: the division cancels in the unit length.
    pooled = jnp.einsum(
        "rts,rth->rsh", members, x.reshape(num_rows, num_tokens, HIDDEN)
    )
    length = jnp.linalg.norm(pooled, axis=-1, keepdims=True)
    return pooled / jnp.maximum(length, jnp.finfo(length.dtype).tiny)


def _attend(x: Array, layer: Layers, visible: Array) -> Array:
    """Attention with the heads that `layer` holds, without the output's bias."""
    num_rows, _, num_tokens, _ = visible.shape
    qkv = x @ layer.qkv_kernel.reshape(HIDDEN, -1) + layer.qkv_bias.reshape(-1)
    # Each [rows, tokens, heads, head]
    query, key, value = jnp.moveaxis(
        qkv.reshape(num_rows, num_tokens, *layer.qkv_bias.shape), 2, 0
    )
    logits = jnp.einsum("rqnd,rknd->rnqk", query, key) / np.sqrt(HEAD)
    logits = jnp.where(visible, logits, -jnp.inf)  # a token always sees itself
    mixed = jnp.einsum("rnqk,rknd->rqnd", jax.nn.softmax(logits), value)
    return mixed.reshape(len(x), -1) @ layer.mix_kernel.reshape(-1, HIDDEN)


def _normalize(x: Array, norm: Norm) -> Array:
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    return x * lax.rsqrt(variance + _NORM_EPSILON) * norm.scale + norm.bias
