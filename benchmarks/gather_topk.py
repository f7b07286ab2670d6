"""`all_gather_topk` against gathers and a top-k: device time of a decode routing step.

    python benchmarks/gather_topk.py [--batches 1 8 …]
                                     [--receipt benchmarks/results/NAME.json]

Times are per call in a chain: a `fori_loop` whose body is ten calls, each of which
reads what the one before made, so that XLA can neither drop, merge nor overlap them,
and ten calls of ours are one CUDA graph. What the chain itself costs (one addition to
the latent and to the logits a call) is measured as an arm of its own and subtracted. A
sample is 1000 calls of an arm, after 100 to warm up; arms alternate within a sample,
and a program ends when the slowest rank does.

XLA keeps its collectives out of CUDA graphs unless it is told. To see `lax` at its
best, run it a second time with
``XLA_FLAGS=--xla_gpu_enable_command_buffer=+COLLECTIVES``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import jax_pcie

CALLS_PER_BODY = 10
WARM_UPS = 100
Choice = tuple[Array, Array, Array]  # latent, weights, ids
Arm = Callable[[Array, Array, Array], Choice]


def choose_in_lax(logits: Array, bias: Array, k: int) -> tuple[Array, Array]:
    u = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(u + bias, k)
    weights = jnp.take_along_axis(u, ids, axis=1)
    return weights / (weights.sum(axis=1, keepdims=True) + 1e-20), ids


def two_gathers(latent: Array, logits: Array, bias: Array, k: int) -> Choice:
    gather = partial(lax.all_gather, axis_name="tp", axis=1, tiled=True)
    return gather(latent), *choose_in_lax(gather(logits), bias, k)


def packed_gather(latent: Array, logits: Array, bias: Array, k: int) -> Choice:
    """One collective: both arrays as 32-bit words, side by side."""
    rows = len(latent)
    words = lax.bitcast_convert_type(latent.reshape(rows, -1, 2), jnp.float32)
    both = lax.all_gather(jnp.concatenate([words, logits], axis=1), "tp", axis=1)
    words, logits = jnp.split(both, [words.shape[1]], axis=2)
    latent = lax.bitcast_convert_type(words, latent.dtype)
    whole = latent.reshape(rows, -1), logits.reshape(rows, -1)
    return whole[0], *choose_in_lax(whole[1], bias, k)


def make_arms(group: jax_pcie.PeerGroup, k: int) -> dict[str, Arm]:
    """Every way to do it, the parts of the separate one, and the chain alone."""

    def fused(latent: Array, logits: Array, bias: Array) -> Choice:
        return jax_pcie.all_gather_topk(latent, logits, group, bias=bias, k=k)

    def separate(latent: Array, logits: Array, bias: Array) -> Choice:
        latent, logits = jax_pcie.all_gather_pair(latent, logits, group)
        return latent, *jax_pcie.topk_route(logits, bias, k)

    def pair_alone(latent: Array, logits: Array, bias: Array) -> Choice:
        latent, logits = jax_pcie.all_gather_pair(latent, logits, group)
        return latent, logits, logits.astype(jnp.int32)

    def route_alone(latent: Array, logits: Array, bias: Array) -> Choice:
        # On rows of all experts, as long as after a gather.
        whole = jnp.broadcast_to(
            logits[:, None], (len(logits), group.world_size, logits.shape[1])
        )
        weights, ids = jax_pcie.topk_route(whole.reshape(len(logits), -1), bias, k)
        return latent, weights, ids

    def chain_alone(latent: Array, logits: Array, bias: Array) -> Choice:
        # Behind a barrier, or XLA would merge the additions of all calls.
        latent, logits = lax.optimization_barrier((latent, logits))
        return latent, logits, logits.astype(jnp.int32)

    return {
        "fused": fused,
        "separate": separate,
        "two lax gathers": partial(two_gathers, k=k),
        "one packed lax gather": partial(packed_gather, k=k),
        "all_gather_pair": pair_alone,
        "broadcast + topk_route": route_alone,
        "chain": chain_alone,
    }


COMPLETE = ("fused", "separate", "two lax gathers", "one packed lax gather")


def mapped(mesh: jax.sharding.Mesh, fn: Callable, out: Any) -> Callable:  # noqa: ANN401
    specs = (P(None, "tp"), P(None, "tp"), P())
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    )


def make_chain(mesh: jax.sharding.Mesh, arm: Arm, num_calls: int) -> Callable:
    def call(latent: Array, logits: Array, bias: Array) -> tuple[Array, Array]:
        whole, weights, ids = arm(latent, logits, bias)
        # Always 0, which XLA cannot know.
        zero = whole[0, -1].astype(jnp.float32) * 0 + weights[0, 0] * 0
        zero = zero + jnp.where(ids[0, 0] < -(1 << 30), 1.0, 0.0)
        return latent + zero.astype(latent.dtype), logits + zero

    def chain(latent: Array, logits: Array, bias: Array) -> tuple[Array, Array]:
        def body(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            for _ in range(CALLS_PER_BODY):
                carry = call(*carry, bias)
            return carry

        return lax.fori_loop(0, num_calls // CALLS_PER_BODY, body, (latent, logits))

    return mapped(mesh, chain, (P(None, "tp"), P(None, "tp")))


def reference(
    logits: np.ndarray, bias: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    u = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ids = np.argsort(-(u + bias), axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(u, ids, axis=1)
    return weights / weights.sum(axis=1, keepdims=True), ids


def check(
    mesh: jax.sharding.Mesh, arms: dict[str, Arm], operands: tuple, k: int
) -> dict[str, str]:
    """A verdict for each complete arm: bytes, ids, weights, and equality of ranks."""
    latent, logits, bias = map(np.asarray, operands)
    want_weights, want_ids = reference(logits, bias, k)
    # Ids are compared where neighbouring scores are further apart than any rounding.
    scores = np.sort(1 / (1 + np.exp(-logits.astype(np.float64))) + bias, axis=1)
    gaps = scores[:, -k:] - scores[:, -k - 1 : -1]
    clear = (gaps > 1e-6).all(axis=1)
    verdicts, bits = {}, {}
    for name in COMPLETE:
        run = mapped(
            mesh, lambda *xs, arm=arms[name]: [y[None] for y in arm(*xs)], P("tp")
        )
        results = [np.asarray(y) for y in run(*operands)]
        raw = [y.view(np.uint8) for y in results]
        faults = []
        if any((y != y[:1]).any() for y in raw):
            faults.append("ranks differ")
        if (results[0][0].view(np.uint16) != latent.view(np.uint16)).any():
            faults.append("latent bytes differ")
        if (results[2][0] != want_ids)[clear].any():
            faults.append("ids differ")
        error = np.abs(results[1][0] / want_weights - 1)[clear]
        if not (error < (2.0**-21 if name in COMPLETE[:2] else 1e-5)).all():
            faults.append(f"weights off by {error.max():.1e}")
        bits[name] = raw
        verdicts[name] = (
            ", ".join(faults) or f"pass ({clear.sum()} of {len(clear)} rows clear)"
        )
    if any(
        (a != b).any() for a, b in zip(bits["fused"], bits["separate"], strict=True)
    ):
        verdicts["fused"] = "differs from separate"
    return verdicts


def make_operands(
    mesh: jax.sharding.Mesh, batch: int, options: argparse.Namespace
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(batch)
    latent = rng.standard_normal((batch, options.width)).astype(jnp.bfloat16)
    logits = rng.standard_normal((batch, options.experts)).astype(np.float32)
    bias = rng.standard_normal(options.experts).astype(np.float32) / 8
    specs = (P(None, "tp"), P(None, "tp"), P())
    return tuple(
        jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip((latent, logits, bias), specs, strict=True)
    )


def measure(
    mesh: jax.sharding.Mesh,
    arms: dict[str, Arm],
    operands: tuple,
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per call of each arm: warm samples, and one of a program's first run."""
    cold, calls = {}, {}
    for name, arm in arms.items():
        first = make_chain(mesh, arm, WARM_UPS).lower(*operands).compile()
        start = time.perf_counter()
        jax.block_until_ready(first(*operands))
        cold[name] = (time.perf_counter() - start) / WARM_UPS
        chain = make_chain(mesh, arm, options.replays)
        calls[name] = partial(chain, *operands)
        jax.block_until_ready(calls[name]())
    warm = harness.alternate(calls, options.samples)
    return {name: [s / options.replays for s in ss] for name, ss in warm.items()}, cold


def report(
    batch: int, warm: dict[str, list[float]], cold: dict[str, float]
) -> list[dict]:
    chain = harness.median(warm["chain"])
    net = {name: [(s - chain) * 1e6 for s in samples] for name, samples in warm.items()}
    fused = harness.median(net["fused"])
    rows = []
    for name, samples in net.items():
        row = {
            "batch": batch,
            "arm": name,
            "time_us": harness.median(samples),
            "with_chain_us": harness.median(warm[name]) * 1e6,
            "this_over_fused": harness.median(samples) / fused,
            "warm_samples_s": warm[name],
            "cold_sample_s": cold[name],
        }
        rows.append(row)
        ratio = f"{row['this_over_fused']:8.2f}" if name in COMPLETE else " " * 8
        print(
            f"  {batch:>5} {name:>24} {row['time_us']:9.2f} {min(samples):9.2f} "
            f"{max(samples):9.2f} {row['with_chain_us']:11.2f} {cold[name] * 1e6:9.1f} "
            f"{ratio}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--receipt", type=pathlib.Path)
    options = parser.parse_args()
    if len(jax.devices()) < 2:
        parser.error(
            "needs two devices; without GPUs, give the CPU two: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    facts = {**harness.facts(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
    for key in ("gpus", "link", "commit", "tree", "versions", "xla_flags"):
        print(f"# {key}: {facts[key]}")
    rows, verdicts = [], {}
    with jax_pcie.PeerGroup(mesh, "tp") as group:
        arms = make_arms(group, options.k)
        for batch in options.batches:
            operands = make_operands(mesh, batch, options)
            verdicts[batch] = check(mesh, arms, operands, options.k)
            for name, verdict in verdicts[batch].items():
                print(f"# batch {batch}, {name}: {verdict}")
        passed = all(
            v.startswith("pass") for b in verdicts.values() for v in b.values()
        )
        print(f"# correctness: {'pass' if passed else 'FAIL'}")
        if passed:
            print("# time: us per call less the chain's, median; ratio: the arm's time")
            print("# over fused's, so above 1 fused is faster")
            print(
                f"# {'batch':>5} {'arm':>24} {'time us':>9} {'min':>9} {'max':>9} "
                f"{'with chain':>11} {'cold':>9} {'ratio':>8}"
            )
            for batch in options.batches:
                operands = make_operands(mesh, batch, options)
                rows += report(batch, *measure(mesh, arms, operands, options))
    if options.receipt:
        settings = {k: v for k, v in vars(options).items() if k != "receipt"}
        verdict = "pass" if passed else "FAIL"
        receipt = {**facts, **settings, "verdict": verdict, "checks": verdicts}
        harness.write_receipt(options.receipt, {**receipt, "rows": rows})
        print(f"# {verdict}; receipt: {options.receipt}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
