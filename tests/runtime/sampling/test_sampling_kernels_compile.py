"""The kernels of sampling compile for sm_90 without a GPU, in every form that they are launched."""

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

from gnnplan.runtime.sampling.gpu import choose as c, rng as d, segments as s, segments as t
from gnnplan.runtime.sampling.gpu import padded as p, relabel as l, tasks as k

NUMBERS = "num_rows fanout above most base low high bound count num_candidates each".split()
NUMBERS += "host_low host_high room wrap first num_keys num_nodes label_room batch_size".split()
DOUBLES = "inverse squares excess scale values_f levels sums goals".split()


def compiled(kernel, values, changed=None):
    names = kernel.arg_names
    kinds = {n: "i64" if n in NUMBERS else "*fp64" if n in DOUBLES else "*i64" for n in names}
    kinds |= {n: kind for n, kind in (changed or {}).items() if n in names}
    kinds |= {n: "constexpr" for n in values}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attrs)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)


wide = {"values": "*fp64"}
compiled(d._rows_kernel, {"BLOCK": 256})
for places, unit in ((False, tl.int32), (True, tl.int64)):
    size = {"UNIT": unit, "BYTES": 4 if unit == tl.int32 else 8}
    compiled(c._bounds_kernel, {"PLACES": places, "BYTES": 4, "PASSES": 2 * places, "BLOCK": 256})
    compiled(c._floyd_kernel, size | {"GIVEN": places, "EACH": 0, "ROWS": 64, "WIDE": 16})
    compiled(c._floyd_kernel, size | {"GIVEN": False, "EACH": 1, "ROWS": 64, "WIDE": 16})
    for shape in ((16, 32), (1, 1024)):
        tile = {"ROWS": shape[0], "COLUMNS": shape[1]}
        compiled(c._scan_kernel, size | tile | {"WRITE": places})
        compiled(s._nth_kernel, tile)
        compiled(s._scale_kernel, tile | {"WEIGHTED": places})
        compiled(s._level_kernel, tile, wide)
        compiled(t._prefix_kernel, tile, wide)
    tile = size | {"ROWS": 8, "COLUMNS": 128}
    compiled(k._negatives_kernel, tile | {"POOLED": places, "PLACES": places, "TRIES": 16})
    compiled(k._pass_over_kernel, tile)
compiled(t._upper_kernel, {"BLOCK": 256})

# Padded batches, whose edges and counts by chunk are int32.
narrow = {n: "*i32" for n in "turns sums local rows".split()}
chunks = {"CHUNKS": 1024, "CHUNK": 256, "COPIES": 3}
for places, unit in ((False, tl.int32), (True, tl.int64)):
    lists = {"PLACES": places, "BYTES": 4 if unit == tl.int32 else 8}
    values = {"values": "*i32" if unit == tl.int32 else "*i64"}
    tasks = [{"EACH": 1, "STEPS": 11}] if places else [{"EACH": n, "STEPS": 0} for n in (1, 3)]
    for task in tasks:
        compiled(c._count_kernel, lists | task | {"CHUNK": 256}, {"sums": "*i64"})
        made = lists | task | chunks | {"UNIT": unit, "DENSE": places, "POSITIONS": places}
        compiled(c._choose_kernel, made | {"ROWS": 64, "WIDE": 16},
                 values | {"rows": "*i32", "sums": "*i64"})
    compiled(l._first_kernel, {"CHUNK": 1024}, narrow | {"slots": values["values"]})
    compiled(l._localise_kernel, chunks | {"CHUNK": 1024},
             narrow | values | {"slots": values["values"]})
    labels = {"LABELS": 1, "HOPS": 3, "BLOCK": 512}
    compiled(p._take_kernel, labels | {"DENSE": places, "LANES": 4, "PURPOSE": 1},
             {"weight": "*fp32"})
    compiled(p._seal_kernel, labels | {"IGNORE": -100, "POSITIONS": places, "LANES": 8,
             "EACH": 1 + places}, narrow | {"labels": "*i64", "weight": "*fp32"})
    compiled(k.take_links_kernel, {"PITCH": 4, "BOTH": places, "POOLED": places, "KEYS": True,
             "HOPS": 3, "LANES": 4, "PURPOSE": 1, "NEGATIVE": 2, "BLOCK": 512},
             {"weight": "*fp32"})
    compiled(k.number_ends_kernel, {"PITCH": 4, "DENSE": places, "BLOCK": 512}, {"sums": "*i64"})
    compiled(s._look_up_kernel, lists | {"UNIT": unit, "WRITE": places, "STEPS": 11, "ROWS": 8,
             "COLUMNS": 128})
compiled(l._enter_kernel, {"LANES": 32}, {"values": "*i32"})
"""


def test_the_kernels_of_sampling_compile_for_hopper() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert len(set(found.stdout.split())) == 21
