"""How experts are chosen: the arguments of a routing call, checked once and hashable.

Errors name the argument and the rule. What the rule computes is in `ffi/topk.h`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
from jax import Array

from jax_pcie import _ffi
from jax_pcie.checks import FLOAT_DTYPES, as_bool, as_float, as_int

_ROUNDS_TO_INFINITY = 3.4028235677973366e38  # to float32, as does what is larger


class Scoring(enum.IntEnum):
    """How logits become scores; the values are those of `ffi/topk.h`."""

    SIGMOID = 0
    SOFTMAX = 1


@dataclasses.dataclass(frozen=True)
class RouteRule:
    """How experts are chosen and weighed; the arguments of `topk_route`."""

    k: int
    scoring: Scoring
    renormalize: bool
    n_group: int
    topk_group: int
    routed_scaling_factor: float

    @classmethod
    def checked(
        cls,
        op: str,
        num_experts: int,
        *,
        k: int,
        scoring: str,
        renormalize: bool,
        n_group: int,
        topk_group: int,
        routed_scaling_factor: float,
    ) -> RouteRule:
        names = [member.name.lower() for member in Scoring]
        if scoring not in names:
            raise ValueError(f"{op}: scoring must be one of {names}, not {scoring!r}")
        k = as_int(f"{op}: k", k)
        n_group = as_int(f"{op}: n_group", n_group)
        topk_group = as_int(f"{op}: topk_group", topk_group)
        renormalize = as_bool(f"{op}: renormalize", renormalize)
        if not 1 <= k <= min(_ffi.MAX_CHOSEN, num_experts):
            raise ValueError(
                f"{op}: k is {k}; it must be at least 1, at most {_ffi.MAX_CHOSEN} and "
                f"at most the number of experts, {num_experts}"
            )
        if n_group < 1 or num_experts % n_group:
            raise ValueError(
                f"{op}: n_group is {n_group}; it must divide the number of experts, "
                f"{num_experts}"
            )
        if not 1 <= topk_group <= n_group:
            raise ValueError(
                f"{op}: topk_group is {topk_group}; it must be at least 1 and at most "
                f"n_group, {n_group}"
            )
        factor = as_float(f"{op}: routed_scaling_factor", routed_scaling_factor)
        if not abs(factor) < _ROUNDS_TO_INFINITY:  # (NaN neither)
            raise ValueError(
                f"{op}: routed_scaling_factor is {routed_scaling_factor}; it must be a "
                "finite float32"
            )
        factor = float(np.float32(factor))
        return cls(
            k, Scoring[scoring.upper()], renormalize, n_group, topk_group, factor
        )

    def attributes(self, has_bias: bool) -> dict[str, Any]:
        """What the native handlers are told."""
        return {
            "k": np.int32(self.k),
            "scoring": np.int32(self.scoring),
            "renormalize": np.bool_(self.renormalize),
            "n_group": np.int32(self.n_group),
            "topk_group": np.int32(self.topk_group),
            "routed_scaling_factor": np.float32(self.routed_scaling_factor),
            "has_bias": np.bool_(has_bias),
        }


def check_logits_dtype(op: str, dtype: np.dtype) -> None:
    if dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: logits have dtype {dtype.name}; they must be one of "
            f"{', '.join(FLOAT_DTYPES)}"
        )


def check_logits(op: str, logits: Array, bias: Array | None, num_experts: int) -> None:
    """Raises unless `logits` and `bias` are what rows of that many experts have."""
    check_logits_dtype(op, logits.dtype)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}; it must be [rows, experts]"
        )
    if bias is None:
        return
    if bias.dtype != np.float32:
        raise TypeError(f"{op}: bias has dtype {bias.dtype.name}; it must be float32")
    if bias.shape != (num_experts,):
        raise ValueError(
            f"{op}: bias has shape {bias.shape}; it must be ({num_experts},), a value "
            "for each expert of all ranks"
        )
