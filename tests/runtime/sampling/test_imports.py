"""Sampling does not need torch."""

import subprocess
import sys


def test_importing_the_samplers_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "import runtime.sampling.neighbor, runtime.sampling.seeds, runtime.sampling.pyg\n"
        "import runtime.sampling.statistics, tests.reference.neighbor\n"
        "import runtime.sampling.exclusion, runtime.sampling.seeds, runtime.sampling.negative\n"
        "import runtime.sampling.typed, runtime.sampling.pyg\n"
        "print(sorted({'torch', 'torch_geometric'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
