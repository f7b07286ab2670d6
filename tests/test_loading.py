"""Kernels are on the GPU before a program that may launch them runs there.

CUDA loads a kernel at its first launch, and then waits until nothing runs on the
device: behind a kernel that waits for a peer, perhaps for ever. Each case runs in a
fresh process, in which nothing is loaded yet, and without graphs, which load theirs.
"""

import os
import subprocess
import sys

import pytest

CASES = (
    "mxfp8-quantize",
    "mxfp8-few-tokens",
    "mxfp8-many-tokens",
    "mxfp8-cublaslt",
    "topk",
)

PROGRAM = """
import ctypes
import functools
import sys
import threading

import jax
import jax.numpy as jnp

import jax_pcie
from jax_pcie import mxfp8


def operands(tokens, scale_group):
    x, w = jnp.ones((tokens, 256), jnp.bfloat16), jnp.ones((512, 256), jnp.bfloat16)
    storage = mxfp8.empty_input(tokens, 256, scale_group=scale_group)
    weight = mxfp8.pack_weight(w, scale_group=scale_group)
    return mxfp8.quantize_input_slice(x, storage, column=0), weight


def multiply(pair):
    return mxfp8.mm_quantized(*pair)


def first_call(case):
    if case == "mxfp8-quantize":
        return mxfp8.pack_weight, jnp.ones((512, 256))
    if case == "topk":
        return functools.partial(jax_pcie.topk_route, k=4), jnp.ones((4, 64))
    tokens = 4 if case == "mxfp8-few-tokens" else 256
    return multiply, operands(tokens, 128 if case == "mxfp8-cublaslt" else 32)


call, operand = first_call(sys.argv[1])


@jax.jit
def perhaps(is_wanted, operand):
    # Both branches are made ready when the program starts, and one is launched.
    def nothing(operand):
        shape = jax.eval_shape(call, operand)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)

    return jax.lax.cond(is_wanted, call, nothing, operand)


no, yes = jnp.array(False), jnp.array(True)
jax.block_until_ready(perhaps(no, operand))

# A stream of other work that ends when a word of memory is set, at the latest in three
# seconds.
cuda = ctypes.CDLL("libcuda.so.1")
context, stream, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
NON_BLOCKING, GREATER_OR_EQUAL = 1, 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING) == 0
assert cuda.cuMemAllocHost_v2(ctypes.byref(address), ctypes.c_size_t(4)) == 0
word = ctypes.c_uint32.from_address(address.value)
word.value = 0
wait = cuda.cuStreamWaitValue32_v2
assert wait(stream, ctypes.c_uint64(address.value), 1, GREATER_OR_EQUAL) == 0
timer = threading.Timer(3.0, setattr, (word, "value", 1))
timer.start()
jax.block_until_ready(perhaps(yes, operand))
waited = word.value == 1
timer.cancel()
word.value = 1
assert not waited, "the launch waited for other work"
"""


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_first_launch_waits_for_no_other_work(case: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
