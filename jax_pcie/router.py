"""Expert selection for mixture-of-experts layers: the rule, and fused with a gather.

`topk_route` applies the rule to whole rows of logits, anywhere. `all_gather_topk` first
gathers the rows from the ranks of a `PeerGroup`, in the same launch. Both have the same
bits on every platform and rank, because scores are ordered as integers and computed by
the library's own elementary functions (`ffi/topk.h`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from jax_pcie import _ffi
from jax_pcie.checks import as_array
from jax_pcie.collectives import (
    check_group,
    require_another_axis,
    require_program_of_group,
)
from jax_pcie.gathers import (
    check_array,
    check_same_rows,
    fold_rows,
    gather_in_lax,
    lower_gather,
    unfold_rows,
    widened,
)
from jax_pcie.group import PeerGroup
from jax_pcie.route_rule import RouteRule, check_logits, check_logits_dtype

_SCRATCH_WORDS = 4  # of 32 bits for each place of a row too long for shared memory

# --- topk_route


def topk_route(
    logits: Array,
    bias: Array | None = None,
    k: int = 16,
    *,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[Array, Array]:
    """Chooses k experts for each row: the best by ``score(logits) + bias``.

    With ``u = score(L)`` and ``s = u + bias``, the chosen are the first k by (s
    descending, id ascending), and weigh ``factor * u / (sum of the chosen u + 1e-20)``.
    A logit or bias that is not finite makes an expert the worst (``s = -inf``) and its
    weight 0. The k ids are always distinct, also where fewer experts are finite. All
    arithmetic is fp32; sums are trees, so that the bits are the same everywhere.

    Args:
        logits: ``[B, E]`` float32, bfloat16 or float16.
        bias: ``[E]`` float32, added for the selection only, or None.
        k: experts a row, from 1 to 32 and at most E.
        scoring: ``"sigmoid"``, or ``"softmax"`` over the row's finite logits.
        renormalize: whether weights are divided by their sum.
        n_group: equal groups of consecutive experts. A group's score is the sum of its
            two best ``s`` if there is a bias, else its best one.
        topk_group: how many of the best groups are chosen from. Where these have fewer
            than k experts, others make up the number, with weight 0.
        routed_scaling_factor: multiplies the weights.

    Returns:
        ``(weights [B, k] float32, ids [B, k] int32)``, best first.

    Raises:
        TypeError: `logits` or `bias` has another dtype.
        ValueError: an argument is out of its range, or has another shape.
        NotImplementedError: when differentiated.

    Source: sigmoid scores with a bias for selection, and groups by their two best:
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, and its released inference code;
    groups by their best: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, whose scores
    are softmax; renormalised top-k softmax: Mixtral (arXiv 2401.04088).

    Example:
        >>> weights, ids = topk_route(x @ router, correction_bias, k=8)
    """
    op = "topk_route"
    logits, bias = _as_operands(op, logits, bias)
    num_experts = logits.shape[1] if logits.ndim == 2 else 0
    check_logits(op, logits, bias, num_experts)
    rule = RouteRule.checked(
        op,
        num_experts,
        k=k,
        scoring=scoring,
        renormalize=renormalize,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
    )
    return _route(logits, bias, rule)


def _as_operands(
    op: str, logits: ArrayLike, bias: ArrayLike | None
) -> tuple[Array, Array | None]:
    """As arrays of the dtypes that they have, where JAX would narrow them."""
    if isinstance(logits, np.ndarray):
        check_logits_dtype(op, logits.dtype)
    bias = None if bias is None else as_array(op, "bias", bias)
    return as_array(op, "logits", logits), bias


def _route(logits: Array, bias: Array | None, rule: RouteRule) -> tuple[Array, Array]:
    if not logits.shape[0]:
        return _empty_choice(rule, _ffi.varying_axes(logits))
    operands = [logits] if bias is None else [logits, bias]
    return tuple(topk_route_p.bind(*_ffi.vary_alike(operands), rule=rule))


def _empty_choice(rule: RouteRule, axes: frozenset[str]) -> tuple[Array, Array]:
    weights = jnp.zeros((0, rule.k), jnp.float32)
    return _ffi.vary_alike((weights, weights.astype(jnp.int32)), *axes)


topk_route_p = Primitive("jax_pcie_topk_route")
topk_route_p.multiple_results = True


@functools.cache
def _compiled_route(rule: RouteRule) -> Any:  # noqa: ANN401
    return jax.jit(partial(topk_route_p.bind, rule=rule))


@topk_route_p.def_impl
def _topk_route_impl(*operands: Array, rule: RouteRule) -> list[Array]:
    return _compiled_route(rule)(*operands)


@topk_route_p.def_abstract_eval
def _topk_route_abstract(logits: Any, *_: Any, rule: RouteRule) -> list[Any]:  # noqa: ANN401
    shape = (logits.shape[0], rule.k)
    return [
        logits.update(shape=shape, dtype=np.dtype(dtype), weak_type=False)
        for dtype in (np.float32, np.int32)
    ]


def _lower_topk_route(
    platform: str,
    ctx: Any,  # noqa: ANN401
    *operands: Any,  # noqa: ANN401
    rule: RouteRule,
) -> list[Any]:
    _ffi.native_module(platform)  # no group may have been made
    num_rows, num_experts = ctx.avals_in[0].shape
    scratch = []
    if platform == "cuda" and num_experts > _ffi.MAX_FUSED_EXPERTS:
        places = 1 << (num_experts - 1).bit_length()
        shape = (num_rows, places * _SCRATCH_WORDS)
        scratch = [jax.core.ShapedArray(shape, np.uint32)]
    lower = jax.ffi.ffi_lowering("jax_pcie.topk_route")
    results = lower(
        ctx.replace(avals_out=[*ctx.avals_out, *scratch]),
        *operands,
        **rule.attributes(has_bias=len(operands) == 2),
    )
    return list(results)[:2]


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        topk_route_p, partial(_lower_topk_route, _platform), platform=_platform
    )


def _topk_route_batching(
    args: Sequence[Array], dims: Sequence[int | None], *, rule: RouteRule
) -> tuple[list[Array], list[int]]:
    logits, *bias = args
    if any(dim is not None for dim in dims[1:]):
        raise NotImplementedError(
            "topk_route: vmap over the bias: all rows of a call share one bias"
        )
    batches = jnp.moveaxis(logits, dims[0], 0)
    results = _route(fold_rows(batches), bias[0] if bias else None, rule)
    return [unfold_rows(y, batches.shape[:2]) for y in results], [0, 0]


batching.primitive_batchers[topk_route_p] = _topk_route_batching


def _no_gradient(op: str, *_: object, **__: object) -> Any:  # noqa: ANN401
    raise NotImplementedError(
        f"{op} has no gradient: which experts are chosen is not differentiable, and "
        "the kernel is for decoding. To train, compute the weights of the chosen ids "
        "from the logits in JAX"
    )


ad.primitive_jvps[topk_route_p] = partial(_no_gradient, "topk_route")

# --- all_gather_topk


def all_gather_topk(
    latent: Array,
    logits: Array,
    group: PeerGroup,
    *,
    bias: Array | None = None,
    k: int = 16,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Gathers rows and their logits and chooses their experts, all in one launch.

    The same as gathering both, as `all_gather_pair` does, and then `topk_route` on the
    whole rows, with the very same bits. Expert ids are ``rank * (E / n) + column``.

    Args:
        latent: ``[B, w]`` of any dtype of 1, 2 or 4 bytes: this rank's columns.
        logits: ``[B, E / n]`` float32, bfloat16 or float16: this rank's experts.
        group: the ranks; its axis must be a manual axis here.
        bias: ``[E]`` float32, whole and the same on every rank, or None. A bias whose
            type varies over the axis is refused. With ``check_vma=False`` there are no
            types: CPU devices compare the ranks' bytes, and on GPUs it is the caller's
            duty, or ranks choose differently.
        k, scoring, renormalize, n_group, topk_group, routed_scaling_factor: as for
            `topk_route`.

    Returns:
        ``(latent [B, n * w], weights [B, k] float32, ids [B, k] int32)``, the same bits
        on all ranks, no longer varying over the axis.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or range, or this is
            not a `shard_map` over the group's axis and devices.
        NotImplementedError: when differentiated.
        PcieError: the group is closed. A peer that does not answer within
            ``group.timeout_s`` fails the program and the group; on a GPU that call ends
            with NaN weights and ids of -1 (and the latent as in `all_gather_pair`), and
            the next one raises.

    Source: as for `topk_route`.

    Example:
        >>> f = jax.shard_map(
        ...     lambda x, l, b: all_gather_topk(x, l, group, bias=b, k=8), mesh=mesh,
        ...     in_specs=(P(None, "tp"), P(None, "tp"), P()), out_specs=P())
    """
    op = "all_gather_topk"
    check_group(op, group)
    logits, bias = _as_operands(op, logits, bias)
    latent = check_array(op, "latent", latent, rank=2)
    logits = check_array(op, "logits", logits, rank=2)
    check_same_rows(op, {"latent": latent, "logits": logits})
    num_experts = group.world_size * logits.shape[1]
    check_logits(op, logits, bias, num_experts)
    _require_same_bias(op, bias, group)
    if not latent.shape[1]:
        raise ValueError(f"{op}: latent has shape {latent.shape}; it must have columns")
    rule = RouteRule.checked(
        op,
        num_experts,
        k=k,
        scoring=scoring,
        renormalize=renormalize,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
    )
    if not latent.shape[0]:
        return _nothing_gathered(latent, logits, group, rule)
    checked = _ffi.checks_varying_axes(group.axis)
    if not group.uses_peers:
        return _gather_topk_in_lax(latent, logits, bias, group, rule)
    operands = [latent, logits] if bias is None else [latent, logits, bias]
    if checked:
        operands = _ffi.vary_alike(operands, group.axis)
    return tuple(
        all_gather_topk_p.bind(*operands, group=group, rule=rule, checked=checked)
    )


def _nothing_gathered(
    latent: Array, logits: Array, group: PeerGroup, rule: RouteRule
) -> tuple[Array, Array, Array]:
    """The results of no rows, typed as those of some are."""
    axes = _ffi.varying_axes(latent) | _ffi.varying_axes(logits)
    axes -= {group.axis}
    whole = jnp.zeros(widened(latent.shape, group.world_size), latent.dtype)
    return _ffi.vary_alike(whole, *axes), *_empty_choice(rule, axes)


def _require_same_bias(op: str, bias: Array | None, group: PeerGroup) -> None:
    if bias is not None and group.axis in _ffi.varying_axes(bias):
        raise ValueError(
            f"{op}: bias varies over axis {group.axis!r}; it must be the same on every "
            "rank: pass it whole (in_specs=P()), or gather it with lax.all_gather and "
            "to='invarying'"
        )


def _gather_topk_in_lax(
    latent: Array,
    logits: Array,
    bias: Array | None,
    group: PeerGroup,
    rule: RouteRule,
) -> tuple[Array, Array, Array]:
    gather = partial(gather_in_lax, group=group, to="invarying")
    return gather(latent), *_route(gather(logits), bias, rule)


all_gather_topk_p = Primitive("jax_pcie_all_gather_topk")
all_gather_topk_p.multiple_results = True


@all_gather_topk_p.def_abstract_eval
def _all_gather_topk_abstract(
    latent: Any,  # noqa: ANN401
    logits: Any,  # noqa: ANN401
    *_: Any,  # noqa: ANN401
    group: PeerGroup,
    rule: RouteRule,
    checked: bool,
) -> list[Any]:
    whole = latent.update(shape=widened(latent.shape, group.world_size))
    results = [whole, *_topk_route_abstract(logits, rule=rule)]
    if checked:
        results = [_ffi.without_varying_axis(y, group.axis) for y in results]
    return results


def _all_gather_topk_lowering(
    platform: str,
    ctx: Any,  # noqa: ANN401
    *operands: Any,  # noqa: ANN401
    group: PeerGroup,
    rule: RouteRule,
    **_: object,
) -> list[Any]:
    require_program_of_group(group, "all_gather_topk", platform, ctx)
    logits = ctx.avals_in[1]
    whole = logits.update(shape=widened(logits.shape, group.world_size))
    if group.fuses_selection(whole.shape[1]):
        lower = _ffi.lower_between_ranks(platform, "jax_pcie.all_gather_topk")
        attributes = rule.attributes(has_bias=len(operands) == 3)
        return lower(ctx, *operands, group=np.int64(group.id), **attributes)
    pair = ctx.replace(avals_in=ctx.avals_in[:2], avals_out=[ctx.avals_out[0], whole])
    latent, gathered = lower_gather(platform, pair, *operands[:2], group=group)
    route = ctx.replace(
        avals_in=[whole, *ctx.avals_in[2:]], avals_out=ctx.avals_out[1:]
    )
    choice = _lower_topk_route(platform, route, gathered, *operands[2:], rule=rule)
    return [latent, *choice]


_ffi.register_between_ranks(all_gather_topk_p, _all_gather_topk_lowering)


def _all_gather_topk_batching(
    axis: Any,  # noqa: ANN401
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    group: PeerGroup,
    **params: object,
) -> tuple[list[Array], list[int]]:
    require_another_axis(group, "all_gather_topk", axis.name)
    if any(dim is not None for dim in dims[2:]):
        raise NotImplementedError(
            "all_gather_topk: vmap over the bias: all rows of a call share one bias"
        )

    def batch(x: Array, dim: int | None) -> Array:
        if dim is None:
            return jnp.broadcast_to(x, (axis.size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    batches = [batch(x, dim) for x, dim in zip(args[:2], dims[:2], strict=True)]
    rows = [fold_rows(x) for x in batches]
    if not axis.size:
        results = _nothing_gathered(*rows, group, params["rule"])
    else:
        operands = [*rows, *args[2:]]
        if params["checked"]:
            operands = _ffi.vary_alike(operands, group.axis)
        results = all_gather_topk_p.bind(*operands, group=group, **params)
    return [unfold_rows(y, batches[0].shape[:2]) for y in results], [0, 0, 0]


batching.fancy_primitive_batchers[all_gather_topk_p] = _all_gather_topk_batching
ad.primitive_jvps[all_gather_topk_p] = partial(_no_gradient, "all_gather_topk")
