"""Published placements by hand."""

from dataclasses import replace

import numpy as np
import pytest

from planner.placement.costs import RowCosts
from planner.placement.layout import Layout
from planner.placement.policies.copies import Knowledge, place_named, rows_instance

COSTS = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)
HEAT = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7])
PARTS = np.array([0, 1, 0, 0, 1, 1], np.int32)


@pytest.mark.parametrize("policy", ["metis", "pagraph", "pagraph-plus"])
def test_a_device_keeps_the_best_rows_of_its_own_part(policy: str) -> None:
    instance = rows_instance(HEAT, COSTS, [2, 2], [[0, 1]], None)
    know = Knowledge(out_degree=np.array([9, 1, 5, 1, 8, 2]), parts=lambda _: PARTS)
    found = place_named(policy, instance, know)
    assert isinstance(found, Layout)
    # Of nodes 0, 2, 3 and of 1, 4, 5: by heat, PaGraph by out-degree.
    own = [ids.tolist() for ids in found.held[0].own]
    assert own == ([[0, 2], [4, 5]] if policy == "pagraph" else [[3, 2], [1, 5]])
    # Where batches reach beyond the part, only systems without peers keep what they reach.
    reach = np.array([[True] * 6, [False, True, False, False, True, False]])
    wider = place_named(policy, instance, replace(know, reach=lambda _: reach))
    assert isinstance(wider, Layout)
    own = [ids.tolist() for ids in wider.held[0].own]
    assert own == {
        "metis": [[3, 2], [1, 5]], "pagraph": [[0, 4], [4, 1]], "pagraph-plus": [[1, 3], [1, 4]],
    }[policy]  # fmt: skip
