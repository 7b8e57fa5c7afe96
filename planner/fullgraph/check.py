"""What full-graph training cannot do, said before anything is partitioned or timed."""

from planner.errors import SettingsError
from planner.machine import MachineModel
from planner.request_check import check_training_data
from planner.settings import PlanSettings
from planner.solver.candidates_gpu import plans_gpus
from runtime.errors import PlanError
from runtime.fullgraph.forward import check_settings
from runtime.graph.dataset import Graph
from runtime.plan import FullGraph

WHERE = "mode full-graph"


def check_request(
    graph: Graph, settings: PlanSettings, machine: MachineModel, *, calibrate: bool = False
) -> None:
    """Refuse what no full-graph candidate can do.

    Raises:
        SettingsError: one line with what was expected, what was found and what to do.
    """
    check_training(graph, settings, calibrate=calibrate)
    _check_machine(settings, machine, graph.num_nodes)


def check_training(graph: Graph, settings: PlanSettings, *, calibrate: bool = False) -> None:
    """Refuse what full-graph training cannot do, on whatever machine.

    Raises:
        SettingsError: one line with what was expected, what was found and what to do.
    """
    work = settings.workload
    try:
        check_settings(FullGraph(), work.model, str(graph.task))
    except PlanError as error:
        raise SettingsError(f"{error}; use --mode minibatch") from None
    if settings.sampler != "neighbor" or settings.sampler_parameters:
        raise SettingsError(
            f"{WHERE}: expected no sampler, since every neighbour is aggregated, found "
            f"{settings.sampler}; drop --sampler"
        )
    if settings.policy != "auto":
        raise SettingsError(
            f"{WHERE}: expected policy auto, since each rank holds its part's rows, found "
            f"{settings.policy}; drop --policy"
        )
    if work.precision != "float32":
        raise SettingsError(
            f"{WHERE}: expected precision float32, found {work.precision}; drop --precision"
        )
    if work.model == "gcn" and work.gcn_norm != "full":
        raise SettingsError(
            f"{WHERE}: expected gcn_norm full, found {work.gcn_norm}; drop --gcn-norm"
        )
    if calibrate:
        raise SettingsError(
            f"{WHERE}: expected no --calibrated, whose factors are those of mini-batches; drop it"
        )
    check_training_data(graph)
    if graph.x_by_type:
        raise SettingsError(
            f"{WHERE}: expected features of one width, found features by node type in "
            f"{graph.name}; use --mode minibatch with --model rgcn"
        )


def _check_machine(settings: PlanSettings, machine: MachineModel, num_nodes: int) -> None:
    if plans_gpus(machine):
        raise SettingsError(
            f"{WHERE}: expected a machine whose cores train, found GPUs in {machine.name}; parts "
            "are timed on cores only, use --mode minibatch"
        )
    if any(p.host > 0 for p in machine.processors):
        raise SettingsError(
            f"{WHERE}: expected a machine of one host, found several in {machine.name}; name "
            "another --machine"
        )
    asked = settings.devices
    if asked is not None and asked > machine.num_cores and not settings.oversubscribe:
        raise SettingsError(
            f"expected at most {machine.num_cores} devices (the cores), found {asked}; ask for "
            "fewer or add --oversubscribe"
        )
    if asked is not None and asked > num_nodes:
        raise SettingsError(f"expected at most {num_nodes} devices (the nodes), found {asked}")
