"""The samplers' Triton kernels compile for sm_90 without a GPU; so does features' gather."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gnnplan.runtime.sampling.gpu import relabel as r, rng as d

NARROW = {"codes": "*i32", "flags": "*i32", "local": "*i32", "indices": "*i32"}
NUMBERS = "count num_nodes num_rows fanout bound first stream above most wrap j".split()


def compiled(kernel, values, changed=None):
    names = kernel.arg_names
    kinds = {n: NARROW.get(n, "i64" if n in NUMBERS else "*i64") for n in names}
    kinds |= (changed or {}) | {n: "constexpr" for n in values}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


block = {"BLOCK": 256}
for kernel in (d._draw_kernel, r._insert_kernel, r._flag_kernel,
               r._number_kernel, r._local_kernel):
    compiled(kernel, block)
"""


def test_the_samplers_kernels_compile_for_hopper() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
