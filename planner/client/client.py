"""The client of one service, with a group of methods for each kind of resource."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

from gnnplan.planner.client.connection import (
    KEY_VARIABLE,
    TIMEOUT,
    Connection,
    ServiceUnreachableError,
)
from gnnplan.planner.client.jobs import Jobs, OnEvent, Progress, follow, quote_segment, read_pages
from gnnplan.planner.client.resources import (
    ArtefactSummary,
    Event,
    GraphDetail,
    GraphSummary,
    Job,
    MachineSummary,
    PlanSummary,
    ProfileSummary,
    Run,
    decode_document,
    plan_body,
    profile_body,
    read_resource,
    request_values,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.queries.diff import PlanDiff
from gnnplan.planner.queries.estimate import Estimates, EstimateSettings
from gnnplan.planner.queries.explain import Explanation
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import WorkloadProfile
from gnnplan.runtime import codec
from gnnplan.runtime.launch.config import TrainOptions
from gnnplan.runtime.plan.io import load_plan, plan_in_making
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport

if TYPE_CHECKING:
    from gnnplan.planner.queries.cheapest import Cheapest
    from gnnplan.planner.queries.compare import Comparison
    from gnnplan.planner.queries.simulate import Simulation
    from gnnplan.planner.queries.whatif import WhatIf
    from gnnplan.planner.queries.why_not import WhyNot


class Plans:
    """`client.plans`."""

    def __init__(self, connection: Connection, jobs: Jobs) -> None:
        self._connection, self._jobs = connection, jobs

    def list(
        self, *, graph: str | None = None, machine: str | None = None, policy: str | None = None
    ) -> Iterator[PlanSummary]:
        """List plans, newest first; filters compare whole names."""
        params = {"graph": graph, "machine": machine, "policy": policy}
        return read_pages(self._connection, "/v1/plans", PlanSummary, params)

    def create(
        self,
        graph: str,
        settings: PlanSettings,
        *,
        machine: str | None = None,
        calibrated: bool = False,
        idempotency_key: str | None = None,
    ) -> Job:
        """Start planning; the job has succeeded already where a plan answers the request.

        Args:
            graph: folder of the dataset, below a graph root of the service.
            settings: what is trained, and on what.
            machine: preset, or id of an uploaded machine; None: the service's own.
            calibrated: scale stages by the machine's calibration.
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
        return self.get(self._jobs.wait_for_id(job, progress=progress))

    def get(self, plan: str) -> Plan:
        """Return a plan."""
        return decode_document(Plan, self._connection.get(_at(plan)))

    def delete(self, plan: str, *, with_runs: bool = False) -> None:
        """Remove a plan that no job uses; one with runs is refused unless `with_runs`."""
        self._connection.delete(_at(plan), {"with_runs": "true"} if with_runs else None)

    def explain(self, plan: str, *, today: str | None = None) -> Explanation:
        """Explain where the time goes, where rows live, and why the runner-up lost.

        `today` is what the user runs, as SYSTEM or SYSTEM:workers=N; None for PyG's loader.
        """
        asked = None if today is None else {"today": today}
        return decode_document(Explanation, self._connection.get(f"{_at(plan)}/explain", asked))

    def diff(self, plan: str, other: str) -> PlanDiff:
        """Return what two plans decide and predict differently."""
        return decode_document(
            PlanDiff, self._connection.get(f"{_at(plan)}/diff", {"other": other})
        )

    def why_not(
        self,
        plan: str,
        policy: str = "",
        changes: Sequence[str] = (),
        *,
        progress: Progress | None = None,
    ) -> "WhyNot":
        """Price the plan under another policy or other settings (KEY=VALUE each), and wait."""
        from gnnplan.planner.queries.why_not import WhyNot

        body: dict[str, Any] = {"policy": policy} if policy else {}
        body |= {"changes": [*changes]} if changes else {}
        return self._jobs.answer(f"{_at(plan)}/why-not", body, WhyNot, progress=progress)

    def what_if(
        self, plan: str, changes: Sequence[str], *, progress: Progress | None = None
    ) -> "WhatIf":
        """Plan again with changes (KEY=VALUE each), and wait."""
        from gnnplan.planner.queries.whatif import WhatIf

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
        """Find the fewest devices and least memory for an epoch of given seconds, and wait."""
        from gnnplan.planner.queries.cheapest import Cheapest

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
        """Replay the plan's batches on a machine model, and wait."""
        from gnnplan.planner.queries.simulate import Simulation

        body = {"machine": machine, "batches": batches}
        return self._jobs.answer(f"{_at(plan)}/simulations", body, Simulation, progress=progress)

    def artefacts(self, plan: str) -> Iterator[ArtefactSummary]:
        """List the plan's files, and those made from it, such as job files and its page."""
        return read_pages(self._connection, f"{_at(plan)}/artefacts", ArtefactSummary)

    def artefact(self, plan: str, name: str) -> bytes:
        """Return one file of the plan."""
        return self._connection.get_bytes(f"{_at(plan)}/artefacts/{quote_segment(name)}")

    def download(self, plan: str, folder: Path) -> Plan:
        """Write a plan's folder, whole or not at all; an earlier plan there is replaced.

        Returns:
            The plan; the hashes of its arrays were checked.

        Raises:
            PlanError: the folder holds something else, or what was received is damaged.
        """
        with plan_in_making(folder) as staging:
            for each in self.artefacts(plan):
                if each.size_bytes is not None:
                    self._save(plan, each.name, staging)
            found = load_plan(staging, verify_arrays=True)
            if found.plan_id != plan:
                raise ServiceUnreachableError(f"expected plan {plan}, was given {found.plan_id}")
        return found

    def _save(self, plan: str, name: str, folder: Path) -> None:
        if PurePosixPath(name).name != name or name.startswith("."):
            raise ServiceUnreachableError(f"expected the name of a file, was given {name!r}")
        self._connection.save(f"{_at(plan)}/artefacts/{quote_segment(name)}", folder / name)


def _at(plan: str) -> str:
    return f"/v1/plans/{quote_segment(plan)}"


def _run_at(run: str) -> str:
    return f"/v1/runs/{quote_segment(run)}"


class Graphs:
    """`client.graphs`: datasets below the service's graph roots."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> Iterator[GraphSummary]:
        """List datasets by name."""
        return read_pages(self._connection, "/v1/graphs", GraphSummary)

    def get(self, graph: str) -> GraphDetail:
        """Describe a dataset, named by its folder below a graph root."""
        return read_resource(GraphDetail, self._connection.get(f"/v1/graphs/{quote(graph)}"))


class Machines:
    """`client.machines`: presets and uploaded machine files."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> Iterator[MachineSummary]:
        """List presets, then uploaded machines, newest first."""
        return read_pages(self._connection, "/v1/machines", MachineSummary)

    def get(self, machine: str) -> MachineModel:
        """Return a preset, or an uploaded machine by its id."""
        return decode_document(
            MachineModel, self._connection.get(f"/v1/machines/{quote_segment(machine)}")
        )

    def upload(self, machine: MachineModel) -> MachineSummary:
        """Upload a machine; equal contents are one machine."""
        document = codec.to_plain(machine)
        return read_resource(MachineSummary, self._connection.post("/v1/machines", document))


class Profiles:
    """`client.profiles`: measured batches of a graph and seconds of the model."""

    def __init__(self, connection: Connection, jobs: Jobs) -> None:
        self._connection, self._jobs = connection, jobs

    def list(self, *, graph: str | None = None) -> Iterator[ProfileSummary]:
        """List the service's profiles, newest first."""
        return read_pages(self._connection, "/v1/profiles", ProfileSummary, {"graph": graph})

    def create(
        self,
        graph: str,
        settings: PlanSettings,
        *,
        machine: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Start profiling a graph."""
        body = profile_body(graph, settings, machine=machine)
        return self._jobs.start("/v1/profiles", body, idempotency_key=idempotency_key)

    def make(
        self,
        graph: str,
        settings: PlanSettings,
        *,
        machine: str | None = None,
        progress: Progress | None = None,
    ) -> WorkloadProfile:
        """Profile a graph and wait; Ctrl-C cancels the job."""
        job = self.create(graph, settings, machine=machine)
        return self.get(self._jobs.wait_for_id(job, progress=progress))

    def get(self, profile: str) -> WorkloadProfile:
        """Return a profile."""
        return decode_document(
            WorkloadProfile, self._connection.get(f"/v1/profiles/{quote_segment(profile)}")
        )


class Runs:
    """`client.runs`: training under a plan, on the service's machine or cluster."""

    def __init__(self, connection: Connection, jobs: Jobs) -> None:
        self._connection, self._jobs = connection, jobs

    def list(self, *, plan: str | None = None, state: str | None = None) -> Iterator[Run]:
        """List runs, newest first."""
        return read_pages(self._connection, "/v1/runs", Run, {"plan": plan, "state": state})

    def get(self, run: str) -> Run:
        """Return a run."""
        return read_resource(Run, self._connection.get(_run_at(run)))

    def start(
        self,
        plan: str,
        *,
        eval_fanouts: Sequence[int] | None = None,
        time_limit_seconds: float | None = None,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Job:
        """Start training; the run has the id of its job.

        Args:
            plan: id of the plan.
            eval_fanouts: fan-outs of evaluation; None: all neighbours.
            time_limit_seconds: longest time of an attempt; None: the service's own limit.
            idempotency_key: makes repeated calls one run.
            **options: other fields of `TrainOptions`, as the flags of `gnnplan train`.
        """
        hops = None if eval_fanouts is None else [*eval_fanouts]
        body = request_values(TrainOptions(eval_fanouts=hops, **options))
        body |= {"plan": plan, "time_limit_seconds": time_limit_seconds}
        return self._jobs.start("/v1/runs", body, idempotency_key=idempotency_key)

    def follow(self, run: str, *, after: str | None = None) -> Iterator[Event]:
        """Yield steps, epochs and log lines as they come; as `Jobs.follow`."""
        return follow(self._connection, f"{_run_at(run)}/events", after=after)

    def wait(
        self, job: Job, *, on_event: OnEvent | None = None, cancel_on_interrupt: bool = False
    ) -> RunReport:
        """Return the report of a run after it has succeeded; as `Jobs.wait`."""
        self._jobs.wait(job, on_event=on_event, cancel_on_interrupt=cancel_on_interrupt)
        return self.report(job.id)

    def cancel(self, run: str) -> Job:
        """End a run; its checkpoints and report stay."""
        return read_resource(Job, self._connection.post(f"{_run_at(run)}/cancel"))

    def report(self, run: str) -> RunReport:
        """Return what the run has measured up to its last epoch."""
        return decode_document(RunReport, self._connection.get(f"{_run_at(run)}/report"))

    def comparison(self, run: str) -> "Comparison":
        """Compare predicted with measured seconds, per stage."""
        from gnnplan.planner.queries.compare import Comparison

        answer = self._connection.get(f"{_run_at(run)}/comparison")
        return decode_document(Comparison, answer)

    def page(self, run: str) -> bytes:
        """Return the plan's HTML page, with what the run measured."""
        return self._connection.get_bytes(f"{_run_at(run)}/report.html")

    def trace(self, run: str) -> bytes:
        """Return predicted and measured steps as Chrome trace events, JSON."""
        return self._connection.get_bytes(f"{_run_at(run)}/trace.json")

    def log(self, run: str) -> str:
        """Return the end of what the ranks printed."""
        return self._connection.get_bytes(f"{_run_at(run)}/log").decode(errors="replace")


class Client:
    """A gnnplan service.

    >>> with Client("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     plan = client.plans.make("graph", PlanSettings(devices=2))
    ...     print(client.plans.explain(plan.plan_id).summary)
    ...     for event in client.runs.follow(client.runs.start(plan.plan_id).id):
    ...         print(event.name, event.data)

    Every method raises `ServiceProblemError` where the service refuses (its `problem` is the RFC
    9457 document; InputError and PlanDoesNotFit are among its bases where they fit) and
    `ServiceUnreachableError` where no service answers.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        key: API key; None: that of the environment's GNNPLAN_API_KEY, if any.
        timeout: of each request; streams of events are open as long as their job.
        http: the HTTP client to use instead of one of its own.

    Raises:
        SettingsError: no http or https address.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: httpx2.Timeout = TIMEOUT,
        http: httpx2.Client | None = None,
    ) -> None:
        key = key if key is not None else os.environ.get(KEY_VARIABLE)
        self._connection = Connection(url, key=key or None, timeout=timeout, http=http)
        self.jobs = Jobs(self._connection)
        self.graphs = Graphs(self._connection)
        self.machines = Machines(self._connection)
        self.profiles = Profiles(self._connection, self.jobs)
        self.plans = Plans(self._connection, self.jobs)
        self.runs = Runs(self._connection, self.jobs)

    def estimate(self, settings: EstimateSettings, *, graph: str | None = None) -> Estimates:
        """Estimate a training on machines that nobody has here; nothing is measured.

        Args:
            settings: the graph's sizes, the training and the machines.
            graph: dataset below the service's graph roots whose sizes are taken.
        """
        body = request_values(settings) | {"graph": graph}
        return decode_document(Estimates, self._connection.post("/v1/estimate", body))

    def health(self) -> dict[str, Any]:
        """Return status and version of the service."""
        return self._connection.get("/healthz")

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
