"""The command `demo`: its arguments, and the order of what it does.

Devices are chosen here and touched nowhere before, so that the number of virtual CPU
devices can still be set.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_pcie import PeerGroup, WireMode
from jax_pcie.demo import assets, corpus, measure, model, packing, reference, report
from jax_pcie.demo.errors import DemoError

_NUM_CPU_DEVICES = 8
_PSUM = "psum"
_MODES = (
    *(_PSUM, "bf16"),
    *("e4m3", "e4m3_ring", "e4m3_a2a"),
    *("i8", "i8_ring", "i8_a2a"),
    *("mx", "mx_ring", "mx_a2a"),
)
_NUM_CHECKED = 16  # sentences that NumPy embeds too, in about a second


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `demo` to the commands of `python -m jax_pcie`."""
    parser = commands.add_parser(
        "demo",
        help="a real transformer with its tensor-parallel sums compressed",
        description=(
            f"Embeds sentences with {assets.MODEL_NAME}, its heads and MLP split over "
            "devices, in each wire mode; prints bytes, drift, time and whether all "
            "ranks hold the same bits."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--sentences", type=_integer(1, 10_000), default=256, help="default %(default)s"
    )
    parser.add_argument(
        "--tokens",
        type=_integer(8, model.MAX_TOKENS),
        default=32,
        help="tokens that a sentence is cut to, default %(default)s",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        type=_mode,
        default=[_mode(text) for text in _MODES],
        metavar="MODE",
        help=f"wire modes, or psum for XLA's own sum; default {' '.join(_MODES)}",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda"),
        help="default cuda where there are two GPUs, else cpu",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the process's exit code."""
    try:
        return _run(args)
    except DemoError as error:
        print(f"jax_pcie demo: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    for module in ("rich", "safetensors", "tokenizers"):
        assets.require(module)
    with _progress() as say:
        say("loading the model")
        tensors = assets.load_tensors()
        sentences = assets.tokenize(corpus.sentences(args.sentences), args.tokens)
        mesh = measure.make_mesh(_devices(args.platform))
        batch, places = packing.pack(
            sentences, args.tokens, multiple=mesh.shape[measure.DATA]
        )
        weights, batch = model.keep_used_words(model.from_tensors(tensors), batch)
        problem = measure.Problem(weights, batch, places)

        say("comparing the unsharded model with NumPy")
        expected = measure.embed_unsharded(problem, mesh.devices.flat[0])
        num_checked = min(_NUM_CHECKED, len(sentences))
        checked = np.linspace(0, len(sentences) - 1, num_checked).astype(int)
        exact = reference.embed(tensors, [sentences[i] for i in checked])
        error = check_agreement(expected[checked], exact)

        rows: list[measure.Row] = []
        with PeerGroup(mesh, measure.TENSOR, timeout_s=30) as group:
            bench = measure.Bench(mesh, group, problem, expected)
            for wire in dict.fromkeys(args.modes):
                say(f"running {_PSUM if wire is None else wire}")
                rows.append(bench.run(wire))

    header = _header(mesh, problem, error)
    (report.print_json if args.json else report.print_table)(header, rows)
    different = [row.mode for row in rows if not row.same_bits]
    if different:
        raise DemoError(f"ranks hold different bits in {', '.join(different)}")
    return 0


def check_agreement(expected: np.ndarray, exact: np.ndarray) -> float:
    """Returns the largest difference between the two models' embeddings.

    Raises:
        DemoError: it is above `reference.TOLERANCE`, or not a number.
    """
    error = float(np.abs(expected - exact).max())
    if not error <= reference.TOLERANCE:
        raise DemoError(
            f"the unsharded JAX model is off the NumPy one by {error:.1e}, allowed are "
            f"{reference.TOLERANCE:.1e}; its drift would mean nothing"
        )
    return error


def _mode(text: str) -> WireMode | None:
    """Parses a mode; None is `psum`."""
    if text.strip().lower() == _PSUM:
        return None
    try:
        return WireMode.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (or {_PSUM})") from error


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not in {low} to {high}")
        return int(text)

    return parse


def _devices(wanted: str | None) -> Sequence[jax.Device]:
    jax.config.update("jax_num_cpu_devices", _NUM_CPU_DEVICES)
    if wanted == "cpu":
        jax.config.update("jax_platforms", "cpu")  # leaves GPUs to others
        return jax.devices()
    has_gpus = jax.default_backend() == "gpu"
    if has_gpus and (wanted == "cuda" or jax.device_count() > 1):
        return jax.devices()
    if wanted == "cuda":
        raise DemoError(
            f"JAX finds no CUDA device, its platform is {jax.default_backend()}"
        )
    return jax.devices("cpu")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's stderr what is going on; stdout is for results."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _header(
    mesh: jax.sharding.Mesh, problem: measure.Problem, error: float
) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "model": assets.MODEL_NAME,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("jax", "jaxlib", "jax-pcie")},
        },
        "platform": device.platform,
        "device_kind": device.device_kind,
        "mesh": dict(mesh.shape),
        "num_sentences": len(problem.places),
        "num_tokens": problem.num_tokens,
        "rows": list(problem.batch.ids.shape),
        "sums_per_batch": model.NUM_SUMS,
        "dtype": "bfloat16",
        "difference_from_numpy": error,
        "difference_allowed": reference.TOLERANCE,
        "notes": report.notes(device.platform),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run in its source folder
