"""Checks that the operations share; all of shapes and static facts, at trace time."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_pcie.checks import as_array, check_dtype
from jax_pcie.mxfp8.format import GROUP, TILE


def not_differentiable(tree: Any, message: str) -> Any:  # noqa: ANN401
    """`tree`, but differentiating through it raises instead of giving zeros."""

    @jax.custom_vjp
    def identity(tree: Any) -> Any:  # noqa: ANN401
        return tree

    def forward(_: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError(message)

    identity.defvjp(forward, lambda *_: None)
    return identity(tree)


def check_float(op: str, name: str, x: ArrayLike) -> Array:
    # Before JAX narrows it.
    dtype = x.dtype if hasattr(x, "dtype") else as_array(op, name, x).dtype
    check_dtype(f"{op}'s {name}", dtype)
    return as_array(op, name, x)


def check_scale_group(op: str, scale_group: int) -> None:
    if not isinstance(scale_group, int) or scale_group not in (GROUP, TILE):
        raise ValueError(
            f"{op}: scale_group is {scale_group!r}, and must be {GROUP} or {TILE}"
        )


def check_is(op: str, what: str, x: object, kind: type) -> None:
    if not isinstance(x, kind):
        raise TypeError(f"{op} takes {what}, not {type(x).__name__}")
