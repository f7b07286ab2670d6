"""`all_reduce` against `psum`: time, bus bandwidth, bytes on the wire, and the floor.

    python benchmarks/all_reduce.py [--sizes 64K 1M …] [--modes i8_a2a ...]
                                    [--receipt benchmarks/results/NAME.json]

Times are per call inside a `fori_loop` whose body is one all-reduce and one elementwise
product; the same loop without the all-reduce is subtracted. `busbw` is
`2 (n - 1) / n · bytes / time` on the uncompressed size, so a codec shows as bandwidth.
The floor is the wire bytes over the rate at which kernels of this GPU pair store to
each other in both directions at once (`--link-gbps`).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from functools import partial

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import jax_pcie

Reduce = Callable[[Array], Array]
LARGE_SIZES = [1 << 20, 8 << 20, 64 << 20, 256 << 20]  # bytes


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _shard_map(mesh: jax.sharding.Mesh, out: P) -> Callable[[Callable], Callable]:
    return partial(jax.shard_map, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=out)


def make_loop(mesh: jax.sharding.Mesh, reduce: Reduce, iterations: int) -> Callable:
    """A jitted chain of `iterations` calls, each on the result of the one before."""

    @jax.jit
    @_shard_map(mesh, P("tp"))
    def loop(x: Array, scale: Array) -> Array:
        # The rank's own factor keeps XLA from proving the value equal on all ranks,
        # and halving keeps it from growing.
        def body(_: int, value: Array) -> Array:
            return reduce(value) * scale

        return jax.lax.fori_loop(0, iterations, body, x)

    return loop


def count_wrong(
    mesh: jax.sharding.Mesh, reduce: Reduce, x: Array, mode: str
) -> tuple[int, int]:
    """Values that differ between ranks, and values off by more than the codec's bound.

    The bound, from the largest input and the largest sum: one rounding of every rank's
    part and one of the sum, each half a step of INT8 or 2^-4 of E4M3, plus bf16's.
    """

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    def check(part: Array) -> Array:
        y = jax.lax.pcast(reduce(part), "tp", to="varying")
        exact = jax.lax.psum(part.astype(jnp.float32), "tp")
        step = {"i8": 0.51 / 127, "e4": 2.0**-4, "mx": 2.0**-4}.get(mode[:2], 0.0)
        n = jax.lax.axis_size("tp")
        largest = jax.lax.pmax(jnp.abs(part.astype(jnp.float32)).max(), "tp")
        bound = step * (n * largest + jnp.abs(exact).max() * (1 + step))
        bound = bound + 2.0**-8 * jnp.abs(exact).max()
        wrong = ~(jnp.abs(y.astype(jnp.float32) - exact) <= bound)
        bits = jax.lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.int32)
        differ = jax.lax.pmax(bits, "tp") != jax.lax.pmin(bits, "tp")
        return jnp.stack([differ.sum(), wrong.sum()])[None]

    # Memory that the allocator hands out next: an element that nobody writes is NaN.
    poison = [jax.block_until_ready(jnp.full_like(x, jnp.nan)) for _ in range(4)]
    for array in poison:
        array.delete()
    differ, wrong = np.asarray(check(x)).max(axis=0)
    return int(differ), int(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=_bytes, default=None)
    parser.add_argument("--modes", nargs="+", default=list(jax_pcie.MODES))
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--link-gbps", type=float, default=367.0)
    parser.add_argument("--receipt", type=pathlib.Path)
    options = parser.parse_args()
    n = len(jax.devices())
    if n < 2:
        parser.error(
            "needs two devices; without GPUs, give the CPU two: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )
    on_cpu = jax.default_backend() == "cpu"
    sizes = options.sizes or [64 << 10, *([1 << 20] if on_cpu else LARGE_SIZES)]
    mesh = jax.make_mesh((n,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    facts = harness.facts()
    for key in ("gpus", "link", "commit", "versions"):
        print(f"# {key}: {facts[key]}")
    print("# time: per call, median, slowest rank; vs psum: psum's time over ours")
    print(
        f"# {'bytes':>10} {'mode':>10} {'time us':>9} {'min':>9} {'busbw GB/s':>10} "
        f"{'wire B':>10} {'floor us':>9} {'vs psum':>8} {'#differ':>8} {'#wrong':>7}"
    )
    rows = []
    with jax_pcie.PeerGroup(mesh, "tp") as group:
        arms: dict[str, Reduce] = {"psum": lambda v: jax.lax.psum(v, "tp")}
        for mode in options.modes:
            arms[mode] = partial(jax_pcie.all_reduce, group=group, wire=mode)
        for size in sizes:
            rows += _measure(mesh, group, arms, size, n, options)
    verdict = "pass" if not any(r["differ"] or r["wrong"] for r in rows) else "FAIL"
    print(f"# {verdict}")
    if options.receipt:
        harness.write_receipt(
            options.receipt,
            {**facts, "link_gbps": options.link_gbps, "verdict": verdict, "rows": rows},
        )
    return 0 if verdict == "pass" else 1


def _measure(
    mesh: jax.sharding.Mesh,
    group: jax_pcie.PeerGroup,
    arms: dict[str, Reduce],
    size: int,
    n: int,
    options: argparse.Namespace,
) -> list[dict]:
    count = size // 2
    sharding = jax.sharding.NamedSharding(mesh, P("tp"))
    key = jax.random.key(size)
    make = jax.jit(
        lambda k: jax.random.normal(k, (n * count,), jnp.bfloat16),
        out_shardings=sharding,
    )
    x = make(key)
    scale = jax.device_put(jnp.full((n,), 0.5, jnp.bfloat16), sharding)
    checks = {name: count_wrong(mesh, arm, x, name) for name, arm in arms.items()}

    iterations = int(min(200, max(10, 2e10 // size)))
    loops = {name: make_loop(mesh, arm, iterations) for name, arm in arms.items()}
    loops["loop alone"] = make_loop(mesh, lambda v: v, iterations)
    calls = {name: partial(loop, x, scale) for name, loop in loops.items()}
    seconds = harness.alternate(calls, options.samples)

    alone = harness.median(seconds["loop alone"]) / iterations
    psum_us = (harness.median(seconds["psum"]) / iterations - alone) * 1e6
    rows = []
    for name in arms:
        per_call = [(s / iterations - alone) * 1e6 for s in seconds[name]]
        time_us = harness.median(per_call)
        native = 2 * (n - 1) * size // n
        wire = native
        if name != "psum":
            wire = group.plan("all_reduce", (count,), jnp.bfloat16, name).wire_bytes
        differ, wrong = checks[name]
        row = {
            "bytes": size,
            "mode": name,
            "time_us": time_us,
            "busbw_gbps": native / time_us / 1e3,
            "wire_bytes": wire,
            "floor_us": wire / options.link_gbps / 1e3,
            "psum_over_this": psum_us / time_us,
            "differ": differ,
            "wrong": wrong,
            "iterations": iterations,
            "samples_s": seconds[name],
            "loop_alone_samples_s": seconds["loop alone"],
        }
        rows.append(row)
        print(
            f"  {size:>10} {name:>10} {time_us:9.1f} {min(per_call):9.1f} "
            f"{row['busbw_gbps']:10.1f} {wire:10} {row['floor_us']:9.1f} "
            f"{row['psum_over_this']:8.2f} {differ:8} {wrong:7}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
