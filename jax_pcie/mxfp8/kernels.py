"""The primitives of the staged linear: quantise, quantise in place, multiply.

Each has a lowering through plain JAX (`format`, `product`), which any platform can run,
and one to our kernels on CUDA; `route` says which kernel serves a product. Operands are
uint8 here, float8 only in the public API. Sections read: function, primitive, abstract
evaluation, lowerings, batching. Gradients are defined above, in `gradient`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_pcie import _ffi
from jax_pcie.mxfp8 import format, product
from jax_pcie.mxfp8.format import GROUP, NAN_SCALE, Operand
from jax_pcie.mxfp8.route import Route, choose


def _lower_generic(function: Any, ctx: Any, *args: Any, **params: Any) -> Any:  # noqa: ANN401
    """Lowers what plain JAX says, also where values are typed as varying over ranks."""
    avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    rule = mlir.lower_fun(function, multiple_results=True)
    return rule(ctx.replace(avals_in=avals), *args, **params)


def _lower_kernel(
    target: str,
    ctx: Any,  # noqa: ANN401
    *args: Any,  # noqa: ANN401
    aliases: dict[int, int] | None = None,
    workspace_bytes: int = 0,
    **attributes: Any,  # noqa: ANN401
) -> list[Any]:
    """The custom call; with a workspace as a last result, which nobody sees."""
    num_results = len(ctx.avals_out)
    if workspace_bytes:
        workspace = jax.core.ShapedArray((workspace_bytes,), np.uint8)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return list(rule(ctx, *args, **attributes))[:num_results]


# --- quantize: [rows, K] to an operand of its own


@partial(jax.jit, static_argnames="scale_group", inline=True)
def quantize_rows(x: Array, scale_group: int) -> Operand:
    """Quantises with one scale per row and `scale_group` columns."""
    return Operand(*quantize_p.bind(x, scale_group=scale_group))


quantize_p = Primitive("jax_pcie_mxfp8_quantize")
quantize_p.multiple_results = True


@quantize_p.def_abstract_eval
def _quantize_abstract(x: Any, *, scale_group: int) -> list[Any]:  # noqa: ANN401
    rows, columns = x.shape
    return [
        x.update(shape=(rows, columns), dtype=np.dtype(np.uint8)),
        x.update(shape=(rows, columns // GROUP), dtype=np.dtype(np.uint8)),
    ]


def _quantize_generic(x: Array, *, scale_group: int) -> Operand:
    return format.quantize(x, columns=scale_group)


def _quantize_cuda(ctx: Any, x: Any, *, scale_group: int) -> Any:  # noqa: ANN401
    if _ffi.mxfp8_capability(ctx) is None or ctx.avals_in[0].size == 0:
        return _lower_generic(_quantize_generic, ctx, x, scale_group=scale_group)
    return _lower_kernel(
        "jax_pcie.mxfp8_quantize",
        ctx,
        x,
        column=np.int64(0),
        scale_group=np.int64(scale_group),
    )


mlir.register_lowering(quantize_p, partial(_lower_generic, _quantize_generic))
mlir.register_lowering(quantize_p, _quantize_cuda, platform="cuda")


def _quantize_batching(
    args: tuple[Array], dims: tuple[int], *, scale_group: int
) -> tuple[list[Array], list[int]]:
    x = jnp.moveaxis(args[0], dims[0], 0)
    size, num_rows, num_columns = x.shape
    rows = x.reshape(size * num_rows, num_columns)
    rows = quantize_p.bind(rows, scale_group=scale_group)
    return [y.reshape(*x.shape[:2], y.shape[-1]) for y in rows], [0, 0]


batching.primitive_batchers[quantize_p] = _quantize_batching

# --- quantize_into: [rows, w] to columns of a wider operand, in place


def quantize_into(
    x: Array, storage: Operand, column: int | Array, scale_group: int
) -> Operand:
    """Quantises `x` into rows 0 … of columns ``column …`` of `storage`.

    Args:
        x: [rows, w].
        storage: aliased to the result.
        column: where; an int32 scalar may also be ``~column``, which makes the scales
            NaN.
        scale_group: 32 or 128.
    """
    if isinstance(column, int):
        return _quantize_into(x, storage, (), column, scale_group)
    return _quantize_into(x, storage, (column,), None, scale_group)


@partial(jax.jit, static_argnames=("column", "scale_group"), inline=True)
def _quantize_into(
    x: Array,
    storage: Operand,
    traced: tuple[Array, ...],
    column: int | None,
    scale_group: int,
) -> Operand:
    return Operand(
        *quantize_into_p.bind(
            x, *storage, *traced, column=column, scale_group=scale_group
        )
    )


quantize_into_p = Primitive("jax_pcie_mxfp8_quantize_into")
quantize_into_p.multiple_results = True


@quantize_into_p.def_abstract_eval
def _quantize_into_abstract(
    x: Any,  # noqa: ANN401
    values: Any,  # noqa: ANN401
    scales: Any,  # noqa: ANN401
    *_: Any,  # noqa: ANN401
    **__: object,
) -> list[Any]:
    return [values.update(), scales.update()]


def _quantize_into_generic(
    x: Array,
    values: Array,
    scales: Array,
    *traced: Array,
    column: int | None,
    scale_group: int,
) -> list[Array]:
    rows = format.quantize(x, columns=scale_group)
    new_scales = rows.scales
    if traced:
        (given,) = traced
        new_scales = jnp.where(given < 0, NAN_SCALE, new_scales)
        column = jnp.where(given < 0, ~given, given)
    # In place where XLA can: the result aliases a donated storage. XLA:CPU still passes
    # over the whole array once (1.8 ns a byte), because the type changes around it.
    return [
        lax.dynamic_update_slice_in_dim(values, rows.values, column, axis=1),
        lax.dynamic_update_slice_in_dim(scales, new_scales, column // GROUP, axis=1),
    ]


def _quantize_into_cuda(
    ctx: Any,  # noqa: ANN401
    *args: Any,  # noqa: ANN401
    column: int | None,
    scale_group: int,
) -> Any:  # noqa: ANN401
    if _ffi.mxfp8_capability(ctx) is None or ctx.avals_in[0].size == 0:
        return _lower_generic(
            _quantize_into_generic, ctx, *args, column=column, scale_group=scale_group
        )
    return _lower_kernel(
        "jax_pcie.mxfp8_quantize",
        ctx,
        *args,
        aliases={1: 0, 2: 1},
        column=np.int64(-1 if column is None else column),
        scale_group=np.int64(scale_group),
    )


mlir.register_lowering(quantize_into_p, partial(_lower_generic, _quantize_into_generic))
mlir.register_lowering(quantize_into_p, _quantize_into_cuda, platform="cuda")


def _map_batching(
    primitive: Primitive,
    args: tuple[Array, ...],
    dims: tuple[int | None, ...],
    **params: object,
) -> tuple[list[Array], list[int]]:
    """One call after the other; what is not batched is shared."""
    is_batched = [dim is not None for dim in dims]
    batched = [
        jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
        if dim is not None
    ]

    def call(elements: list[Array]) -> list[Array]:
        rest = iter(elements)
        each = (
            next(rest) if own else x for own, x in zip(is_batched, args, strict=True)
        )
        return primitive.bind(*each, **params)

    results = lax.map(call, batched)
    return results, [0] * len(results)


batching.primitive_batchers[quantize_into_p] = partial(_map_batching, quantize_into_p)

# --- multiply


@partial(
    jax.jit,
    static_argnames=("num_tokens", "num_outputs", "scale_group", "dtype"),
    inline=True,
)
def multiply(
    x: Operand,
    w: Operand,
    *,
    num_tokens: int,
    num_outputs: int,
    scale_group: int,
    dtype: np.dtype,
    bias: Array | None = None,
    out: Array | None = None,
) -> Array:
    """``y[m, n] = round(sum_k decode(x)[m, k] * decode(w)[n, k] + bias[n])``.

    Args:
        x: [num_tokens or more, K].
        w: [num_outputs or more, K or more].
        bias: float32 [num_outputs].
        out: `dtype` [num_tokens or more, num_outputs], aliased to the result, whose
            rows from `num_tokens` on are those of `out`.

    Returns:
        `dtype` [num_tokens, num_outputs], or like `out`.
    """
    extra = [array for array in (bias, out) if array is not None]
    (y,) = multiply_p.bind(
        *x,
        *w,
        *extra,
        num_tokens=num_tokens,
        num_outputs=num_outputs,
        scale_group=scale_group,
        dtype=np.dtype(dtype),
        has_bias=bias is not None,
        has_out=out is not None,
    )
    return y


multiply_p = Primitive("jax_pcie_mxfp8_multiply")
multiply_p.multiple_results = True


@multiply_p.def_abstract_eval
def _multiply_abstract(
    x_values: Any,  # noqa: ANN401
    *args: Any,  # noqa: ANN401
    num_tokens: int,
    num_outputs: int,
    dtype: np.dtype,
    has_out: bool,
    **_: object,
) -> list[Any]:
    if has_out:
        return [args[-1].update()]
    return [x_values.update(shape=(num_tokens, num_outputs), dtype=dtype)]


def _multiply_generic(
    x_values: Array,
    x_scales: Array,
    w_values: Array,
    w_scales: Array,
    *rest: Array,
    num_tokens: int,
    num_outputs: int,
    dtype: np.dtype,
    has_bias: bool,
    has_out: bool,
    **_: object,
) -> list[Array]:
    num_columns = x_values.shape[1]
    sums = product.multiply(
        Operand(x_values[:num_tokens], x_scales[:num_tokens]),
        Operand(
            w_values[:num_outputs, :num_columns],
            w_scales[:num_outputs, : num_columns // GROUP],
        ),
    )
    if has_bias:
        sums = sums + rest[0]
    y = sums.astype(dtype)
    if not has_out:
        return [y]
    # As bits: older XLA:CPUs widen and narrow a whole bfloat16 array to write a part of
    # it, which changes NaNs and subnormals in the rows that must stay as they are.
    code = jnp.dtype(f"uint{8 * dtype.itemsize}")
    bits = lax.bitcast_convert_type(rest[-1], code)
    rows = lax.bitcast_convert_type(y, code)
    bits = lax.dynamic_update_slice_in_dim(bits, rows, 0, axis=0)
    return [lax.bitcast_convert_type(bits, dtype)]


def _multiply_cuda(ctx: Any, *args: Any, **params: Any) -> Any:  # noqa: ANN401
    has_bias, has_out = params["has_bias"], params["has_out"]
    chosen = choose(
        _ffi.mxfp8_capability(ctx),
        params["num_tokens"],
        params["num_outputs"],
        ctx.avals_in[0].shape[1],
        scale_group=params["scale_group"],
        dtype=params["dtype"],
        has_bias=has_bias,
    )
    if chosen.route is Route.GENERIC:
        return _lower_generic(_multiply_generic, ctx, *args, **params)
    return _lower_kernel(
        "jax_pcie.mxfp8_multiply",
        ctx,
        *args,
        aliases={len(args) - 1: 0} if has_out else None,
        workspace_bytes=chosen.workspace_bytes,
        num_tokens=np.int64(params["num_tokens"]),
        has_bias=np.bool_(has_bias),
        route=np.int32(chosen.route),
    )


mlir.register_lowering(multiply_p, partial(_lower_generic, _multiply_generic))
mlir.register_lowering(multiply_p, _multiply_cuda, platform="cuda")


def _multiply_batching(
    args: tuple[Array, ...],
    dims: tuple[int | None, ...],
    **params: Any,  # noqa: ANN401
) -> tuple[list[Array], list[int]]:
    is_x = [dim is not None for dim in dims]
    if params["has_out"] or any(is_x[2:]):
        return _map_batching(multiply_p, args, dims, **params)
    # The batch is rows: one product instead of many.
    num_tokens = params["num_tokens"]
    size = next(
        x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None
    )

    def rows(x: Array, dim: int | None) -> Array:
        each = jnp.moveaxis(x, dim, 0) if dim is not None else x[None]
        width = each.shape[-1]
        each = jnp.broadcast_to(each[:, :num_tokens], (size, num_tokens, width))
        return each.reshape(size * num_tokens, width)

    params["num_tokens"] = size * num_tokens
    x = [rows(x, dim) for x, dim in zip(args[:2], dims[:2], strict=True)]
    (y,) = multiply_p.bind(*x, *args[2:], **params)
    return [y.reshape(size, num_tokens, params["num_outputs"])], [0]


batching.primitive_batchers[multiply_p] = _multiply_batching

# --- Derivatives: the first ones are `gradient`'s.


def _no_derivative(*_: object, **__: object) -> None:
    raise NotImplementedError(
        "mxfp8.mm has first derivatives only: its gradient is a product of decoded "
        "operands, through which quantisation has none"
    )


for _primitive in (quantize_p, quantize_into_p, multiply_p):
    ad.primitive_jvps[_primitive] = _no_derivative
