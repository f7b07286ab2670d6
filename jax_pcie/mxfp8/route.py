"""Which kernel serves a product: a function of its shape and of the GPU.

Programs decide when they are lowered, and `plan` tells users the same before that. The
rule itself is native (`ffi/cuda/mxfp8/route.cc`), beside the kernels that it knows.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_pcie import _ffi
from jax_pcie.checks import FLOAT_DTYPES, as_bool, as_int, check_dtype
from jax_pcie.mxfp8.checks import check_scale_group
from jax_pcie.mxfp8.format import GROUP


class Route(enum.IntEnum):
    """What serves a product; the numbers are those of `ffi/cuda/mxfp8/route.h`."""

    GENERIC = 0
    SMALL = 1
    GEMM = 2
    BLOCK_SCALED = 3
    NATIVE = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product would be carried out; see `plan`.

    Attributes:
        route: what serves it. GENERIC: plain JAX, decoded operands and an fp32 product.
            SMALL, GEMM: our Hopper kernels. BLOCK_SCALED, NATIVE: cuBLASLt, on Hopper
            and on Blackwell.
        workspace_bytes: device memory beside operands and result.
        reason: why, in words.
    """

    route: Route
    workspace_bytes: int
    reason: str


def choose(
    capability: int | None,
    num_tokens: int,
    num_outputs: int,
    num_columns: int,
    *,
    scale_group: int,
    dtype: np.dtype,
    has_bias: bool,
) -> Plan:
    if capability is None:
        return Plan(Route.GENERIC, 0, "no CUDA device, or no CUDA module of ours")
    if 0 in (num_tokens, num_outputs):
        return Plan(Route.GENERIC, 0, "an empty result")
    route, workspace_bytes, reason = _ffi.native_module("cuda").mxfp8_route(
        capability,
        num_tokens,
        num_outputs,
        num_columns,
        scale_group=scale_group,
        # (in the order of the kernels' enum)
        output=FLOAT_DTYPES.index(np.dtype(dtype).name),
        has_bias=has_bias,
    )
    return Plan(Route(route), workspace_bytes, reason)


def plan(
    num_tokens: int,
    num_outputs: int,
    num_columns: int,
    *,
    scale_group: int = 32,
    dtype: Any = jnp.bfloat16,  # noqa: ANN401
    has_bias: bool = False,
    device: jax.Device | None = None,
) -> Plan:
    """Says which kernel would serve a product, without running it.

    Args:
        num_tokens, num_outputs, num_columns: M, N and K of the product.
        scale_group: 32 or 128.
        dtype: bfloat16, float16 or float32, of the result.
        has_bias: whether a bias is added.
        device: where; default JAX's first device.

    Returns:
        The plan.

    Raises:
        ValueError: a size or `scale_group` does not fit.
        TypeError: `dtype` does not fit.

    Example:
        >>> plan(8, 7168, 7168, device=jax.devices("cpu")[0]).route.name
        'GENERIC'
    """
    check_scale_group("plan", scale_group)
    dtype = check_dtype("plan's dtype", dtype)
    for name, size in (
        ("num_tokens", num_tokens),
        ("num_outputs", num_outputs),
        ("num_columns", num_columns),
    ):
        size = as_int(name, size)
        if size < 0 or (name == "num_columns" and (size == 0 or size % GROUP)):
            rule = "a positive multiple of 32" if name == "num_columns" else "0 or more"
            raise ValueError(f"{name} is {size}, and must be {rule}")
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(f"device must be a jax.Device, not {device!r}")
    return choose(
        _ffi.mxfp8_device_capability(device),
        int(num_tokens),
        int(num_outputs),
        int(num_columns),
        scale_group=scale_group,
        dtype=dtype,
        has_bias=as_bool("has_bias", has_bias),
    )
