"""What was measured of a GPU, and how a point of it is settled or refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.probe.gpu_seam import GpuDevice, GpuSizes, Work
from planner.probe.timing import Measurement, NoisePolicy, settled

Points = dict[tuple[int, ...], Measurement]
"""By the point's coordinates."""


@dataclass(kw_only=True, slots=True)
class GpuFindings:
    """What was measured of one GPU; empty points were refused or do not exist here."""

    gpu: int
    """Its number among those measured; `uuid` says which GPU of the machine that is."""
    uuid: str
    processors: int
    copy: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds within its memory, by bytes."""
    to_gpu: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of copies from page-locked host memory, by bytes."""
    to_host: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row from its own memory, by row bytes."""
    uva: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row of host memory read in place, by row bytes and programs."""
    peer_copy: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of a large copy from a peer, by the peer's index and bytes."""
    peer_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per row from a peer, by index and row bytes."""
    peer_message: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of the smallest copy from another GPU, peer or not, by its index."""
    flops: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds per flop of a matrix product in float32, at ()."""
    launch: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Seconds of an empty kernel, at ()."""
    beside: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of compute beside a gather from host memory, by the gather's programs."""
    beside_gather: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of that gather."""
    hidden: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Share of an all-reduce over several GPUs that compute on them hides, by how many; the first
    GPU alone has it."""
    crowded: Points = field(default_factory=dict[tuple[int, ...], Measurement])
    """Slowdown of a large copy from the host while all other GPUs copy too, at ()."""
    context_bytes: int = 0
    process_bytes: int = 0
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Bench:
    """Settles points on one GPU."""

    device: GpuDevice
    sizes: GpuSizes
    gpu: int
    policy: NoisePolicy
    found: GpuFindings

    def point(
        self, name: str, work: Work, per: float = 1.0, beside: Sequence[Work] = ()
    ) -> Measurement | None:
        """Seconds over `per`, or None where they stay noisier than the limit."""

        def sample() -> list[float]:
            taken = self.device.seconds(work, self.sizes.repeats, beside)
            return [seconds / per for seconds in taken]

        measured = settled(sample, self.policy)
        if measured.uncertain:
            self.found.notes.append(
                f"gpu{self.gpu}: {name} refused: spread {measured.spread:.0%} after "
                f"{measured.attempts} attempts, at most {self.sizes.limit:.0%} is believed"
            )
            return None
        return measured

    def points(
        self, name: str, works: Mapping[tuple[int, ...], Work], *, by_row: bool = False
    ) -> Points:
        """The points that settled; seconds, or with `by_row` seconds per row."""
        out: Points = {}
        for place, work in works.items():
            per = max(work.num_bytes // work.row_bytes, 1) if by_row else 1
            measured = self.point(f"{name} at {', '.join(map(str, place))}", work, per)
            if measured is not None:
                out[place] = measured
        return out
