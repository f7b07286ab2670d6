"""The sentence encoder once more, in NumPy: slow, float64, one sentence at a time.

Shares nothing with `model` but the published tensors: no padding and no packing, so no
mask; one head at a time; the Gauss error function of Python's `math`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

_NUM_LAYERS = 6
_HEAD = 32
_LONGEST_DOT = 1536

# How far a float32 forward pass may be from this one, in any component of an embedding.
# A product over K terms is off by about sqrt(K) half-ulps of its length, the roundings
# being independent; the two products that end a layer's halves add that to x, and each
# normalisation takes the length out again.
TOLERANCE = 2 * _NUM_LAYERS * math.sqrt(_LONGEST_DOT) * 2.0**-24

_erf = np.frompyfunc(math.erf, 1, 1)


def embed(
    tensors: Mapping[str, np.ndarray], sentences: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns the embeddings of token ids, float64 ``[sentences, hidden]``."""
    exact = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    return np.stack([_embed_one(exact, np.asarray(ids)) for ids in sentences])


def _embed_one(tensors: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = x + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + tensors["embeddings.token_type_embeddings.weight"][0]
    x = _layer_norm(tensors, "embeddings.LayerNorm", x)
    for i in range(_NUM_LAYERS):
        x = _layer(tensors, f"encoder.layer.{i}", x)
    mean = x.mean(axis=0)
    return mean / math.sqrt(mean @ mean)


def _layer(tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    query = _linear(tensors, f"{name}.attention.self.query", x)
    key = _linear(tensors, f"{name}.attention.self.key", x)
    value = _linear(tensors, f"{name}.attention.self.value", x)
    mixed = np.empty_like(x)
    for start in range(0, x.shape[1], _HEAD):
        head = np.s_[:, start : start + _HEAD]
        attention = np.exp(query[head] @ key[head].T / math.sqrt(_HEAD))
        attention /= attention.sum(axis=1, keepdims=True)
        mixed[head] = attention @ value[head]
    x = x + _linear(tensors, f"{name}.attention.output.dense", mixed)
    x = _layer_norm(tensors, f"{name}.attention.output.LayerNorm", x)
    hidden = _linear(tensors, f"{name}.intermediate.dense", x)
    hidden *= (1 + _erf(hidden / math.sqrt(2)).astype(np.float64)) / 2
    x = x + _linear(tensors, f"{name}.output.dense", hidden)
    return _layer_norm(tensors, f"{name}.output.LayerNorm", x)


def _linear(tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def _layer_norm(
    tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray
) -> np.ndarray:
    x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(
        x.var(axis=1, keepdims=True) + 1e-12
    )
    return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
