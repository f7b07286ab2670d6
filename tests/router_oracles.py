"""What the routing rule says, in NumPy and float64: slow, obvious, and a judge of ids.

Scores that are further apart than 4 ulp of fp32 have one order, and so have scores that
tie exactly, because they come from equal inputs; between these either order is right.
So the oracle does not predict ids: it says what is wrong with the ones it is given.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray
from oracles import Rng, widen

Array = NDArray

ULPS = 4
WEIGHT_ERROR = {"sigmoid": 2.0**-21, "softmax": 2.0**-19}
SMALLEST = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Rule:
    """The arguments of `topk_route`, with its defaults."""

    k: int = 16
    scoring: str = "sigmoid"
    renormalize: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    @property
    def arguments(self) -> dict:
        return dataclasses.asdict(self)


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def softmax(x: Array, finite: Array) -> Array:
    """Over the finite ones of [E]."""
    u = np.zeros(len(x))
    if finite.any():
        e = np.exp(x[finite] - x[finite].max())
        u[finite] = e / e.sum()
    return u


def ulp(x: Array) -> Array:
    """The distance of fp32 numbers next to `x`."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0))
    return np.ldexp(1.0, np.maximum(exponent - 24, -149))


def scores(logits: Array, bias: Array | None, rule: Rule) -> tuple[Array, Array]:
    """float64 (u, s) of a row of fp32 `logits` [E]; s is -inf where it may not win.

    NaN where it is not clear which groups are the best.
    """
    x = widen(logits).astype(np.float64)
    b = np.zeros(len(x)) if bias is None else widen(bias).astype(np.float64)
    finite = np.isfinite(x)
    if rule.scoring == "softmax":
        u = softmax(x, finite)
    else:
        u = sigmoid(np.where(finite, x, 0))
    eligible = finite & np.isfinite(b)
    u = np.where(eligible, u, 0)
    s = np.where(eligible, u + np.where(np.isfinite(b), b, 0), -np.inf)
    if rule.topk_group < rule.n_group:
        kept = best_groups(s, bias is not None, rule)
        if kept is None:
            return np.full_like(u, np.nan), np.full_like(s, np.nan)
        u, s = np.where(kept, u, 0), np.where(kept, s, -np.inf)
    return u, s


def best_groups(s: Array, has_bias: bool, rule: Rule) -> Array | None:
    """Which experts [E] belong to the best groups; None if that is not clear."""
    groups = np.sort(s.reshape(rule.n_group, -1), axis=1)
    value = groups[:, -1]
    if has_bias and groups.shape[1] > 1:
        value = value + groups[:, -2]
    order = np.argsort(-value, kind="stable")
    kept, dropped = order[: rule.topk_group], order[rule.topk_group :]
    worst, next_best = value[kept[-1]], value[dropped[0]]
    if worst != next_best and worst - next_best <= ULPS * ulp(worst):
        return None
    return np.isin(np.arange(rule.n_group), kept).repeat(groups.shape[1])


def check_ids(u: Array, s: Array, ties: Array, ids: Array) -> None:
    """Raises unless `ids` [k] are the first of scores `s` [E] in the rule's order.

    `ties` [E] are equal for experts whose inputs are equal.
    """
    num = len(s)
    tolerance = ULPS * ulp(np.maximum(np.abs(s), u))
    left = np.ones(num, bool)
    for i in ids:
        left[i] = False
        with np.errstate(invalid="ignore"):
            clearly_better = s > s[i] + np.maximum(tolerance, tolerance[i])
        tie = (s == s[i]) & ((ties == ties[i]) | np.isneginf(s))
        wrong = left & (clearly_better | (tie & (np.arange(num) < i)))
        assert not wrong.any(), (
            f"{i} with {s[i]} came before {np.flatnonzero(wrong)[0]} with "
            f"{s[wrong][0]}; ids {ids}"
        )


def check_weights(u: Array, s: Array, ids: Array, weights: Array, rule: Rule) -> None:
    # u is an fp32 number, so that it may be off by 2 ulp where it is subnormal; the
    # normalising division enlarges that with it.
    want = u[ids]
    scale = np.float64(np.float32(rule.routed_scaling_factor))
    if rule.renormalize:
        scale = scale / (want.sum() + 1e-20)
    want = want * scale
    assert np.isfinite(weights).all()
    assert (weights[np.isneginf(s[ids])] == 0).all()
    bound = WEIGHT_ERROR[rule.scoring] * np.abs(want)
    bound = np.maximum(bound, max(SMALLEST, 2 * 2.0**-149 * abs(scale)))
    assert (weights[np.abs(want) > bound] != 0).all()
    error = np.abs(weights.astype(np.float64) - want)
    assert (error <= bound).all(), (error / bound).max()


def check_choice(
    logits: Array, bias: Array | None, rule: Rule, weights: Array, ids: Array
) -> None:
    """Raises unless `weights` and `ids` [B, k] are what the rule makes of the rows.

    Args:
        logits: [B, E] in the dtype of the call.
        bias: [E] fp32 or None.
    """
    assert (weights.dtype, ids.dtype) == (np.float32, np.int32)
    assert weights.shape == ids.shape == (len(logits), rule.k)
    for row, row_weights, row_ids in zip(widen(logits), weights, ids, strict=True):
        u, s = scores(row, bias, rule)
        inputs = np.stack([row, np.zeros_like(row) if bias is None else widen(bias)])
        ties = np.unique(inputs + np.float32(0), axis=1, return_inverse=True)[1]
        assert len(set(row_ids)) == rule.k
        assert ((row_ids >= 0) & (row_ids < len(row))).all()
        if np.isnan(u).any():
            continue
        check_ids(u, s, ties.reshape(-1), row_ids)
        check_weights(u, s, row_ids, row_weights, rule)


def varied_rows(num_experts: int, rng: Rng) -> Array:
    """fp32 [13, num_experts]: every kind of row of logits."""
    num = num_experts
    normal = rng.standard_normal(num).astype(np.float32)
    near = np.full(num, 0.75, np.float32).view(np.uint32) + rng.integers(
        0, 3, num, np.uint32
    )
    huge = np.array([1e30, -1e30, 88.8, -88.8, 103, -103, 104.5, -104.5, 17, -17])
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    top = np.finfo(np.float32).max
    return np.stack(
        [
            normal,
            8 * normal,
            np.sort(normal),
            np.sort(normal)[::-1],
            np.round(normal),  # many ties
            near.view(np.float32),
            np.zeros(num, np.float32),
            np.where(normal > 0, 0.0, -0.0).astype(np.float32),
            rng.choice(huge, num).astype(np.float32),
            np.where(normal > 0, top, -top).astype(np.float32),
            rng.choice(odd, num).astype(np.float32),
            np.full(num, np.nan, np.float32),
            np.where(normal > 0.5, normal, -np.inf).astype(np.float32),
        ]
    )


def rows_with_few_finite(counts: range, num_experts: int, rng: Rng) -> Array:
    """fp32 [len(counts), num_experts]; row i has counts[i] finite logits."""
    rows = rng.choice([np.nan, np.inf, -np.inf], (len(counts), num_experts))
    for row, count in zip(rows, counts, strict=True):
        places = rng.permutation(num_experts)[:count]
        row[places] = rng.standard_normal(count)
    return rows.astype(np.float32)


def varied_bias(kind: str, num_experts: int, rng: Rng) -> Array | None:
    """fp32 [num_experts] or None."""
    normal = rng.standard_normal(num_experts).astype(np.float32)
    if kind == "none":
        return None
    if kind == "odd":
        odd = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e30, -1e30], num_experts)
        return np.where(normal > 1, odd, normal).astype(np.float32)
    return {"normal": normal, "ties": np.round(normal), "zero": np.zeros_like(normal)}[
        kind
    ]


BIASES = ["none", "normal", "ties", "zero", "odd"]
