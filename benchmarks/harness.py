"""What every benchmark shares: facts about the machine, samples, receipts.

A receipt is one JSON document with everything needed to repeat or doubt a figure. Arms
alternate within each sample, so that a drifting clock hits all of them alike.

The one surprise: a GPU at its power limit runs a kernel 11 to 14 % slower once it has
been hot for half a second, and a kernel right after another's burst slower still. So a
burst starts from a pause, and arms are compared within one process only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return result.stdout.strip()


def _checksum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _link() -> str:
    """How the first two GPUs are connected, as `nvidia-smi topo` names it."""
    rows = [line.split() for line in _run("nvidia-smi", "topo", "-m").splitlines()]
    names = [name for row in rows for name in row if name.startswith("GPU")]
    for row in rows:
        if row and row[0] == "GPU0" and "GPU1" in names:
            return row[2]
    return "none"


def facts() -> dict[str, Any]:
    """Command, commit, devices, link, driver, versions and the extension's checksum."""
    query = "index,name,uuid,driver_version,clocks.sm,clocks.max.sm,power.limit"
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax_pcie", "numpy")
    packages += ("torch", "nvidia-cublas")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    package = importlib.util.find_spec("jax_pcie").submodule_search_locations[0]
    native = sorted(pathlib.Path(package).glob("_c*.so"))
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        # On a machine that has the files without their history, the caller names it.
        "commit": os.environ.get("COMMIT") or _run("git", "rev-parse", "HEAD"),
        "tree": os.environ.get("TREE")
        or _run("git", "status", "--porcelain")
        or "clean",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "devices": [str(device) for device in jax.devices()],
        "gpus": _run("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines(),
        "link": _link(),
        "compiler": _run("nvcc", "--version").splitlines()[-1:],
        "python": sys.version.split()[0],
        "versions": versions,
        "extensions": {path.name: _checksum(path) for path in native},
    }


def alternate(
    arms: dict[str, Callable[[], Any]], num_samples: int
) -> dict[str, list[float]]:
    """Seconds per call of each arm: `num_samples` rounds, every other one reversed."""
    for call in arms.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for sample in range(num_samples):
        names = list(arms) if sample % 2 == 0 else list(reversed(arms))
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(arms[name]())
            samples[name].append(time.perf_counter() - start)
    return samples


@dataclasses.dataclass(frozen=True)
class Arm:
    """Something to time.

    Attributes:
        start: starts the work and returns its result without waiting for it.
        num_calls: how many calls of what is timed one `start` makes.
        wait: returns once a result of `start` is there.
    """

    start: Callable[[], Any]
    num_calls: int = 1
    wait: Callable[[Any], Any] = jax.block_until_ready

    def seconds(self, num_starts: int) -> tuple[float, float]:
        """Until the last of `num_starts` results is there; until all were started."""
        begin = time.perf_counter()
        for _ in range(num_starts):
            result = self.start()
        started = time.perf_counter() - begin
        self.wait(result)
        return time.perf_counter() - begin, started


# JAX lets the host run at most 32 programs ahead of a GPU.
_MIN_STARTS, _MAX_STARTS = 10, 30


@dataclasses.dataclass(frozen=True)
class Bursts:
    """How to sample device time: a pause, then calls back to back.

    A sample is ``(T(1 + n) - T(1)) / n`` over n starts, where T is host time from the
    first start to the last result: what a program's start and the wait for its result
    cost then cancels, as long as the device is slower than the host (`host_shares`).

    Attributes:
        pause_s: idle time before each sample, in which the GPU cools.
        burst_s: what a sample should take; between 10 and 30 starts.
        heat_s: time for which the same arm runs right before its sample; 0 for a burst,
            0.4 for the sustained rate.
    """

    num_samples: int = 7
    pause_s: float = 0.3
    burst_s: float = 0.03
    heat_s: float = 0.0

    def sample(self, arms: dict[str, Arm]) -> dict[str, dict[str, Any]]:
        """Device time of one call of each arm.

        Returns:
            By arm: `samples_s` per call, `starts` and `num_calls` of a sample,
            `host_shares`: the part of each sample in which the host was still starting
            calls. Near 1, the sample is the host's time rather than the device's.
        """
        measured = {}
        for name, arm in arms.items():
            arm.seconds(2)
            estimate = arm.seconds(3)[0] / 3
            starts = min(_MAX_STARTS, max(_MIN_STARTS, round(self.burst_s / estimate)))
            measured[name] = {
                "samples_s": [],
                "host_shares": [],
                "starts": starts,
                "num_calls": arm.num_calls,
            }
        for sample in range(self.num_samples):
            names = list(arms) if sample % 2 == 0 else list(reversed(arms))
            for name in names:
                self._sample_one(arms[name], measured[name])
        return measured

    def _sample_one(self, arm: Arm, measured: dict[str, Any]) -> None:
        time.sleep(self.pause_s)
        arm.seconds(1)  # wakes the device
        until = time.perf_counter() + self.heat_s
        while time.perf_counter() < until:
            arm.seconds(_MIN_STARTS)
        starts = measured["starts"]
        once, _ = arm.seconds(1)
        total, started = arm.seconds(1 + starts)
        measured["samples_s"].append((total - once) / starts / arm.num_calls)
        measured["host_shares"].append(started / total)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def write_receipt(path: pathlib.Path, receipt: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt, indent=1) + "\n")
