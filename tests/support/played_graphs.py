"""CUDA graphs played on cores: what a graph has captured is called again at each replay.

They show what a capture and the runs before it send, which graphs are replayed, and when they are
given back. What is captured runs once meanwhile, which a GPU does not do.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnplan.runtime.processor import EmulatedProcessor


class PlayedGraph:
    """In the place of torch's CUDAGraph."""

    def __init__(self) -> None:
        self.piece: Callable[[], None] | None = None
        """What was captured; None: nothing, or it was given back."""

    def replay(self) -> None:
        """Make the captured calls."""
        assert self.piece is not None
        self.piece()

    def reset(self) -> None:
        """Give it back."""
        self.piece = None

    def pool(self) -> tuple[int, int]:
        """Memory that further graphs may share."""
        return 0, 0


def play_graphs(patch: pytest.MonkeyPatch) -> list[PlayedGraph]:
    """Let emulated GPUs capture the pieces of steps; returns a list of the graphs, as they come."""
    made: list[PlayedGraph] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def make() -> PlayedGraph:
        made.append(PlayedGraph())
        return made[-1]

    def capture(graph: PlayedGraph, **how: Any) -> AbstractContextManager[None]:
        frame = inspect.stack()[1].frame
        graph.piece = frame.f_locals["piece"]
        return nullcontext()

    patch.setattr(EmulatedProcessor, "captures", True)
    for name, value in {
        "CUDAGraph": make,
        "graph": capture,
        "Stream": lambda *device: stream,
        "current_stream": lambda *device: stream,
        "stream": lambda entered: nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, value)
    return made


def held(graphs: list[PlayedGraph]) -> int:
    """How many are not given back."""
    return sum(graph.piece is not None for graph in graphs)
