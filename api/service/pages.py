"""A plan as one self-contained HTML page, beside what a run of it measured."""

from api.errors import ConflictError, NotFoundError
from api.service import runs
from api.service.context import Service
from planner.machine import MachineModel
from planner.report.machine import machine_of
from planner.report.page import report_html
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.report import RunReport


def plan_page(service: Service, plan: Plan) -> str:
    """The page of a plan, with what a run of it has measured, if any."""
    made = runs.list_runs(service, plan=plan.plan_id, limit=1).items
    report = measured_report(service, plan.plan_id)
    return report_html(plan, drawn_machine(plan), report, tried=bool(made))


def measured_report(service: Service, plan_id: str) -> RunReport | None:
    """The report of the newest run that has succeeded, else of the newest that has one."""
    done = runs.list_runs(service, plan=plan_id, state="succeeded", limit=1).items
    newest = runs.list_runs(service, plan=plan_id, limit=20).items
    for row in (*done, *newest):
        try:
            return runs.run_report(service, row.id)
        except (ConflictError, NotFoundError):
            continue  # it has finished no epoch, is of another version, or was just removed
    return None


def run_page(service: Service, run_id: str) -> str:
    """The page of a run's plan, with what that run measured.

    Raises:
        NotFoundError: there is no such run.
        ConflictError: it has not finished an epoch, or its plan was removed.
    """
    row = runs.get_run(service, run_id)
    report = runs.run_report(service, run_id)
    plan = runs.plan_of_run(service, row)
    return report_html(plan, drawn_machine(plan), report)


def drawn_machine(plan: Plan) -> MachineModel | None:
    """The machine, or None: a page without its picture is better than none."""
    try:
        return machine_of(plan)
    except InputError:
        return None
