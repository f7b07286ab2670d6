"""Device memory of a linear layer over slices: staged, concatenated, and in between.

    python benchmarks/mxfp8_memory.py [--plot benchmarks/results/NAME.png]
                                      [--receipt benchmarks/results/NAME.json]

Every arm runs alone in a process, since a process's peak cannot be reset, in separate
jitted steps, with the live bytes read after each. The packed weight and the output
count. A CPU device keeps no statistics: there live arrays are added up between steps,
and what a step needs inside does not show.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_pcie import mxfp8

# What each arm keeps in bf16 while the slices arrive.
ARMS = {
    "concatenated": "all slices, then their concatenation",
    "wide buffer": "one slice, and a wide buffer it is copied into",
    "staged": "one slice",
}


# --- One arm, in its own process


class Recorder:
    """Live and peak bytes after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._device = jax.devices()[0]
        self.record("weight", -1.0)

    def record(self, name: str, position: float) -> None:
        """Notes a step that is over; `position` is where a plot shows it."""
        stats = self._device.memory_stats()
        if stats:
            live, peak = stats["bytes_in_use"], stats["peak_bytes_in_use"]
        else:
            live = sum(array.nbytes for array in jax.live_arrays())
            peak = max([live, *(step["peak_bytes"] for step in self.steps)])
        self.steps.append(
            {
                "name": name,
                "position": position,
                "live_bytes": live,
                "peak_bytes": peak,
            }
        )


@partial(jax.jit, static_argnums=(1, 2))
def make_slice(index: Array, rows: int, width: int) -> Array:
    """bfloat16 [rows, width] in -1 … 1, from a hash: needs no memory beside itself."""
    row = lax.broadcasted_iota(jnp.uint32, (rows, width), 0)
    column = lax.broadcasted_iota(jnp.uint32, (rows, width), 1)
    bits = (index.astype(jnp.uint32) * rows + row) * width + column
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    signed = lax.bitcast_convert_type(bits ^ (bits >> 16), jnp.int32)
    return (signed.astype(jnp.float32) * 2.0**-31).astype(jnp.bfloat16)


@jax.jit
def checksum(y: Array) -> Array:
    bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32)
    position = lax.iota(jnp.uint32, y.size).reshape(y.shape)
    return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)


def _done(tree: Any) -> Any:  # noqa: ANN401
    return jax.block_until_ready(tree)


def run_concatenated(
    recorder: Recorder, source: Callable, weight: mxfp8.PackedWeight, num_slices: int
) -> Array:
    slices = []
    for i in range(num_slices):
        slices.append(_done(source(i)))
        recorder.record("make", i)
    wide = _done(jax.jit(lambda *xs: jnp.concatenate(xs, axis=1))(*slices))
    recorder.record("concatenate", num_slices)
    y = _done(_multiply(wide, weight))
    recorder.record("multiply", num_slices + 1)
    return y


def run_wide_buffer(
    recorder: Recorder, source: Callable, weight: mxfp8.PackedWeight, num_slices: int
) -> Array:
    rows, width = jax.eval_shape(source, 0).shape
    wide = _done(jnp.zeros((rows, num_slices * width), jnp.bfloat16))
    recorder.record("buffer", -0.5)
    write = jax.jit(
        lambda wide, x, column: lax.dynamic_update_slice_in_dim(wide, x, column, 1),
        donate_argnums=0,
    )
    for i in range(num_slices):
        x = _done(source(i))
        recorder.record("make", i)
        wide = _done(write(wide, x, i * width))
        del x
        recorder.record("copy", i + 0.5)
    y = _done(_multiply(wide, weight))
    recorder.record("multiply", num_slices + 1)
    return y


def run_staged(
    recorder: Recorder, source: Callable, weight: mxfp8.PackedWeight, num_slices: int
) -> Array:
    rows, width = jax.eval_shape(source, 0).shape
    storage = mxfp8.empty_input(
        rows, num_slices * width, scale_group=weight.scale_group, track=False
    )
    _done(storage)
    recorder.record("storage", -0.5)
    write = jax.jit(mxfp8.quantize_input_slice, donate_argnums=1)
    for i in range(num_slices):
        x = _done(source(i))
        recorder.record("make", i)
        # One compiled step for all slices; a column as an array needs track=False.
        storage = _done(write(x, storage, column=jnp.int32(i * width)))
        del x
        recorder.record("quantise", i + 0.5)
    y = _done(jax.jit(mxfp8.mm_quantized)(storage, weight))
    recorder.record("multiply", num_slices + 1)
    return y


def _multiply(wide: Array, weight: mxfp8.PackedWeight) -> Array:
    return jax.jit(partial(mxfp8.mm, scale_group=weight.scale_group))(wide, weight)


RUNS = {
    "concatenated": run_concatenated,
    "wide buffer": run_wide_buffer,
    "staged": run_staged,
}


def _like_weight(n: int, k: int, scale_group: int) -> mxfp8.PackedWeight:
    raw = jax.ShapeDtypeStruct((n, k), jnp.bfloat16)
    return jax.eval_shape(partial(mxfp8.pack_weight, scale_group=scale_group), raw)


def run_arm(options: argparse.Namespace) -> dict[str, Any]:
    """Runs one arm in this process, with a weight that was packed in another."""
    m, n, width, num_slices = options.shape
    like = _like_weight(n, num_slices * width, options.scale_group)
    with np.load(options.weight) as stored:
        leaves = [
            jax.device_put(stored[f"leaf{i}"].view(leaf.dtype).reshape(leaf.shape))
            for i, leaf in enumerate(jax.tree.leaves(like))
        ]
    weight = _done(jax.tree.unflatten(jax.tree.structure(like), leaves))
    del leaves
    recorder = Recorder()

    def source(index: int) -> Array:
        return make_slice(jnp.uint32(index), m, width)

    y = RUNS[options.arm](recorder, source, weight, num_slices)
    peak = recorder.steps[-1]["peak_bytes"]
    return {
        "arm": options.arm,
        "scale_group": options.scale_group,
        "peak_bytes": peak,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weight)),
        "output_bytes": y.nbytes,
        "checksum": int(checksum(y)),
        "num_not_finite": int(jnp.sum(~jnp.isfinite(y))),
        "has_statistics": jax.devices()[0].memory_stats() is not None,
        "steps": recorder.steps,
    }


# --- All arms


def _write_weight(path: pathlib.Path, n: int, k: int, scale_group: int) -> None:
    w = make_slice(jnp.uint32(1 << 10), n, k)
    weight = jax.jit(partial(mxfp8.pack_weight, scale_group=scale_group))(w)
    leaves = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(weight)]
    np.savez(path, **{f"leaf{i}": v.view(np.uint8) for i, v in enumerate(leaves)})


def measure(
    m: int, n: int, width: int, num_slices: int, scale_groups: Sequence[int]
) -> dict[str, Any]:
    """Runs every arm for every scale group, all at the same time.

    Returns:
        `shape`, and the arms' results with their steps under `arms`.
    """
    # XLA's trials of library algorithms would take memory of their own.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": flags.strip(),
    }
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for scale_group in scale_groups:
            weight = pathlib.Path(folder) / f"weight{scale_group}.npz"
            _write_weight(weight, n, num_slices * width, scale_group)
            for arm in ARMS:
                out = pathlib.Path(folder) / f"{arm}{scale_group}.json"
                command = [sys.executable, str(pathlib.Path(__file__)), "--arm", arm]
                command += ["--scale-group", str(scale_group), "--weight", str(weight)]
                command += ["--shape", *map(str, (m, n, width, num_slices))]
                command += ["--receipt", str(out)]
                started.append((subprocess.Popen(command, env=environment), out))
        for process, out in started:
            if process.wait():
                raise RuntimeError(f"the memory arm {out.stem} failed")
        arms = [json.loads(out.read_text()) for _, out in started]
    return {"shape": [m, n, width, num_slices], "arms": arms}


def _by_name(result: dict[str, Any], scale_group: int) -> dict[str, dict[str, Any]]:
    arms = [arm for arm in result["arms"] if arm["scale_group"] == scale_group]
    return {arm["arm"]: arm for arm in arms}


def percent(result: dict[str, Any], scale_group: int, arm: str = "staged") -> float:
    """Change of an arm's peak against the concatenated one's."""
    arms = _by_name(result, scale_group)
    return 100 * (arms[arm]["peak_bytes"] / arms["concatenated"]["peak_bytes"] - 1)


def wrong(result: dict[str, Any], scale_group: int) -> list[str]:
    """What speaks against the figures, in words."""
    arms = _by_name(result, scale_group)
    found = []
    if len({arm["checksum"] for arm in arms.values()}) > 1:
        found.append("the arms' outputs differ")
    if any(arm["num_not_finite"] for arm in arms.values()):
        found.append("outputs are not finite")
    for name, arm in arms.items():
        if arm["steps"][0]["peak_bytes"] >= arm["peak_bytes"]:
            found.append(f"the peak of {name} came from loading the weight")
    return found


def print_table(result: dict[str, Any]) -> None:
    m, n, width, num_slices = result["shape"]
    print(f"# memory: {m} x {n}, {num_slices} slices of {width}; peak bytes, with the")
    print("# packed weight and the output; percent against concatenated")
    if not all(arm["has_statistics"] for arm in result["arms"]):
        print("# (no statistics on this device: live arrays between steps)")
    for arm in result["arms"]:
        change = percent(result, arm["scale_group"], arm["arm"])
        print(
            f"  group {arm['scale_group']:>3} {arm['arm']:13} {arm['peak_bytes']:>14,}"
            f" {change:+7.2f} %  bf16: {ARMS[arm['arm']]}"
        )


def plot(result: dict[str, Any], path: pathlib.Path, scale_group: int = 32) -> None:
    """Live bytes after each step, and the peak inside a step where it is a new one."""
    if importlib.util.find_spec("matplotlib") is None:
        print("# no plot: matplotlib is missing; pip install '.[bench]'")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    m, n, width, num_slices = result["shape"]
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    colors = {"concatenated": "#c44e52", "wide buffer": "#8c8c8c", "staged": "#2a6f97"}
    for name, arm in _by_name(result, scale_group).items():
        position = [step["position"] for step in arm["steps"]]
        live = [step["live_bytes"] / 1e6 for step in arm["steps"]]
        end = num_slices + 1.5
        axes.step(
            [*position, end],
            [*live, live[-1]],
            where="post",
            color=colors[name],
            linewidth=2,
            label=f"{name}: peak {arm['peak_bytes'] / 1e6:,.1f} MB"
            + (
                f" ({percent(result, scale_group, name):+.1f} %)"
                if name != "concatenated"
                else ""
            ),
        )
        for before, step in zip(arm["steps"], arm["steps"][1:], strict=False):
            inside = step["peak_bytes"]
            if inside > max(before["peak_bytes"], step["live_bytes"]):
                height = [step["live_bytes"] / 1e6, inside / 1e6]
                axes.plot(
                    [step["position"]] * 2,
                    height,
                    color=colors[name],
                    linestyle=":",
                    marker="_",
                )
    ticks = [*range(num_slices), num_slices, num_slices + 1]
    names = [f"slice {i + 1}" for i in range(num_slices)]
    axes.set_xticks(ticks, [*names, "concatenate", "multiply"])
    axes.set_ylabel("device memory, MB")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"Live bytes after each step: {m} tokens, {num_slices} slices of {width}, "
        f"{n} outputs\n(packed weight and output included; dotted: peak inside a step)",
        fontsize=10,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"# plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, help="only this one, in this process")
    parser.add_argument("--weight", type=pathlib.Path, help="for --arm")
    parser.add_argument("--scale-group", type=int, choices=(32, 128), default=32)
    parser.add_argument(
        "--shape", type=int, nargs=4, metavar=("M", "N", "WIDTH", "SLICES")
    )
    parser.add_argument("--receipt", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="PNG or SVG")
    options = parser.parse_args()
    if options.arm:
        harness.write_receipt(options.receipt, run_arm(options))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    on_gpu = jax.default_backend() == "gpu"
    shape = options.shape or ([4096, 7168, 7168, 6] if on_gpu else [64, 128, 128, 6])
    result = measure(*shape, [options.scale_group])
    print_table(result)
    problems = wrong(result, options.scale_group)
    verdict = "FAIL" if problems else "pass"
    print(f"# {verdict}", *problems, sep="; ")
    if options.plot:
        plot(result, options.plot, options.scale_group)
    if options.receipt:
        receipt = {**harness.facts(), "verdict": verdict, "memory": result}
        harness.write_receipt(options.receipt, receipt)


if __name__ == "__main__":
    main()
