"""Process groups are left after what a script made of them."""

import gc
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from gnnplan.runtime.launch.script import groups_left_last


class Owner:
    """Stands for a model that holds the group until it is freed."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.itself = self  # freed by the collector alone


def enter(place: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_group_outlives_the_models_of_a_script_that_left_it(tmp_path: Path, leaves: bool) -> None:
    seen: list[bool] = []
    with groups_left_last():
        enter(tmp_path / "store")
        model = Owner()
        kept = weakref.ref(model)
        weakref.finalize(model, lambda: seen.append(dist.is_initialized() or leaves))
        if leaves:
            dist.destroy_process_group()
            assert not dist.is_initialized()
        del model
        gc.collect()
    assert kept() is None
    assert seen == [True]
    assert not dist.is_initialized()


def test_leaving_is_torchs_own_again_also_after_a_failure() -> None:
    before = dist.destroy_process_group
    with pytest.raises(KeyError), groups_left_last():
        raise KeyError
    assert dist.destroy_process_group is before


def test_the_group_itself_is_kept_until_the_end(tmp_path: Path) -> None:
    with groups_left_last():
        enter(tmp_path / "store")
        references = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        assert references() is not None
    gc.collect()
    assert references() is None
