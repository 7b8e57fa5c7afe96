"""Plans of the service: made, read, explained, asked about, and brought here as folders."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from planner.client.connection import Connection, ServiceUnreachableError
from planner.client.jobs import Jobs, Progress, pages, segment
from planner.client.resources import Artefact, Job, PlanSummary, decoded, plan_body
from planner.queries.diff import PlanDiff
from planner.queries.explain import Explanation
from planner.settings import PlanSettings
from runtime.folders import make_beside
from runtime.plan.io import load_plan, put_in_place, refuse_foreign_folder
from runtime.plan.schema import Plan

if TYPE_CHECKING:
    from planner.queries.inverse import Cheapest
    from planner.queries.simulate import Simulation
    from planner.queries.whatif import WhatIf
    from planner.queries.why_not import WhyNot


class Plans:
    """`client.plans`."""

    def __init__(self, connection: Connection, jobs: Jobs) -> None:
        self._connection, self._jobs = connection, jobs

    def list(
        self, *, graph: str | None = None, machine: str | None = None, policy: str | None = None
    ) -> Iterator[PlanSummary]:
        """Plans, newest first; filters compare whole names."""
        params = {"graph": graph, "machine": machine, "policy": policy}
        return pages(self._connection, "/v1/plans", PlanSummary, params)

    def create(
        self,
        graph: str,
        settings: PlanSettings,
        *,
        machine: str | None = None,
        calibrated: bool = False,
        idempotency_key: str | None = None,
    ) -> Job:
        """Start planning; a job that has succeeded already where the plan is known.

        Args:
            graph: its folder below a graph root of the service.
            settings: what is to be trained and what may be used.
            machine: preset, or id of an uploaded machine; None: the service's own.
            calibrated: scale stages by what `compare` learnt of that machine.
            idempotency_key: makes repeated calls one job.
        """
        body = plan_body(graph, settings, machine=machine, calibrated=calibrated)
        return self._jobs.start("/v1/plans", body, idempotency_key=idempotency_key)

    def make(
        self,
        graph: str,
        settings: PlanSettings,
        *,
        machine: str | None = None,
        calibrated: bool = False,
        progress: Progress | None = None,
    ) -> Plan:
        """Plan and wait; Ctrl-C cancels the job. Arguments as of `create`.

        Raises:
            PlanRefusedError: no plan fits; the text is the sum.
            RequestRefusedError: the request is wrong.
        """
        job = self.create(graph, settings, machine=machine, calibrated=calibrated)
        done = self._jobs.wait(job, progress=progress, cancel_on_interrupt=True)
        return self.get((done.result or "").rpartition("/")[2])

    def get(self, plan: str) -> Plan:
        """A plan, as plan.json holds it."""
        return decoded(Plan, self._connection.get(_at(plan)))

    def delete(self, plan: str, *, with_runs: bool = False) -> None:
        """Remove a plan of one's own that no job is about.

        Args:
            plan: its id.
            with_runs: remove its runs too; else a plan that has some is refused.
        """
        self._connection.delete(_at(plan), {"with_runs": "true"} if with_runs else None)

    def explain(self, plan: str) -> Explanation:
        """Where the time goes, where rows live, and why the runner-up lost."""
        return decoded(Explanation, self._connection.get(f"{_at(plan)}/explain"))

    def diff(self, plan: str, other: str) -> PlanDiff:
        """What two plans decide and predict differently."""
        return decoded(PlanDiff, self._connection.get(f"{_at(plan)}/diff", {"other": other}))

    def why_not(self, plan: str, policy: str, *, progress: Progress | None = None) -> "WhyNot":
        """Price the plan under another policy; waits."""
        from planner.queries.why_not import WhyNot

        path = f"{_at(plan)}/why-not"
        return self._jobs.answer(path, {"policy": policy}, WhyNot, progress=progress)

    def what_if(
        self, plan: str, changes: Sequence[str], *, progress: Progress | None = None
    ) -> "WhatIf":
        """Plan again with something changed (KEY=VALUE each); waits."""
        from planner.queries.whatif import WhatIf

        body = {"changes": [*changes]}
        return self._jobs.answer(f"{_at(plan)}/what-if", body, WhatIf, progress=progress)

    def cheapest(
        self,
        plan: str,
        target_epoch_seconds: float,
        changes: Sequence[str] = (),
        *,
        progress: Progress | None = None,
    ) -> "Cheapest":
        """Fewest devices and least memory for an epoch this short; waits."""
        from planner.queries.inverse import Cheapest

        body = {"changes": [*changes], "target_epoch_seconds": target_epoch_seconds}
        return self._jobs.answer(f"{_at(plan)}/what-if", body, Cheapest, progress=progress)

    def simulate(
        self,
        plan: str,
        *,
        machine: str | None = None,
        batches: int | None = None,
        progress: Progress | None = None,
    ) -> "Simulation":
        """Replay the plan's batches on a machine model; waits."""
        from planner.queries.simulate import Simulation

        body = {"machine": machine, "batches": batches}
        return self._jobs.answer(f"{_at(plan)}/simulations", body, Simulation, progress=progress)

    def artefacts(self, plan: str) -> Iterator[Artefact]:
        """Files of the plan, and those made from it: job files for schedulers, its page."""
        return pages(self._connection, f"{_at(plan)}/artefacts", Artefact)

    def artefact(self, plan: str, name: str) -> bytes:
        """One file of the plan."""
        return self._connection.get_bytes(f"{_at(plan)}/artefacts/{segment(name)}")

    def download(self, plan: str, folder: Path) -> Plan:
        """Write a plan's folder as a whole or not at all; an earlier plan there is replaced.

        Returns:
            The plan; the hashes of its arrays were checked.

        Raises:
            PlanError: the folder holds something else, or what came is damaged.
        """
        refuse_foreign_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = make_beside(folder)
        try:
            for each in self.artefacts(plan):
                if each.size_bytes is not None:
                    self._save(plan, each.name, staging)
            found = load_plan(staging, verify_arrays=True)
            if found.plan_id != plan:
                raise ServiceUnreachableError(f"expected plan {plan}, was given {found.plan_id}")
            put_in_place(staging, folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return found

    def _save(self, plan: str, name: str, folder: Path) -> None:
        if PurePosixPath(name).name != name or name.startswith("."):
            raise ServiceUnreachableError(f"expected the name of a file, was given {name!r}")
        self._connection.save(f"{_at(plan)}/artefacts/{segment(name)}", folder / name)


def _at(plan: str) -> str:
    return f"/v1/plans/{segment(plan)}"
