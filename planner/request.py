"""Check what a planning request names before anything is measured: files, names, room.

    check_request(folder, settings, out=..., machine=...)    # the command line, Python
    check_graph(open_graph(folder, validate=False), settings)  # the service, which has no output

Nothing heavy is imported with this module, so a wrong argument is answered at once.
"""

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from gnnplan.planner.cost.memory import model_bytes, sum_parts, sum_text
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.machine.table import MachineTable
from gnnplan.planner.placement.policies.registry import find_policy
from gnnplan.planner.probe.presets import LIKE, is_preset, load_preset, unknown_machine
from gnnplan.planner.search.samplers import (
    LINK_TASK,
    is_link,
    is_unfit,
    statistics_of,
    with_samplers,
)
from gnnplan.planner.settings import (
    MODELS,
    PlanSettings,
    change_mode,
    change_settings,
    refuse_changed,
)
from gnnplan.planner.units import read_texts, scale_number
from gnnplan.runtime.device import usable_ram_bytes
from gnnplan.runtime.errors import DatasetError, InputError, did_you_mean
from gnnplan.runtime.folders import real_folder
from gnnplan.runtime.graph.dataset import Graph, is_typed, open_graph, types_of
from gnnplan.runtime.graph.findings import name_lacking
from gnnplan.runtime.graph.format import META_FILE
from gnnplan.runtime.plan.io import refuse_foreign_folder, refuse_unplaced
from gnnplan.runtime.plan.schema import Plan, Sampler, is_dynamic
from gnnplan.runtime.plan.setting import setting_fields
from gnnplan.runtime.sampling.registry import (
    DEFAULT_SAMPLER,
    find_sampler,
    is_default,
    is_layerwise,
    layer_sizes,
    parameters_of,
)
from gnnplan.runtime.sampling.statistics import StatisticsClass

LOADING = (MachineTable.SAMPLE_EDGE, MachineTable.SAMPLE_VERTEX, MachineTable.MAPPED_GATHER)
"""Tables of cores that draw and gather what lies on the host."""
CODE_BYTES = 4
"""Least bytes that a plan writes for each node."""
SPARE_BYTES = 1 << 20
"""Bytes of everything else that a plan writes."""
FLOAT_BYTES = 4


def check_request(
    folder: Path,
    settings: PlanSettings,
    *,
    out: Path | None = None,
    machine: str | None = None,
    calibrate: bool = False,
) -> Graph:
    """Refuse what cannot be planned, before anything is measured or written.

    The dataset's arrays are mapped and their shapes checked; their values are read when it is
    planned.

    Args:
        folder: the dataset.
        settings: what is to be trained.
        out: plan folder to write, if any.
        machine: preset or machine file; None for this machine.
        calibrate: whether stages are scaled by what runs have taught.

    Returns:
        The dataset.

    Raises:
        DatasetError: the folder is no dataset, or its parts do not fit together.
        SettingsError: the settings contradict the dataset, or the model cannot be imported.
        MachineError: there is no such machine.
        PlanError: `out` holds something else.
        InputError: `out` cannot be written.
        PlanDoesNotFit: the model's outputs alone pass this machine's memory.
    """
    if out is not None:
        check_output(out)
    refuse_other_formats(folder)
    graph = open_graph(folder, validate=False)
    if machine is not None:
        check_machine_name(machine)
    refuse_unused(settings)
    check_graph(graph, settings, calibrate=calibrate)
    if out is not None:
        _check_free_disk(out, graph)
    if machine is None:
        check_outputs(graph, settings, None)
    return graph


def read_changes(settings: PlanSettings, asked: Sequence[str]) -> PlanSettings:
    """Return a request with some settings changed, KEY=VALUE each, as flags of `gnnplan plan`.

    Another mode leaves out what that mode does not use. Sizes may be factors, such as x2.

    Raises:
        SettingsError: no such setting, or a value that it cannot have.
    """
    names = {each.flag[2:].replace("-", "_"): each.name for each in setting_fields(PlanSettings)}
    texts: dict[str, Any] = {}
    for change in asked:
        key, equals, value = (part.strip() for part in change.partition("="))
        name = names.get(key.replace("-", "_"), key)
        if not equals or not value or name not in names.values():
            known = ", ".join((*MACHINE_KEYS, *sorted(names)))
            raise SettingsError(
                f"--set: expected KEY=VALUE with KEY among {known}, found {change!r}"
                f"{did_you_mean(key, names)}"
            )
        if name.endswith("_bytes") and value.startswith("x"):
            if (old := getattr(settings, name, None)) is None:
                raise SettingsError(
                    f"--set {key}: expected a size (the plan had no limit), found {value!r}"
                )
            value = str(round(scale_number(value, float(old), key, size=True)))
        texts[name] = value
    values = read_texts(PlanSettings, texts, name_of=lambda each: f"--set {each.name}")
    mode = values.pop("mode", settings.mode)
    return change_settings(change_mode(settings, mode), values)


MACHINE_KEYS = ("link.NAME.bandwidth", "link.NAME.latency", "memory.NAME.capacity")
"""Changes of a machine that questions about a plan take beside its settings."""


def check_replayable(plan: Plan) -> None:
    """Refuse full-graph training and cooperative batches, which ranks do not draw alone.

    Raises:
        SettingsError: the plan is one of those.
    """
    strategy = plan.strategy
    if strategy.mode != "minibatch" or strategy.batching != "independent":
        found = "full-graph" if strategy.mode != "minibatch" else "cooperative batches"
        raise SettingsError(
            f"simulate: expected mini-batches that each rank draws alone, found {found}; train the "
            "plan and look at its report"
        )


def refuse_unused(settings: PlanSettings) -> None:
    """Refuse what a user says of batches where the whole graph is trained.

    Plans that hold such a workload are read and made again all the same.

    Raises:
        SettingsError: the line names the flag.
    """
    if settings.mode != "full-graph":
        return
    expected = "the default in mode full-graph, whose step is an epoch over all neighbours"
    refuse_changed(settings, ("batch_size",), expected)
    if any(fanout != -1 for fanout in settings.workload.fanouts):
        refuse_changed(settings, ("fanouts",), expected)


def check_graph(graph: Graph, settings: PlanSettings, *, calibrate: bool = False) -> None:
    """Refuse settings that no candidate can be made of for this dataset.

    Raises:
        SettingsError: one line with what was expected, what was found and what to do.
        SamplerError: the sampler or a parameter of it is unknown.
        DatasetError: model rgcn for a graph without edge types.
    """
    check_model_module(settings.workload.model)
    settings = with_samplers(graph, settings)
    if settings.quick and calibrate:
        raise SettingsError(
            "--quick: expected no --calibrated, whose factors are of measured profiles; drop one"
        )
    if settings.quick and (why := no_estimate(graph, settings)):
        raise SettingsError(
            f"--quick: expected a request that can be estimated at once, found {why}; drop --quick"
        )
    if settings.mode == "full-graph":
        from gnnplan.planner.fullgraph.plan import check_training

        check_training(graph, settings, calibrate=calibrate)
        return
    for each in settings.by_sampler():
        check_settings(graph, each, gpus=not settings.cores)


def no_estimate(graph: Graph, settings: PlanSettings) -> str:
    """Return why a request has no estimate before anything is measured; empty where it has one."""
    work = settings.workload
    if settings.mode == "full-graph":
        if settings.drop != "nodes" or settings.keep not in (None, 1.0):
            return "edges or rows to drop, whose effect is estimated from the features"
        return ""
    if work.model not in MODELS:
        return f"model {work.model}, whose work does not follow from its shapes"
    if settings.batching == "cooperative" or settings.owner != "hash" or settings.replication:
        return "ranks that share batches or lists, whose exchanges have to be counted"
    if settings.policy != "auto" and "parts" in find_policy(settings.policy).needs:
        return f"policy {settings.policy}, for which the graph has to be cut into parts"
    for each in settings.by_sampler():
        if not find_sampler(each.sampler).is_expected:
            return f"sampler {each.sampler}, of whose batches no law is known"
    if any(
        is_layerwise(str(each.sampler_parameters.get("over"))) for each in settings.by_sampler()
    ):
        return "layers that prefer a rank's own nodes, of which no law is built"
    return ""


def check_settings(graph: Graph, settings: PlanSettings, *, gpus: bool = False) -> None:
    """Refuse mini-batches of one sampler that no candidate can do; `gpus` says ranks may be GPUs.

    Raises:
        SettingsError: no candidate can.
    """
    if settings.mode == "full-graph":
        raise SettingsError(
            "expected mode auto or minibatch, found full-graph, whose candidates only `gnnplan "
            "plan` prices; plan again with other settings"
        )
    check_kind(graph, settings, gpus=gpus)
    if is_unfit(settings):
        raise SettingsError(
            "model gat: expected a sampler without edge weights (attention has no unbiased "
            f"weighted form), found {settings.sampler}, whose blocks have them; plan with neighbor "
            "or labor:estimator=plain, or another model"
        )
    found, allowed = statistics_of(settings), StatisticsClass(settings.workload.allow)
    if not allowed.allows(found):
        raise SettingsError(
            f"expected a sampler whose statistics are {allowed.value}, found {settings.sampler}, "
            f"which is {found.value} under {settings.workload.model}; add --allow {found.value}"
        )
    if is_layerwise(settings.sampler):
        _check_layers(graph, settings)
    check_lists(graph, settings)
    check_training_data(graph)
    row, device = graph.row_bytes, settings.device_memory_bytes
    if device is not None and device < row:
        raise SettingsError(
            f"expected device memory of at least one feature row ({row} bytes), found {device}; "
            "raise --device-memory"
        )


def _check_layers(graph: Graph, settings: PlanSettings) -> None:
    """Refuse layers that the sampler could not draw; SamplerError for their sizes."""
    if settings.dialect != "every_hop":
        raise SettingsError(
            f"sampler {settings.sampler}: expected dialect every_hop (a layer is drawn for all "
            f"vertices so far), found {settings.dialect}; plan with every_hop"
        )
    from gnnplan.runtime.sampling.checks import check_layer_sizes  # on use: with numba

    values = parameters_of(Sampler(name=settings.sampler, parameters=settings.sampler_parameters))
    sizes = layer_sizes(settings.sampler, values, settings.workload.fanouts)
    check_layer_sizes(sizes, graph.num_nodes)


def check_lists(graph: Graph, settings: PlanSettings) -> None:
    """Refuse hot lists on GPUs where other memories of theirs, or the host's draws, contradict.

    Raises:
        SettingsError: the settings do not go with the dataset, or with each other.
    """
    if settings.topology not in ("cached", "clique"):
        return
    if is_link(graph) or is_typed(settings.workload):
        raise SettingsError(
            f"--topology {settings.topology}: expected nodes of one type to predict (hot lists are "
            "not built for links and typed graphs), found another task; leave it out"
        )
    if is_dynamic(settings.policy):
        raise SettingsError(
            f"--topology {settings.topology}: expected rows at fixed places beside lists, found "
            f"policy {settings.policy}, a cache that fills itself; choose another --policy"
        )


def check_kind(graph: Graph, settings: PlanSettings, *, gpus: bool = False) -> None:
    """Refuse what the runtime cannot do with this dataset's task and types.

    Raises:
        SettingsError: the settings do not go with the dataset.
        DatasetError: model rgcn for a graph without edge types.
    """
    work = settings.workload
    if graph.x_by_type and not is_typed(work):
        raise SettingsError(
            f"{graph.name}: expected model rgcn for features by node type, found {work.model}; "
            "add --model rgcn"
        )
    if not (is_link(graph) or is_typed(work)):
        if work.type_fanouts:
            raise SettingsError(
                f"expected fan-outs by edge type with model rgcn alone, found model {work.model}; "
                "drop --type-fanouts"
            )
        return
    what = f"task {LINK_TASK}" if is_link(graph) else "model rgcn"
    if is_link(graph) and is_typed(work):
        raise SettingsError(
            "expected model sage, gcn, gat or module:factory for task link, found rgcn; links of "
            "typed graphs cannot be trained on"
        )
    if not is_default(settings.sampler, settings.sampler_parameters):
        raise SettingsError(
            f"{what}: expected sampler {DEFAULT_SAMPLER} without parameters, found "
            f"{settings.sampler}{' with parameters' if settings.sampler_parameters else ''}; "
            "drop --sampler"
        )
    if is_typed(work):
        _check_types(graph, settings, gpus=gpus)


def _check_types(graph: Graph, settings: PlanSettings, *, gpus: bool) -> None:
    names = types_of(graph).edge_types
    unknown = sorted(set(settings.workload.type_fanouts) - set(names))
    if unknown:
        raise SettingsError(
            f"--type-fanouts: expected edge types among {', '.join(names)}, found {unknown[0]!r}"
            f"{did_you_mean(unknown[0], names)}"
        )
    if graph.x_by_type and not gpus and settings.policy not in ("auto", "none"):
        raise SettingsError(
            f"{graph.name}: expected policy auto or none for features by node type, which cores "
            f"read where they are, found {settings.policy}"
        )
    if graph.x_by_type and not settings.shared_host:
        raise SettingsError(
            f"{graph.name}: expected the host's shared mapping for features by node type; drop "
            "--no-shared-host"
        )


def check_training_data(graph: Graph) -> None:
    """Refuse a dataset without what every training needs.

    Raises:
        SettingsError: no training nodes, no features, or no classes.
    """
    lacking = name_lacking(
        num_train=graph.num_train, feature_dim=graph.feature_dim, num_classes=graph.num_classes,
        task=str(graph.task),
    )  # fmt: skip
    if lacking:
        raise SettingsError(f"{graph.path}: {lacking}")


def refuse_other_formats(folder: Path) -> None:
    """Refuse a file, or a folder that is no dataset, with the way to make it one.

    Raises:
        DatasetError: it is something that may be imported.
    """
    if folder.is_file() or (folder.is_dir() and not (folder / META_FILE).is_file()):
        found = "a file" if folder.is_file() else f"a folder without {META_FILE}"
        raise DatasetError(
            f"{folder}: expected a graph dataset folder, found {found}; import it first: "
            f"`gnnplan graph import {folder} FOLDER`"
        )


def check_machine_name(name: str) -> None:
    """Refuse a machine that is neither a preset's name nor a file.

    Raises:
        MachineError: names the presets that are spelt alike.
    """
    if not is_preset(name) and not Path(name).is_file():
        raise unknown_machine(name)


def check_model_module(model: str) -> None:
    """Refuse a model of the user's whose module is not there, without running any of it.

    Raises:
        SettingsError: no such module can be found from here.
    """
    if model in MODELS:
        return
    module, _, factory = model.partition(":")
    top = module.partition(".")[0]
    found = top.isidentifier() and (
        importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    )
    if not found or not factory.isidentifier():
        raise SettingsError(
            f"model {model}: expected an importable module:factory, found no module {top!r} from "
            f"{Path.cwd()}; correct --model, or set PYTHONPATH"
        )


def check_output(out: Path, *, in_place: bool = False) -> None:
    """Refuse an output folder that holds something else or cannot be written.

    `in_place` says that files are exchanged within the folder, which may be the current one.

    Raises:
        PlanError: it holds something that is not a plan, or is the current folder.
        InputError: it cannot be written.
    """
    if (out / META_FILE).is_file():
        raise InputError(
            f"{out}: expected a folder for the plan, found a graph dataset; choose another --output"
        )
    (refuse_foreign_folder if in_place else refuse_unplaced)(out)
    out = real_folder(out)
    place = _existing(out.absolute().parent)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=f".{out.name}."):
            pass
    except OSError as error:
        raise InputError(
            f"{out}: expected a folder that can be written, found {place} "
            f"({error.strerror or error}); choose another --output"
        ) from None


def _existing(folder: Path) -> Path:
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _check_free_disk(out: Path, graph: Graph) -> None:
    needed = graph.num_nodes * CODE_BYTES + SPARE_BYTES
    free = shutil.disk_usage(_existing(out.absolute().parent)).free
    if free < needed:
        raise InputError(
            f"{out}: expected {needed / 1e6:.1f} MB free for a plan of {graph.num_nodes:,} nodes, "
            f"found {free / 1e6:.1f} MB; free some, or choose another --output"
        )


def check_outputs(graph: Graph, settings: PlanSettings, machine: MachineModel | None) -> None:
    """Refuse a model whose outputs alone exceed the memory that a rank can have.

    The sum holds the last layer's parameters with their optimizer, and one rank's outputs with
    their gradients. `machine` None is this machine.

    Raises:
        PlanDoesNotFit: the text is the sum.
    """
    work = settings.workload
    outputs = {"binary": 1, "link": work.hidden}.get(str(graph.task), graph.num_classes)
    inputs = work.hidden if work.num_layers > 1 else graph.feature_dim
    name, capacity, ranks = _memory_of_a_rank(machine)
    capacity = min(capacity, settings.device_memory_bytes or capacity)
    seeds = math.ceil(work.batch_size / max(1, settings.devices or ranks))
    parts = {
        "model and optimizer": model_bytes(inputs * outputs if work.model in MODELS else 0),
        "outputs and gradients": 2 * FLOAT_BYTES * seeds * outputs,
    }
    found = sum_parts(parts, capacity)
    if found.headroom < 0:
        raise PlanDoesNotFit(
            f"{sum_text(name, found)} for {outputs:,} outputs of {graph.name}; classes are "
            "numbered from 0 on: import it with labels without gaps, or lower --hidden",
            constraint=name,
            needed_bytes=found.total,
            available_bytes=capacity,
        )


def _memory_of_a_rank(machine: MachineModel | None) -> tuple[str, int, int]:
    """Return name and bytes of the largest memory of a rank, and the most ranks at once."""
    if machine is None:
        return "host0", usable_ram_bytes(), os.cpu_count() or 1
    gpus = [m for m in machine.memories if m.kind == "device"]
    of_ranks = gpus if machine.gpus and gpus else [m for m in machine.memories if m.kind == "host"]
    largest = max(of_ranks or machine.memories, key=lambda m: m.capacity_bytes)
    return largest.name, largest.capacity_bytes, len(machine.processors)


def rates_of_such_cores(machine: MachineModel) -> dict[str, Table]:
    """Return the tables of drawing and gathering that a machine lacks, of cores like its own."""
    like = load_preset(LIKE).tables
    return {name: like[name] for name in LOADING if name not in machine.tables}
