"""The native modules and everything that depends on JAX's version.

Imports the CPU module, and the CUDA module (if it was built) once it is needed;
registers their FFI targets then; and hides what JAX versions name differently.
Importing this touches no device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import dispatch  # see register_between_ranks
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_pcie.wire import Codec

Tree = TypeVar("Tree")


class PcieError(RuntimeError):
    """A peer group is closed, broken, used after fork, or could not be made."""

    __module__ = "jax_pcie"


def runtime_ffi_minor() -> int:
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    return int(re.search(r"XLA_FFI_API_MINOR (\d+)", header.read_text())[1])


def require_ffi_minor(built_with: int, runtime: int) -> None:
    """Refuses an extension that is newer than the installed jaxlib.

    JAX itself would report it late, by taking the user's whole backend down.
    """
    if built_with > runtime:
        raise ImportError(
            f"jax_pcie was built with XLA FFI API 0.{built_with}, and the installed "
            f"jaxlib {jax.lib.__version__} has 0.{runtime}. Upgrade jaxlib to the "
            "version that jax_pcie was built with, or rebuild jax_pcie against the "
            "installed one: pip install --force-reinstall --no-deps jax_pcie"
        )


@functools.cache
def _load(name: str) -> ModuleType:
    module = importlib.import_module(f"jax_pcie.{name}")
    require_ffi_minor(module.ffi_api_minor, runtime_ffi_minor())
    module.set_error_type(PcieError)
    return module


if importlib.util.find_spec("jax_pcie._cpu") is None:
    raise ImportError(
        "jax_pcie's native module is missing: the package was not built. Install it "
        "with `pip install .` in its source folder"
    )
_cpu = _load("_cpu")
_MODULE_NAMES = {"cpu": "_cpu", "cuda": "_cuda"}


@functools.cache
def has_native_module(platform: str) -> bool:
    """Whether the platform's module was built."""
    return importlib.util.find_spec(f"jax_pcie.{_MODULE_NAMES[platform]}") is not None


@functools.cache
def native_module(platform: str) -> ModuleType:
    """The platform's module with its targets registered.

    Called when a group is made and when a program is lowered, never before: registering
    a state type before the backend exists would take the CPU backend down.
    """
    name = _MODULE_NAMES.get(platform)
    if name is None:
        raise PcieError(
            f"jax_pcie runs on cpu and cuda devices, not on {platform!r} devices"
        )
    if not has_native_module(platform):
        raise PcieError(
            "jax_pcie was built without its CUDA module: no nvcc was found. Install a "
            "CUDA toolkit and reinstall jax_pcie"
        )
    module = _load(name)
    target_platform = {"cpu": "cpu", "cuda": "CUDA"}[platform]
    jax.ffi.register_ffi_type(
        f"jax_pcie.CallSite.{platform}",
        module.call_site_type(),
        platform=target_platform,
    )
    for target, stages in module.handlers().items():
        jax.ffi.register_ffi_target(target, stages, platform=target_platform)
    return module


def mxfp8_device_capability(device: jax.Device) -> int | None:
    """Ten times the compute capability, if our CUDA kernels can run on `device`."""
    if platform_of(device) != "cuda" or not has_native_module("cuda"):
        return None
    capability = round(10 * float(device.compute_capability))
    return capability if capability >= 80 else None


def mxfp8_capability(ctx: Any) -> int | None:  # noqa: ANN401
    """That of the devices a lowering is for; the public API does not say which.

    An exported program may run anywhere, and a program of a process whose GPUs differ
    on any of them: they get no kernel of ours.
    """
    module = ctx.module_context
    backend = module.get_backend(optional=True)
    if backend is None or module.lowering_parameters.for_export:
        return None
    capabilities = {mxfp8_device_capability(d) for d in backend.local_devices()}
    capability = capabilities.pop() if len(capabilities) == 1 else None
    if capability is not None:
        native_module("cuda")
    return capability


def device_ordinal(device: jax.Device) -> int:
    """The number by which an FFI handler knows `device`."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def platform_of(device: jax.Device) -> str:
    """``"cpu"`` or ``"cuda"``: the name under which lowerings are registered."""
    return "cuda" if device.platform in ("gpu", "cuda") else device.platform


# --- Varying axes: which manual axes a value differs along.


def varying_axes(x: Any) -> frozenset[str]:  # noqa: ANN401
    """The manual axes over which an array or an abstract value varies."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return frozenset(aval.manual_axis_type.varying)


def without_varying_axis(aval: Any, axis: str) -> Any:  # noqa: ANN401
    """`aval` as a reduction over `axis` types it: equal on all ranks of `axis`."""
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - {axis}))


def checks_varying_axes(axis: str) -> bool:
    """Whether the enclosing `shard_map` runs with ``check_vma=True``."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def vary_alike(tree: Tree, *axes: str) -> Tree:
    """`tree`, each array typed as varying over `axes` and what any of them varies over.

    So a weight that all ranks share gets the sum of their gradients.
    """
    union = frozenset(axes).union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(union - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


# --- Lowering calls between ranks


def register_between_ranks(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers ``rule(platform, ctx, *operands, **params)`` for both platforms.

    JAX lowers `primitive` anew for every device assignment: it caches lowered programs
    by abstract mesh, which has no devices, so that a program that was lowered for one
    mesh would be used for another of the same shape, and sum over the wrong devices.
    There is no public way to say so in JAX 0.10.2 to 0.12.
    """
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(
            primitive,
            functools.partial(rule, platform),
            platform=platform,
            cacheable=False,  # a shared function would take calls out of their order
        )
    dispatch.prim_requires_devices_during_lowering.add(primitive)


_ordered_targets: set[str] = set()  # of GPUs; each of their calls ends with a token


def lower_between_ranks(platform: str, target: str) -> Callable[..., list[Any]]:
    """How a call between ranks is lowered: on GPUs they have an order."""
    if platform == "cuda":
        _ordered_targets.add(target)
        return functools.partial(lower_in_order, target)
    return jax.ffi.ffi_lowering(target)


def lowering_mesh(ctx: Any) -> jax.sharding.Mesh:  # noqa: ANN401
    """The mesh, with its devices, of the `shard_map` that is being lowered.

    `ctx.module_context` is not public; a lowering rule has no public way to devices.
    """
    module = ctx.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    exported = module.lowering_parameters.for_export
    if exported or not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            "a peer group belongs to devices, and here is a program without them (an "
            "export, an abstract mesh, or a shard_map within another): pass one "
            "shard_map the mesh that the group was made for"
        )
    return mesh


def lower_in_order(target: str, ctx: Any, *operands: Any, **attributes: Any) -> list:  # noqa: ANN401
    """`jax.ffi.ffi_lowering`, after the block's last call between ranks.

    Under ``--xla_gpu_command_buffer_scheduling_mode=CONCURRENT`` (not the default) XLA
    runs calls without a data dependency at once, in an order of each GPU's own. Ours
    wait for each other across GPUs, with all of a GPU's SMs, and would never meet. So
    each call also writes a token of four bytes, which the next one takes as an operand
    and does not read. Functions that JAX lowers apart (`jax.checkpoint`, `custom_jvp`,
    an inner `jit`) have an order within, and none among each other: there such calls
    end as an error, never as a wrong sum, because every flag carries its call site.
    """
    token = jax.core.ShapedArray((1,), np.int32)
    after = [
        list(operation.results)[-1]
        for operation in ir.InsertionPoint.current.block.operations
        if operation.operation.name == "stablehlo.custom_call"
        and ir.StringAttr(operation.attributes["call_target_name"]).value
        in _ordered_targets
    ][-1:]
    ctx = ctx.replace(
        avals_in=[*ctx.avals_in, *(token for _ in after)],
        avals_out=[*ctx.avals_out, token],
    )
    results = jax.ffi.ffi_lowering(target)(ctx, *operands, *after, **attributes)
    return list(results)[:-1]


MAX_WORLD_SIZE: int = _cpu.max_world_size  # ranks that peers serve

# --- Expert selection

MAX_FUSED_EXPERTS: int = _cpu.max_fused_experts
MAX_CHOSEN: int = _cpu.max_chosen_experts


# --- The wire


def wire_bytes(
    codec: int, topology: int, dtype: str, count: int, world_size: int
) -> int:
    """The most bytes that any rank sends in an all-reduce of `count` elements."""
    return _cpu.wire_bytes(codec, topology, dtype, count, world_size)


def codec_encode(codec: Codec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a span: ``(payload, scales)`` as bytes, as a record holds them.

    Args:
        codec: the codec.
        x: ``[values]`` bfloat16, float16 or float32, beginning at a block boundary.
    """
    return _cpu.codec_encode(int(codec), x.dtype.name, _bytes_of(x))


def codec_decode(
    codec: Codec, payload: np.ndarray, scales: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Decodes what `codec_encode` made, into ``[values]`` of `dtype`."""
    dtype = np.dtype(dtype)
    raw = _cpu.codec_decode(
        int(codec), dtype.name, _bytes_of(payload), _bytes_of(scales)
    )
    return raw.view(dtype)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
