"""What `mxfp8.plan` says a product will be served by."""

import jax
import jax.numpy as jnp
import pytest
from conftest import first_devices

from jax_pcie import mxfp8
from jax_pcie.mxfp8 import Route


def test_a_cpu_uses_plain_jax() -> None:
    plan = mxfp8.plan(8, 132, 128, device=jax.devices("cpu")[0])
    assert plan.route is Route.GENERIC
    assert plan.workspace_bytes == 0


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_tokens", "scale_group", "route"),
    [
        (0, 32, Route.GENERIC),
        (1, 32, Route.SMALL),
        (64, 128, Route.SMALL),
        (65, 32, Route.GEMM),
        (4096, 32, Route.GEMM),
        (4096, 128, Route.BLOCK_SCALED),
        (4097, 128, Route.GEMM),  # cuBLASLt takes tokens in multiples of 4
    ],
)
def test_hopper_chooses_by_shape(
    num_tokens: int, scale_group: int, route: Route
) -> None:
    (device,) = first_devices("cuda", 1)
    if device.compute_capability != "9.0":
        pytest.skip(f"needs compute capability 9.0, not {device.compute_capability}")
    plan = mxfp8.plan(num_tokens, 7168, 7168, scale_group=scale_group, device=device)
    assert plan.route is route


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 8, 32), "num_tokens is -1"),
        ((1, -8, 32), "num_outputs is -8"),
        ((1, 8, 48), "num_columns is 48, and must be a positive multiple of 32"),
        ((1, 8, 0), "num_columns is 0"),
    ],
)
def test_sizes_that_no_product_has_are_refused(
    sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mxfp8.plan(*sizes)


def test_other_dtypes_and_scale_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="int8"):
        mxfp8.plan(1, 8, 32, dtype=jnp.int8)
    with pytest.raises(ValueError, match="scale_group is 64"):
        mxfp8.plan(1, 8, 32, scale_group=64)
