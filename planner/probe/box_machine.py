"""From a box's description to a machine: every link, switch and memory with its number's source.

    host0 -> numa<n> -> plx<s> -> gpu<g>.memory -> gpu<g>        reads of host memory by a GPU
    gpu<a>.memory -> gpu<b>.memory, or through nvswitch0         reads of a peer
    host0 -> nic<h> -> network0 -> nic<k>                        to another host

Host memory is spread over the NUMA nodes, so a read takes equal shares of each node's channels.
"""

from planner.machine import MachineModel, Switch, Table
from planner.partition.cliques import clique_covers
from planner.probe.box import Box
from planner.probe.box_build import Build, add_card, add_gpus, add_host, add_nvlinks
from planner.probe.hosts_machine import prefix_of
from planner.probe.parts import load_effects, load_part


def box_machine(box: Box, name: str, num_hosts: int = 1) -> MachineModel:
    """The machine of one or several such boxes.

    Args:
        box: one host.
        name: of the preset.
        num_hosts: boxes joined by their network cards.

    Raises:
        MachineError: a part is not known.
    """
    gpu_model, gpu = load_part("gpus", box.gpu)
    host_model, host = load_part("hosts", box.host)
    build = Build(
        box=box,
        gpu=gpu,
        gpu_model=gpu_model,
        host=host,
        host_model=host_model,
        effects=load_effects(),
    )
    covers = clique_covers(box.links())
    for h in range(num_hosts):
        add_host(build, h)
        add_gpus(build, h)
        add_nvlinks(build, h)
        if box.network is not None and num_hosts > 1:
            add_card(build, h)
    if num_hosts > 1:
        build.switches.append(Switch(name="network0", kind="network", provenance="preset"))

    def named(cliques: tuple[tuple[int, ...], ...]) -> list[list[str]]:
        return [
            [f"{prefix_of(h)}gpu{g}" for g in clique]
            for h in range(num_hosts)
            for clique in cliques
        ]

    tables, table_sources = _tables(build)
    return MachineModel(
        name=name,
        fingerprint=f"preset:{name}",
        provenance="preset",
        processors=build.processors,
        memories=build.memories,
        switches=build.switches,
        links=build.links,
        cliques=named(covers[0].cliques),
        other_covers=[named(cover.cliques) for cover in covers[1:]],
        tables=tables,
        noise=build.effects["noise"].value,
        sources=build.sources | table_sources,
        notes=[
            *box.notes,
            f"NVLink: {box.nvlinks.source} ({box.nvlinks.provenance})",
            f"PCIe switches: {box.pcie_switches.source} ({box.pcie_switches.provenance})",
            f"NUMA: {box.numa.source} ({box.numa.provenance})",
            "Nothing was measured on such a machine by us; probe it for figures of its own.",
        ],
    )


def _tables(build: Build) -> tuple[dict[str, Table], dict[str, str]]:
    """Rates of GPUs that are no links; one value each."""
    effects, gpu = build.effects, build.gpu
    found = {
        "gpu_flops": ("flops_per_second", gpu["flops_per_second"].times(effects["matmul_share"])),
        "gpu_kernel": ("seconds", effects["kernel_seconds"]),
        "gpu_message": ("seconds", effects["message_latency_seconds"]),
        "gpu_context": ("bytes", effects["context_bytes"]),
        "gpu_process": ("bytes", effects["process_bytes"]),
        "process_start": ("seconds", effects["process_seconds"]),
    }
    if build.box.network is not None:
        found["host_message"] = ("seconds", build.box.network.latency_seconds)
    spread = effects["spread"].value
    tables = {
        name: Table(
            unit=unit,
            axes=["ranks"],
            points=[[1.0]],
            values=[number.value],
            spread=spread,
            provenance=number.provenance,
        )
        for name, (unit, number) in found.items()
    }
    return tables, {name: number.source for name, (_, number) in found.items()}
