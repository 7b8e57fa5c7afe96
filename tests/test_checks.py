"""While tests run, arguments and results are held to their annotations."""

import pytest
from beartype.roar import BeartypeCallHintParamViolation

from gnnplan.planner.cost.request import seeds_per_rank
from gnnplan.runtime.comm.mesh import backend_of


def test_an_argument_of_another_type_is_refused_in_both_packages() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        seeds_per_rank("1024", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BeartypeCallHintParamViolation):
        backend_of(3)  # pyright: ignore[reportArgumentType]
