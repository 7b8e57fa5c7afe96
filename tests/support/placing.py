"""Rows placed as a plan places them."""

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.request import Request
from gnnplan.planner.placement.place import CandidatePlacement, memories_of, place_rows
from gnnplan.planner.workload import Hotness


def rows_placed(
    asked: Request,
    candidate: Candidate,
    hotness: Hotness,
    *,
    host: bool,
    degrees: NDArray[np.int64] | None = None,
) -> CandidatePlacement:
    """By the candidate's policy, in the memories it has; `host`: whether the host may map rows."""
    memories = memories_of(asked, candidate, hotness, shared_host=host)
    return place_rows(asked, candidate, hotness, memories, out_degree=degrees)
