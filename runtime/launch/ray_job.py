"""Entry of a job submitted to Ray: `python -m gnnplan.runtime.launch.ray_job REQUEST`.

REQUEST is a JSON file with plan_folder, run_folder and options (of `train_on_ray`). Exit codes are
those of `gnnplan`: 0 trained, 2 the input is wrong, 1 any other error with a name, whose line on
stderr begins with "gnnplan: ".
"""

import json
import sys
from pathlib import Path

from gnnplan.runtime.errors import GnnplanError, InputError


def main(argv: list[str]) -> int:
    """Train as the request says, on the cluster that this process belongs to."""
    try:
        request = json.loads(Path(argv[0]).read_text())
        from gnnplan.runtime.launch.ray import train_on_ray

        train_on_ray(
            Path(request["plan_folder"]),
            run_folder=Path(request["run_folder"]),
            **request["options"],
        )
    except GnnplanError as error:
        sys.stderr.write(f"gnnplan: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, InputError) else 1
    except OSError as error:
        sys.stderr.write(f"gnnplan: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
