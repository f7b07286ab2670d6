"""The sections of `mxfp8.py`: what is checked, and what is timed against what.

Owns labels, ratios and counted bytes; `mxfp8_cases.py` has the programs. In each
section the check of a shape comes before its times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import mxfp8_cases as cases
import mxfp8_check as check
import mxfp8_memory as memory
from harness import Arm
from jax import Array
from mxfp8_cases import Compiler, Shape
from table import Table

from jax_pcie import mxfp8

SHORT_PAUSE_S = 0.05  # what waits for memory does not reach the power limit


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the sections run on.

    Attributes:
        gemm: products alone; `linear`: quantisation and product.
        small: M of products with weights [small_k, small_k].
        small_inputs: inputs in rotation beside five weights; no multiple of 5, so that
            a program makes 5 * small_inputs products.
        quantise: (rows, columns of a slice, slices, different slices) of a quantiser's
            program. Of large slices all differ, so that none is in the cache; of small
            ones a program has many, but few arguments: it has to take longer than its
            start.
        staged: M, N and the K of one slice; `num_slices` of them make a product's K.
        copy_bytes: of the copy that gives the rate of the memory.
    """

    gemm: tuple[Shape, ...]
    linear: Shape
    small: tuple[int, ...]
    small_k: int
    small_inputs: int
    quantise: tuple[tuple[int, int, int, int], ...]
    staged: Shape
    num_slices: int
    copy_bytes: int
    scale_groups: tuple[int, ...]


FULL = Sizes(
    gemm=((4096, 7168, 43008), (4096, 7168, 7168), (8192, 8192, 8192)),
    linear=(4096, 7168, 7168),
    small=(1, 8, 16, 32, 64),
    small_k=7168,
    small_inputs=8,
    quantise=(
        (4096, 7168, 12, 12),
        (4096, 43008, 8, 8),
        *((rows, 7168, 240, 4) for rows in (1, 2, 4, 8)),
    ),
    staged=(4096, 7168, 7168),
    num_slices=6,
    copy_bytes=1 << 30,
    scale_groups=(32, 128),
)
# Plain JAX takes seconds to compile a program on a CPU: few of them, and short.
LAPTOP = Sizes(
    gemm=((64, 128, 256),),
    linear=(64, 128, 256),
    small=(1, 8),
    small_k=128,
    small_inputs=1,
    quantise=((64, 256, 3, 3), (2, 128, 6, 2)),
    staged=(64, 128, 128),
    num_slices=3,
    copy_bytes=1 << 20,
    scale_groups=(32,),
)


class Sections:
    """Runs on one set of sizes; rows and checks go to `table`."""

    def __init__(
        self, sizes: Sizes, table: Table, compiler: Compiler, use_torch: bool
    ) -> None:
        self.sizes = sizes
        self.table = table
        self.compiler = compiler
        self.use_torch = use_torch
        self.compiled_to: dict[str, dict[str, int]] = {}

    def program(
        self,
        name: str,
        function: Callable,
        *args: Any,  # noqa: ANN401
    ) -> Callable[[], Any]:
        compiled = self.compiler(function, *args)
        self.compiled_to[name] = cases.compiled_to(compiled)
        return partial(compiled, *args)

    def donating(
        self,
        name: str,
        step: Callable,
        *args: Any,  # noqa: ANN401
    ) -> Callable[[], Any]:
        """Calls `step` with the storage of the call before as its last argument.

        `step` returns the storage, or an output and the storage.
        """
        *others, storage = args
        compiled = self.compiler(step, *args, donate=(len(others),))
        self.compiled_to[name] = cases.compiled_to(compiled)

        def start() -> Any:  # noqa: ANN401
            nonlocal storage
            result = compiled(*others, storage)
            if isinstance(result, tuple):
                output, storage = result
                return output
            storage = result
            return storage

        return start

    # --- Sections

    def copy(self) -> None:
        """The rate of the memory: the better of XLA's copy and a kernel of its own."""
        print("# copy: bytes read and written")
        x = jnp.arange(self.sizes.copy_bytes // 4, dtype=jnp.uint32)
        one_copy = partial(cases.many_copies, num_calls=1)
        arms = {
            "XLA copy": Arm(self.program("copy", jnp.copy, x)),
            "XLA kernel": Arm(self.program("copy kernel", one_copy, [x])),
        }
        num_bytes = dict.fromkeys(arms, 2 * x.nbytes)
        label = f"{x.nbytes >> 20} MiB"
        rows = self.table.time(
            "copy", label, arms, num_bytes=num_bytes, max_pause_s=SHORT_PAUSE_S
        )
        self.table.copy_bytes_per_s = max(r["bytes_per_s"] for r in rows.values())

    def gemm(self) -> None:
        """The product alone, of operands that are there."""
        print("# gemm: x, bf16 dot's time over this one's (above 1: faster than bf16)")
        for seed, shape in enumerate(self.sizes.gemm):
            self._gemm(shape, seed)

    def _gemm(self, shape: Shape, seed: int) -> None:
        m, n, k = shape
        label = f"{m}x{n}x{k}"
        (x,), (w,) = cases.inputs(1, m, k, 2 * seed), cases.weights(1, n, k, seed)
        raw = self.program(f"bf16 dot {label}", cases.bf16_product, x, w)
        arms, baselines = {"bf16 dot": Arm(raw)}, {}
        for group in self.sizes.scale_groups:
            name = f"mm_quantized, group {group}"
            operands = cases.staged(x, group), cases.packed(w, group)
            call = self.program(f"{name} {label}", mxfp8.mm_quantized, *operands)
            arms[name] = Arm(call)
            exact = check.sample_quantized(*operands)
            exact_raw = check.sample_raw(x, w, exact)
            self._check_product(f"{name} {label}", call, operands, exact, exact_raw)
            if group == 32:
                error = exact_raw.error(raw())["relative"]
                self.table.check(f"bf16 dot {label}", [], relative_to_raw=error)
            builders = cases.baselines(self.compiler, *operands, self.use_torch)
            for other, build in builders.items():
                baseline = self._baseline(other, label, build, exact)
                if baseline:
                    baselines[other] = baseline
        arms |= baselines
        flops = 2.0 * m * n * k
        self.table.time("gemm", label, arms, baseline="bf16 dot", flops=flops)

    def _baseline(
        self,
        name: str,
        label: str,
        build: Callable[[], cases.Baseline],
        exact: check.Sample,
    ) -> Arm | None:
        """Another library's product; None if it does not run here, which is noted."""
        what = f"{name} {label}"
        try:
            baseline = build()
            output = baseline.arm.start()
            baseline.arm.wait(output)
        except (RuntimeError, ValueError, TypeError, BufferError) as error:
            self.table.check(what, [], does_not_run=str(error)[:300])
            return None
        self.compiled_to[what] = baseline.compiled_to
        facts: dict[str, Any] = {"compiled_to": baseline.compiled_to}
        if baseline.is_same_product:
            facts["relative"] = exact.error(output)["relative"]
        self.table.check(what, [], **facts)
        return baseline.arm

    def _check_product(
        self,
        what: str,
        call: Callable[[], Array],
        operands: tuple[mxfp8.StagedInput, mxfp8.PackedWeight],
        exact: check.Sample,
        exact_raw: check.Sample,
    ) -> None:
        group = operands[0].scale_group
        output = call()
        in_fp32 = self.compiler(
            partial(mxfp8.mm_quantized, dtype=jnp.float32), *operands
        )(*operands)
        wrong = exact.verdict(output, group) + exact.verdict(in_fp32, group)
        if unstable := check.num_unstable(call):
            wrong.append(f"{unstable} outputs differ between runs")
        before_rounding = exact.error(in_fp32)
        self.table.check(
            what,
            wrong,
            relative=exact.error(output)["relative"],
            fp32_relative=before_rounding["relative"],
            fp32_largest_of_sum_abs=before_rounding["largest_of_sum_abs"],
            relative_to_raw=exact_raw.error(output)["relative"],
            runs=check.NUM_RUNS,
            differing=unstable,
        )

    def mm(self) -> None:
        """Quantisation of the input and product, against bf16 from bf16."""
        print("# mm: x, bf16 dot's time over this one's (above 1: faster than bf16)")
        m, n, k = self.sizes.linear
        label = f"{m}x{n}x{k}"
        (x,), (w,) = cases.inputs(1, m, k), cases.weights(1, n, k)
        arms = {"bf16 dot": Arm(self.program("mm, bf16 dot", cases.bf16_product, x, w))}
        for group in self.sizes.scale_groups:
            name = f"mm, group {group}"
            weight = cases.packed(w, group)
            call = self.program(name, partial(mxfp8.mm, scale_group=group), x, weight)
            arms[name] = Arm(call)
            operands = cases.staged(x, group), weight
            split = self.compiler(mxfp8.mm_quantized, *operands)(*operands)
            differ = check.num_differing(split, call())
            wrong = ["not the bits of mm_quantized"] if differ else []
            self.table.check(f"{name} {label}", wrong, differing=differ)
        flops = 2.0 * m * n * k
        self.table.time("mm", label, arms, baseline="bf16 dot", flops=flops)

    def small(self) -> None:
        """Few rows: the weight comes from memory, five of them in rotation."""
        print(
            "# small: x, bf16 dot's time over this one's (above 1: faster than bf16);\n"
            "# GB/s of the operands and the output, and that over the rate of the copy"
        )
        k, copy_rate = self.sizes.small_k, self.table.copy_bytes_per_s
        if copy_rate:
            floor_us = k * k * 33 / 32 / copy_rate * 1e6
            print(
                f"# reading an MXFP8 weight once at the copy's rate: {floor_us:.2f} us"
            )
        raw = cases.weights(5, k, k)
        packed = {g: [cases.packed(w, g) for w in raw] for g in self.sizes.scale_groups}
        num_calls = 5 * self.sizes.small_inputs
        for m in self.sizes.small:
            xs = cases.inputs(self.sizes.small_inputs, m, k, m)
            label = f"{m}x{k}x{k}"
            run = cases.many_products(cases.bf16_product, num_calls)
            call = self.program(f"small, bf16 dot {label}", run, xs, raw)
            arms = {"bf16 dot": Arm(call, num_calls)}
            num_bytes = {"bf16 dot": 2 * (m * k + k * k + m * k)}
            run = cases.many_products(mxfp8.mm_quantized, num_calls)
            for group, ws in packed.items():
                name = f"mm_quantized, group {group}"
                storages = [cases.staged(x, group) for x in xs]
                call = self.program(f"small, {name} {label}", run, storages, ws)
                outputs = call()
                for i in (0, num_calls - 1):
                    operands = storages[i % len(storages)], ws[i % len(ws)]
                    exact = check.sample_quantized(*operands, seed=i)
                    self.table.check(
                        f"{name} {label}, call {i}",
                        exact.verdict(outputs[i], group),
                        relative=exact.error(outputs[i])["relative"],
                    )
                arms[name] = Arm(call, num_calls)
                num_bytes[name] = (m * k + k * k) * 33 // 32 + 2 * m * k
            self.table.time(
                "small",
                label,
                arms,
                baseline="bf16 dot",
                num_bytes=num_bytes,
                max_pause_s=SHORT_PAUSE_S,
            )

    def quantise(self) -> None:
        """Slices from bf16 to MXFP8 in storage, against a copy of as many bytes."""
        print(
            "# quantise: bytes read and written; x, the time of a copy of as many\n"
            "# bytes over this one's (1: as fast as the copy)"
        )
        for rows, width, num_slices, num_inputs in self.sizes.quantise:
            xs = cases.inputs(num_inputs, rows, width, rows)
            label = f"{rows}x{width}"
            moved = rows * width * 2 + rows * width * 33 // 32
            words = moved // 8  # 4 bytes read and 4 written
            ys = [jnp.arange(i, i + words, dtype=jnp.uint32) for i in range(num_inputs)]
            run = partial(cases.many_copies, num_calls=num_slices)
            call = self.program(f"copies {label}", run, ys)
            arms = {"copy": Arm(call, num_slices)}
            for group in self.sizes.scale_groups:
                name = f"quantise, group {group}"
                storage = cases.empty(rows, width * num_slices, group)
                start = self.donating(f"{name} {label}", cases.write, xs, storage)
                column = width * (num_slices - 1)
                values, scales = check.wrong_bytes(xs[-1], start(), column)
                wrong = ["bytes are not the oracle's"] if values or scales else []
                self.table.check(
                    f"{name} {label}", wrong, values_off=values, scales_off=scales
                )
                arms[name] = Arm(start, num_slices)
            num_bytes = dict.fromkeys(arms, moved)
            self.table.time(
                "quantise",
                label,
                arms,
                baseline="copy",
                num_bytes=num_bytes,
                max_pause_s=SHORT_PAUSE_S,
            )

    def staged(self) -> None:
        """Slices to an output: staged, concatenated and quantised, and in bf16."""
        print("# staged: from slices that are there to the output; x, the bf16 arm's")
        print("# time over this one's (above 1: faster than bf16)")
        m, n, width = self.sizes.staged
        num_slices = self.sizes.num_slices
        label = f"{m}x{n}x{num_slices}x{width}"
        xs = cases.inputs(num_slices, m, width)
        (w,) = cases.weights(1, n, num_slices * width)
        in_bf16 = partial(cases.concatenated, cases.bf16_product)
        base = "concatenated, bf16 dot"
        arms = {base: Arm(self.program(base, in_bf16, xs, w))}
        for group in self.sizes.scale_groups:
            weight = cases.packed(w, group)
            product = partial(mxfp8.mm, scale_group=group)
            whole = self.program(
                f"concatenated, group {group}",
                partial(cases.concatenated, product),
                xs,
                weight,
            )
            storage = cases.empty(m, num_slices * width, group)
            parts = self.donating(
                f"staged, group {group}", cases.fill_and_multiply, xs, weight, storage
            )
            differ = check.num_differing(whole(), parts())
            wrong = [f"{differ} outputs differ"] if differ else []
            self.table.check(
                f"staged and concatenated, group {group}",
                wrong,
                differing=differ,
                staged_compiled_to=self.compiled_to[f"staged, group {group}"],
            )
            arms[f"concatenated, group {group}"] = Arm(whole)
            arms[f"staged, group {group}"] = Arm(parts)
        flops = 2.0 * m * n * num_slices * width
        rows = self.table.time(
            "staged", label, arms, baseline=base, flops=flops, min_samples=9
        )
        for group in self.sizes.scale_groups:
            whole, parts = (
                rows[f"{arm}, group {group}"] for arm in ("concatenated", "staged")
            )
            parts["concatenated_over_this"] = whole["seconds"] / parts["seconds"]
            print(
                f"  group {group}: concatenated over staged "
                f"{parts['concatenated_over_this']:.3f}x (above 1: staging is faster)"
            )

    def memory(self) -> dict[str, Any]:
        """Peak device memory of the arms, each in a process of its own."""
        shape = (*self.sizes.staged, self.sizes.num_slices)
        result = memory.measure(*shape, self.sizes.scale_groups)
        for group in self.sizes.scale_groups:
            wrong = memory.wrong(result, group)
            self.table.check(f"memory arms, group {group}", wrong)
        memory.print_table(result)
        return result
