"""Words for the names in a plan: stages, sources, shadow prices, the certificate."""

import re
from dataclasses import dataclass
from itertools import takewhile

from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.queries.explain import PLACES, gap_words
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.plan.schema import Certificate, Plan
from gnnplan.runtime.stages import Stage

STAGE_WORDS = {
    Stage.SEEDS: "choosing this rank's share of the global batch",
    Stage.SAMPLE: "drawing neighbours and relabelling them into blocks",
    Stage.EXCHANGE_IDS: "sending vertex ids to the ranks that own them",
    Stage.GATHER: "reading feature rows into the batch",
    Stage.EXCHANGE_ROWS: "sending feature rows back to the ranks that asked",
    Stage.COPY: "moving the batch from the host to the device",
    Stage.BATCH: "adding labels and edge weights",
    Stage.WAIT: "the training thread waiting for the next batch",
    Stage.FORWARD_BACKWARD: "model forward, loss and backward",
    Stage.HALO_EXCHANGE: "boundary rows between ranks",
    Stage.ALL_REDUCE: "summing gradients over ranks, the wait for the slowest included",
    Stage.OPTIMIZER: "updating the parameters",
}
SOURCE_WORDS = {
    **PLACES,
    "remote": "in another host's memory",
    "cache": "in a cache that fills itself",
}
SOURCE_ORDER = ("own", "cache", "peer", "host", "remote", "disk")
LEAST_SAVED = 1e-4
"""Share of a step below which saved seconds are shown as a share alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A relaxed limit and the seconds per step that it would save."""

    name: str
    seconds: float
    sentence: str


def stage_words(name: str) -> str:
    """Say what happens in a stage; empty for an unknown one."""
    return STAGE_WORDS.get(Stage(name), "") if name in set(Stage) else ""


def time_text(seconds: float) -> str:
    """Write seconds for people, with the sign of micro.

    >>> time_text(4.2e-6), time_text(0.0123)
    ('4.2 \N{MICRO SIGN}s', '12.3 ms')
    """
    return seconds_text(seconds).replace(" us", " \N{MICRO SIGN}s")


def rate_text(bytes_per_second: float) -> str:
    """Write bytes per second for people.

    >>> rate_text(25.8e9)
    '25.8 GB/s'
    """
    return f"{size_text(bytes_per_second)}/s"


def share_text(share: float) -> str:
    """Write a share for people, without rounding small ones to 0.

    >>> share_text(0.5), share_text(0.0004), share_text(0.0), share_text(2.5e-6)
    ('50.0%', '0.04%', '0%', 'under 0.01%')
    """
    if share == 0:
        return "0%"
    if abs(share) < 1e-4:
        return "under 0.01%"
    return f"{share:.1%}" if abs(share) >= 1e-3 else f"{share:.2%}"


def prices(plan: Plan) -> list[Price]:
    """Return what more memory or faster links would save, the most first."""
    step = plan.prediction.step_seconds.value
    return [
        Price(name=name, seconds=saved, sentence=price_sentence(name, saved, step))
        for name, saved in sorted(plan.shadow_prices.items(), key=lambda item: -item[1])
    ]


def price_sentence(name: str, saved_seconds: float, step_seconds: float) -> str:
    """Write a shadow price as a sentence.

    >>> price_sentence("host0 +1 GiB", 0.002, 0.1)
    'One GiB more on host0 would save 2.0 ms per step (2.0%).'
    >>> price_sentence("PCIe +10%", 0.0, 0.1)
    'PCIe 10% faster would save nothing: no step waits for it.'
    >>> price_sentence("PCIe +10%", 2e-9, 0.1)
    'PCIe 10% faster would save under 0.01% of the step.'
    """
    grown = re.fullmatch(r"(.*) \+1 GiB", name)
    faster = re.fullmatch(r"(.*) \+(\d+)%", name)
    what = name
    if grown:
        what = f"One GiB more on {grown[1]}"
    elif faster:
        what = f"{faster[1]} {faster[2]}% faster"
    if saved_seconds <= 0:
        return f"{what} would save nothing: no step waits for it."
    share = share_text(saved_seconds / step_seconds if step_seconds > 0 else 0.0)
    if saved_seconds < LEAST_SAVED * step_seconds:
        return f"{what} would save {share} of the step."
    return f"{what} would save {time_text(saved_seconds)} per step ({share})."


def common_beginning(names: list[str]) -> str:
    """Return the beginning that all names share, up to a comma; empty for a single name.

    >>> common_beginning(["2 GPUs (gpu0+gpu1), 2 ahead", "2 GPUs (gpu0+gpu1), 4 ahead, random"])
    '2 GPUs (gpu0+gpu1), '
    >>> common_beginning(["2 GPUs, 2 ahead", "4 GPUs, 2 ahead"]), common_beginning(["2 GPUs, none"])
    ('', '')
    """
    if len(names) < 2:
        return ""
    # The last part is never common: a row that says nothing could not be told from another.
    parts = [name.split(", ")[:-1] for name in names]
    alike = list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    return "".join(f"{column[0]}, " for column in alike)


def certificate_sentence(certificate: Certificate) -> str:
    """Say how good the plan is known to be, within its model."""
    words = gap_words(certificate.gap, certificate.lower_bound, certificate.status)
    return f"{words[0].upper()}{words[1:]}."
