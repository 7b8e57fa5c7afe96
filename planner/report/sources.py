"""Where feature rows come from: shares by device and source."""

from dataclasses import dataclass

from markupsafe import Markup

from planner.report.svg import element, figure, percent
from planner.report.words import SOURCE_ORDER, SOURCE_WORDS, share_text
from runtime.plan import Plan

ROW = 40
BAR = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One source's part of a device's rows."""

    source: str
    words: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """Where devices that read alike get their rows."""

    names: list[str]
    shares: list[Share]
    """Cheapest source first; together 1, or empty where no rows are read."""
    own_rows: int
    """Rows each keeps in its own memory."""

    @property
    def name(self) -> str:
        """The names together."""
        if len(self.names) <= 2:
            return " and ".join(self.names)
        return f"{self.names[0]} to {self.names[-1]}"


def device_rows(plan: Plan) -> list[DeviceRows]:
    """Expected shares by device; neighbours that read alike stand together."""
    own = plan.strategy.features.own_rows
    found: list[DeviceRows] = []
    for rank in range(plan.num_ranks):
        name = f"rank{rank}"
        rates = plan.prediction.hit_rates.get(name, {})
        order = sorted(rates, key=lambda s: (_place(s), s))
        shares = [
            Share(source=s, words=SOURCE_WORDS.get(s, s), share=rates[s])
            for s in order
            if rates[s] > 0
        ]
        kept = own[rank] if rank < len(own) else 0
        if found and (found[-1].shares, found[-1].own_rows) == (shares, kept):
            found[-1].names.append(name)
        else:
            found.append(DeviceRows(names=[name], shares=shares, own_rows=kept))
    return found


def _place(source: str) -> int:
    return SOURCE_ORDER.index(source) if source in SOURCE_ORDER else len(SOURCE_ORDER)


def draw_sources(devices: list[DeviceRows], *, name: str = "sources") -> Markup:
    """A stacked bar per device."""
    rows = [_row(device, i * ROW) for i, device in enumerate(devices)]
    words = "; ".join(f"{d.name}: {shares_text(d)}" for d in devices)
    return figure(
        name,
        "Predicted share of feature rows by source",
        f"{words}.",
        *rows,
        height=max(1, ROW * len(devices)),
    )


def shares_text(device: DeviceRows) -> str:
    """The shares in words."""
    return ", ".join(f"{share_text(s.share)} {s.words}" for s in device.shares) or "no rows"


def _row(device: DeviceRows, top: int) -> Markup:
    pieces, at = list[Markup](), 0.0
    for each in device.shares:
        pieces.append(
            element(
                "rect",
                element("title", f"{share_text(each.share)} {each.words}"),
                class_=f"source-{each.source}",
                x=percent(at),
                y=top + 20,
                width=percent(each.share),
                height=BAR,
            )
        )
        at += each.share
    short = ", ".join(f"{each.source} {share_text(each.share)}" for each in device.shares)
    return element(
        "g",
        element("text", device.name, class_="name", x=0, y=top + 14),
        element("text", short, class_="value", x="100%", y=top + 14, text_anchor="end"),
        element("rect", class_="track", x=0, y=top + 20, width="100%", height=BAR),
        *pieces,
    )
