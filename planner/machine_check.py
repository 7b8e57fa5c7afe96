"""What must hold in a machine file before anything is computed from it: names, ends, signs."""

from collections import Counter
from collections.abc import Iterable

from planner.errors import MachineError
from planner.machine import Link, MachineModel

MOST_PARTS = 4096
"""Processors, memories and switches; a thousand GPUs are fewer."""
MOST_LINKS = 1 << 16


def check_machine(machine: MachineModel) -> None:
    """Refuse a machine whose parts do not fit together.

    Raises:
        MachineError: names the first thing that does not.
    """
    parts = [x.name for x in (*machine.processors, *machine.memories, *machine.switches)]
    if not machine.processors or not machine.memories:
        _refuse("expected at least one processor and one memory, found none")
    if len(parts) > MOST_PARTS or len(machine.links) > MOST_LINKS:
        _refuse(
            f"expected at most {MOST_PARTS} parts and {MOST_LINKS} links, found {len(parts)} and "
            f"{len(machine.links)}"
        )
    _once("part", parts)
    _once("link", (link.name for link in machine.links))
    known, memories = set(parts), {memory.name for memory in machine.memories}
    for processor in machine.processors:
        _among(f"processor {processor.name!r:.80}", processor.memory, memories, "memories")
        if not 1 <= processor.cores < 1 << 20:
            _refuse(f"processor {processor.name!r:.80}: expected cores from 1, found others")
        if not 0 <= processor.host < MOST_PARTS:
            _refuse(f"processor {processor.name!r:.80}: expected the number of a host")
    for memory in machine.memories:
        if not 0 < memory.capacity_bytes < 1 << 63:
            _refuse(f"memory {memory.name!r:.80}: expected a capacity above 0 bytes")
    for link in machine.links:
        _check_link(link, known)
    for switch in machine.switches:
        if switch.kind == "card":
            _check_card(machine, switch.name, memories)
    processors = {processor.name for processor in machine.processors}
    for cover in (machine.cliques, *machine.other_covers):
        names = [name for clique in cover for name in clique]
        _once("member of a clique", names)
        for name in names:
            _among("a clique", name, processors, "processors")
    if not 0 <= machine.noise < 10:
        _refuse(f"expected noise from 0 to 10, found {machine.noise}")


def _check_link(link: Link, known: set[str]) -> None:
    for end in (link.source, link.target):
        _among(f"link {link.name!r:.80}", end, known, "parts")
    if link.bandwidth_bytes_per_second <= 0 or link.latency_seconds < 0:
        _refuse(f"link {link.name!r:.80}: expected a bandwidth above 0 and a latency from 0")
    if min(link.gather_bytes_per_second, link.transaction_bytes, link.lanes) < 0:
        _refuse(f"link {link.name!r:.80}: expected rates, sizes and lanes from 0")


def _check_card(machine: MachineModel, card: str, memories: set[str]) -> None:
    """A card is one host's: bytes reach it from that host's memory, and go back there."""
    joined = {x.source for x in machine.links if x.target == card} & memories
    back = {x.target for x in machine.links if x.source == card} & memories
    if len(joined) != 1 or joined != back:
        found = ", ".join(sorted(joined | back)) or "none"
        _refuse(f"card {card!r:.80}: expected links to and from one memory, found {found:.80}")


def _once(what: str, names: Iterable[str]) -> None:
    name, count = next(iter(Counter(names).most_common(1)), ("", 1))
    if count > 1:
        _refuse(f"expected each {what} once, found {name!r:.80} {count} times")


def _among(whose: str, name: str, known: set[str], what: str) -> None:
    if name not in known:
        _refuse(f"{whose}: expected one of the machine's {what}, found {name!r:.80}")


def _refuse(text: str) -> None:
    raise MachineError(text)
