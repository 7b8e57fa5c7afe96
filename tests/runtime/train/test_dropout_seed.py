"""The seed of a step's dropout: the same draws as torch.manual_seed gives, without its price."""

import pytest
import torch

from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.train.minibatch import seed_dropout

CPU = torch.device("cpu")


def drawn(seed: int, epoch: int, step: int, rank: int) -> torch.Tensor:
    """What dropout of that seed, epoch, step and rank draws first."""
    seed_dropout(seed, epoch, step, rank, CPU)
    return torch.rand(8)


def test_a_step_draws_what_torch_seeded_whole_would() -> None:
    found = drawn(3, 1, 4, 1)
    torch.manual_seed(int(stream(3, 1, 4, 1, Purpose.DROPOUT)) & 0x7FFF_FFFF_FFFF_FFFF)
    assert torch.equal(found, torch.rand(8))


def test_every_step_and_rank_has_draws_of_its_own() -> None:
    moments = [(3, 1, 4, 1), (4, 1, 4, 1), (3, 2, 4, 1), (3, 1, 5, 1), (3, 1, 4, 0)]
    first = [tuple(drawn(*moment).tolist()) for moment in moments]
    assert len(set(first)) == len(moments)
    assert [tuple(drawn(*moment).tolist()) for moment in moments] == first


def test_devices_that_are_not_there_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_seed: int) -> None:
        raise AssertionError("torch.manual_seed formats a traceback for every kind of device")

    own, other = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.cuda, "default_generators", (other, own))
    seed_dropout(0, 0, 0, 0, CPU)
    untouched = other.initial_seed()
    seed_dropout(0, 0, 0, 0, torch.device("cuda", 1))
    assert own.initial_seed() == torch.default_generator.initial_seed()
    assert other.initial_seed() == untouched != own.initial_seed()
