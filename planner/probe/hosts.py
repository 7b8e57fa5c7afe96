"""Links between hosts: measured by one process per host, all going through the same schedule.

    roll call -> every host probes itself -> pairs one after the other -> cards -> collectives

Between two hosts: latency is half the round trip of a small message, bandwidth the rate of several
megabytes sent back to back (0.3 s), in each direction by itself. Both are the best of the repeats:
other traffic and busy hosts only make a link look worse. A card (NIC) is what a host sends to, or
receives from, all others at once, each at the share that its pair alone would take: less than their
sum where the card is shared. All numbers are of gloo over TCP, payload only.
"""

import itertools
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.probe.collectives import (
    SHORT,
    distributed,
    one_core_each,
    read_steps,
    take_steps,
)
from gnnplan.planner.probe.context import MIB, ProbeSizes, ProgressCallback
from gnnplan.planner.probe.timing import Measurement, make_burst, summarize
from gnnplan.planner.units import silent
from gnnplan.runtime.comm.route import split_endpoint, use_route_to
from gnnplan.runtime.launch.hosts import Roll, call_roll
from gnnplan.runtime.process import batch_threads

GROUP_SECONDS = 1800.0
"""Longest seconds that one host waits for another while both probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """This host among those that are probed together."""

    node_rank: int
    num_hosts: int
    endpoint: str
    wait_seconds: float


class HostTeam:
    """The process group of one process per host; use as a context manager.

    Entering raises WorkerFailed where a host did not come, or probes with other sizes.
    """

    def __init__(self, meeting: Meeting, sizes: ProbeSizes) -> None:
        self.host, self.size = meeting.node_rank, meeting.num_hosts
        self.sizes, self._meeting = sizes, meeting
        self._store: Any = None
        self.dist = distributed()

    def __enter__(self) -> "HostTeam":
        meeting = self._meeting
        use_route_to(split_endpoint(meeting.endpoint)[0])
        roll = Roll(
            endpoint=meeting.endpoint,
            host=meeting.node_rank,
            ranks_by_host=[1] * meeting.num_hosts,
            plan_id="probe",
            options=self.sizes.name,
            wait_seconds=meeting.wait_seconds,
        )
        self._store = call_roll(roll)
        with batch_threads():  # as the runtime makes its groups
            self.dist.init_process_group(
                "gloo",
                store=self.dist.PrefixStore("probe", self._store),
                rank=self.host,
                world_size=self.size,
                timeout=timedelta(seconds=GROUP_SECONDS),
            )
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.dist.barrier()  # host 0 serves the store until nobody needs it
        self.dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Return every host's value (picklable), in the order of the hosts."""
        values: list[Any] = [None] * self.size
        self.dist.all_gather_object(values, value)
        return values


STEPPED = {
    "all_to_all": "all_to_all_stepped",
    "all_reduce": "all_reduce_stepped",
    "early": "all_to_all_early",
    "after": "all_to_all_after",
    "around_rows": "all_to_all_around_rows",
    "hidden": "all_to_all_hidden",
    "asked": "all_to_all_asked",
    "around_ids": "all_to_all_around_ids",
}
"""Table names of what `read_steps` reads."""
ID_TABLES = ("all_to_all_asked", "all_to_all_around_ids")
"""Tables over bytes of ids; the others are over bytes of rows."""
SUSTAINED_SECONDS = 0.3
CHUNK_BYTES = MIB
MOST_CALLS = 50
SMALL_BYTES = 8
CLOCK_TRIPS = 8
"""Round trips of which the quickest tells how far two hosts' clocks are apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """Rates between n hosts; the diagonals are zero."""

    latency_seconds: NDArray[np.float64]
    """Shape (n, n), from row to column."""
    bandwidth: NDArray[np.float64]
    """Bytes per second, shape (n, n), from row to column."""
    sent: NDArray[np.float64]
    """Bytes per second that a host sends to all others at once, shape (n,)."""
    received: NDArray[np.float64]
    """Bytes per second that a host receives from all others at once, shape (n,)."""
    message_bytes: list[int]
    messages: dict[tuple[int, int], list[Measurement]]
    """Seconds of one message, by pair and size."""
    host_counts: list[int]
    collectives: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])
    """Seconds of a call, row-major over (message_bytes, host_counts)."""
    exchange_bytes: list[int] = field(default_factory=list[int])
    stepped: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])
    """Seconds between two stretches of compute, over (exchange_bytes, host_counts), by table:
    `*_stepped`; `all_to_all_early`, the mean host's lead over the last; `all_to_all_after`, the
    delay of the compute that follows; `all_to_all_asked`, the counts and ids that go ahead;
    `all_to_all_around_*`, what is not metered; `all_to_all_hidden`, a late and an early exchange.
    """


def measure_hosts(team: HostTeam, report: ProgressCallback = silent) -> HostRates:
    """Measure every pair, card and collective; all hosts call this and return the same."""
    return _Schedule(team).measure(report)


@contextmanager
def one_compute_thread() -> Generator[None]:
    """Let torch compute by the calling thread alone.

    Others would poll for work on the core that they share with gloo's threads (DEC-26).
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Schedule:
    """Measurements that every host takes part in, in the same order."""

    def __init__(self, team: HostTeam) -> None:
        self._team, self._dist, self._sizes = team, team.dist, team.sizes
        self.host, self.size, self.gather = team.host, team.size, team.gather

    def measure(self, report: ProgressCallback) -> HostRates:
        n = self.size
        latency, bandwidth = np.zeros((n, n)), np.zeros((n, n))
        messages: dict[tuple[int, int], list[Measurement]] = {}
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
        for k, pair in enumerate(pairs):
            report(f"host {pair[0]} to host {pair[1]}", 0.8 * k / len(pairs))
            latency[pair], bandwidth[pair], messages[pair] = self._pair(*pair)
        report("cards", 0.8)
        cards = [self._card(host, bandwidth, outward) for outward in (True, False) for host in
                 range(n)]  # fmt: skip
        report("collectives", 0.9)
        counts = list(range(2, n + 1))
        calls = {name: self._collective(name, counts) for name in ("all_reduce", "all_to_all")}
        report("collectives between compute", 0.95)
        return HostRates(
            latency_seconds=latency,
            bandwidth=bandwidth,
            sent=np.array(cards[:n]),
            received=np.array(cards[n:]),
            message_bytes=list(self._sizes.message_bytes),
            messages=messages,
            host_counts=counts,
            collectives=calls,
            exchange_bytes=list(self._sizes.exchange_bytes),
            stepped=self._stepped(counts),
        )

    def _pair(self, source: int, target: int) -> tuple[float, float, list[Measurement]]:
        self._dist.barrier()
        found = None
        if self.host in (source, target):
            small = self._exchanges(source, target, SMALL_BYTES, SMALL_BYTES)
            ping = min(small) / 2
            rates = self._sustained(source, {target: self._rate(source, target)})
            sizes = self._sizes.message_bytes
            curve = [self._exchanges(source, target, each, SMALL_BYTES) for each in sizes]
            found = (
                ping,
                rates,
                [summarize([max(s - ping, ping / 2) for s in samples]) for samples in curve],
            )
        return self.gather(found)[source]

    def _exchanges(self, source: int, target: int, there: int, back: int) -> list[float]:
        """Return seconds of round trips as the source sees them; the target's are its own."""
        import torch

        sent = torch.zeros(there, dtype=torch.uint8)
        answer = torch.zeros(back, dtype=torch.uint8)
        calls = torch.tensor([2])
        out: list[float] = []
        for trial in (True, False):
            if self.host == source:
                if not trial:
                    wanted = self._sizes.point_seconds / max(min(out), 1e-6)
                    calls[0] = int(np.clip(wanted, self._sizes.least_repeats, MOST_CALLS))
                self._dist.send(calls, target)
            else:
                self._dist.recv(calls, source)
            out = []
            for _ in range(int(calls)):
                start = time.perf_counter()
                if self.host == source:
                    self._dist.send(sent, target)
                    self._dist.recv(answer, target)
                else:
                    self._dist.recv(sent, source)
                    self._dist.send(answer, source)
                out.append(time.perf_counter() - start)
        return out

    def _rate(self, source: int, target: int) -> float:
        """Estimate a link's bytes per second, agreed on by both hosts."""
        import torch

        seconds = float(np.median(self._exchanges(source, target, 4 * MIB, SMALL_BYTES)))
        agreed = torch.tensor([4 * MIB / seconds], dtype=torch.float64)
        if self.host == source:
            self._dist.send(agreed, target)
        else:
            self._dist.recv(agreed, source)
        return float(agreed)

    def _sustained(self, centre: int, rates: dict[int, float], *, outward: bool = True) -> float:
        """Return bytes per second between a host and others, each sent for as long.

        Only the centre's answer counts: it has the acknowledgements of all (outward), or all of
        what it waited for.
        """
        chunks = {
            host: max(4, round(rate * SUSTAINED_SECONDS / CHUNK_BYTES))
            for host, rate in rates.items()
        }
        repeats = range(self._sizes.least_repeats + 2)
        fastest = min(self._burst(centre, chunks, outward=outward) for _ in repeats)
        return sum(chunks.values()) * CHUNK_BYTES / fastest

    def _burst(self, centre: int, chunks: dict[int, int], *, outward: bool) -> float:
        import torch

        dist = self._dist
        peers = list(chunks) if self.host == centre else [centre]
        number = {peer: chunks[peer if self.host == centre else self.host] for peer in peers}
        data = {peer: torch.zeros(number[peer], CHUNK_BYTES, dtype=torch.uint8) for peer in peers}
        mark = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
        sends = (self.host == centre) == outward
        if self.host == centre:  # the others are ready
            for peer in peers:
                dist.recv(mark, peer)
        else:
            dist.send(mark, centre)
        start = time.perf_counter()
        if not outward and self.host == centre:
            for peer in peers:
                dist.send(mark, peer)  # go
        if not outward and self.host != centre:
            dist.recv(mark, centre)
        post = dist.isend if sends else dist.irecv
        works = [post(row, peer) for peer in peers for row in data[peer]]
        for work in works:
            work.wait()
        if outward and self.host == centre:
            for peer in peers:
                dist.recv(mark, peer)
        elif outward:
            dist.send(mark, centre)
        return time.perf_counter() - start

    def _card(self, host: int, bandwidth: NDArray[np.float64], outward: bool) -> float:
        self._dist.barrier()
        row = bandwidth[host] if outward else bandwidth[:, host]
        if self.size == 2:
            return float(row.max())  # the pair is all there is
        rates = {peer: float(row[peer]) for peer in range(self.size) if peer != host}
        return self.gather(self._sustained(host, rates, outward=outward))[host]

    def _new_groups(self, counts: Sequence[int]) -> list[Any]:
        with batch_threads():
            return [self._dist.new_group(list(range(count))) for count in counts]

    def _collective(self, name: str, counts: Sequence[int]) -> list[Measurement]:
        """Return the slowest host's seconds of a call on the first hosts, by bytes and hosts."""
        groups = dict(zip(counts, self._new_groups(counts), strict=True))
        points: list[Measurement] = []
        for num_bytes in self._sizes.message_bytes:
            for count in counts:
                self._dist.barrier()
                samples: list[float] = []
                if self.host < count:
                    samples = self._calls(name, groups[count], count, num_bytes)
                found = [each for each in self.gather(samples) if each]
                points.append(summarize([float(s) for s in np.max(found, axis=0)]))
        for group in groups.values():
            if group is not self._dist.GroupMember.NON_GROUP_MEMBER:
                self._dist.destroy_process_group(group)
        return points

    def _calls(self, name: str, group: Any, count: int, num_bytes: int) -> list[float]:
        import torch

        from gnnplan.runtime.comm.collectives import exchange_pairwise

        share = max(1, num_bytes // 4 // count)
        sent = torch.zeros(share * count)
        received = torch.zeros_like(sent)
        out: list[float] = []
        for _ in range(self._sizes.least_repeats + 1):
            self._dist.barrier(group=group)
            start = time.perf_counter()
            if name == "all_reduce":
                self._dist.all_reduce(sent, group=group)
            else:
                exchange_pairwise(received, sent, [share] * count, [share] * count, group)
            out.append(time.perf_counter() - start)
        return out[1:]  # the first one connects

    def _stepped(self, counts: Sequence[int]) -> dict[str, list[Measurement]]:
        """Return seconds of a training loop's calls, and of counts and ids that go ahead."""
        from gnnplan.runtime.comm.collectives import Communicator

        found: dict[str, list[Measurement]] = {name: [] for name in STEPPED.values()}
        rows = self._sizes.exchange_burst_rows
        compute, short = make_burst(rows), make_burst(rows // SHORT)
        groups = {
            count: (rows, gradients)
            for count, rows, gradients in zip(
                counts, self._new_groups(counts), self._new_groups(counts), strict=True
            )
        }
        for num_bytes in self._sizes.exchange_bytes:
            for count in counts:
                offset = self._clock_offset()
                mine: list[Any] = []
                if self.host < count:
                    # One process per host: its threads meet on one core, as those of a rank do.
                    with one_core_each(self.host, count), one_compute_thread():
                        exchanging, reducing = (
                            Communicator(group, between_hosts=True) for group in groups[count]
                        )
                        mine = take_steps(
                            exchanging, reducing, num_bytes, self._sizes.exchange_steps,
                            compute, short,
                        )  # fmt: skip
                each = [np.array(m) - o for m, o in self.gather((mine, offset)) if m]
                read = read_steps(np.array(each))
                for of, name in STEPPED.items():
                    found[name].append(read[of])
        for group in itertools.chain(*groups.values()):
            if group is not self._dist.GroupMember.NON_GROUP_MEMBER:
                self._dist.destroy_process_group(group)
        return found

    def _clock_offset(self) -> float:
        """Return this host's clock less host 0's, in the middle of the quickest round trip."""
        import torch

        self._dist.barrier()
        clock = torch.zeros(1, dtype=torch.float64)
        offset = 0.0
        for peer in range(1, self.size):
            found: list[tuple[float, float]] = []
            for _ in range(CLOCK_TRIPS):
                if self.host == 0:
                    self._dist.recv(clock, peer)
                    clock[0] = time.perf_counter()
                    self._dist.send(clock, peer)
                elif self.host == peer:
                    start = time.perf_counter()
                    self._dist.send(clock, 0)
                    self._dist.recv(clock, 0)
                    end = time.perf_counter()
                    found.append((end - start, (start + end) / 2 - float(clock)))
            if found:
                offset = min(found)[1]
        return offset
