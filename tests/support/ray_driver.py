"""What the stand-in for a Ray cluster runs: the events and the report of a run, without training.

$FAKE_RAY_MODE says how it ends: train, slow (waits for a file `go` in the run's folder), no-ray,
raise, die (by a signal).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from gnnplan.runtime.report import EpochReport, HostNoise, RunReport, StepSeconds, save_report


def main(request: Path) -> int:
    wanted = json.loads(request.read_text())
    mode, run_folder = os.environ["FAKE_RAY_MODE"], Path(wanted["run_folder"])
    if mode == "no-ray":
        sys.stderr.write("gnnplan: expected Ray Train, found none; pip install 'gnnplan[ray]'\n")
        return 2
    if mode == "raise":
        raise RuntimeError("the model gave up")
    sys.stdout.write(f"resume={wanted['options']['resume']}\n")
    epochs = wanted["options"]["epochs"]
    with (run_folder / "events.jsonl").open("w") as events:
        for epoch in range(epochs):
            line = {"event": "epoch", "epoch": epoch, "share": 1.0, "loss": 1.0}
            events.write(json.dumps(line) + "\n")
            events.flush()
            if mode == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while mode == "slow" and epoch == 0 and not (run_folder / "go").exists():
                time.sleep(0.05)
        events.write(json.dumps({"event": "end"}) + "\n")
    save_report(report(wanted["plan_folder"], epochs), run_folder)
    return 0


def report(plan_folder: str, epochs: int) -> RunReport:
    return RunReport(
        plan_id=Path(plan_folder).name,
        versions={},
        num_ranks=1,
        metric="accuracy",
        ranks=[],
        step_seconds=StepSeconds(median=0.5, p10=0.5, p90=0.5, count=30, discarded=10, enough=True),
        step_samples=[0.5],
        epochs=[
            EpochReport(epoch=i + 1, seconds=1.0, steps=1, loss=1.0, first_loss=1.0, last_loss=1.0)
            for i in range(epochs)
        ],
        losses=[1.0],
        startup_seconds=0.0,
        test_score=None,
        noise=HostNoise(
            load_before=0.0, load_after=0.0, steal_fraction=0.0, cores=1, overloaded=False
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
