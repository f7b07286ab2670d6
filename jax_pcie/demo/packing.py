"""Packs sentences of different lengths into rows of one length.

Padding each sentence to the longest would double the demo's arithmetic and put zeros on
the wire. Here several sentences share a row; `Batch.segments` tells them apart, and the
attention of `model` stays inside a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PADDING = -1


class Batch(NamedTuple):
    """Packed sentences, int32 ``[rows, tokens]`` each."""

    ids: np.ndarray  # which word
    positions: np.ndarray  # of the token in its sentence
    segments: np.ndarray  # which sentence of its row; PADDING where there is none


def pack(
    sentences: Sequence[Sequence[int]], row_tokens: int, multiple: int
) -> tuple[Batch, np.ndarray]:
    """Packs token ids, first fit, longest first.

    Args:
        sentences: token ids, at most `row_tokens` a sentence and at least one.
        row_tokens: tokens in a row.
        multiple: the number of rows becomes a multiple of this, with empty rows.
    Returns:
        The batch, and int ``[sentences, 2]``: each one's row and segment.
    Raises:
        ValueError: a sentence is empty or too long.
    """
    rows: list[list[int]] = []  # the sentences in each
    used: list[int] = []  # tokens of each
    for index in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        length = len(sentences[index])
        if not 0 < length <= row_tokens:
            raise ValueError(
                f"sentence {index} has {length} tokens, a row takes 1 to {row_tokens}"
            )
        fits = (row for row, n in enumerate(used) if n + length <= row_tokens)
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(index)
        used[row] += length

    num_rows = -(-len(rows) // multiple) * multiple
    batch = Batch(*np.zeros((3, num_rows, row_tokens), np.int32))
    batch.segments[:] = PADDING
    places = np.zeros((len(sentences), 2), np.int32)
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members):
            span = slice(start, start + len(sentences[index]))
            batch.ids[row, span] = sentences[index]
            batch.positions[row, span] = np.arange(len(sentences[index]))
            batch.segments[row, span] = segment
            places[index] = row, segment
            start = span.stop
    return batch, places
