"""What a GPU says of itself, where CUDA's answers are given."""

import pytest
import torch

from gnnplan.runtime.processor import CudaProcessor


def test_memory_that_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a plan that was tried before leave room for the next one's, which CUDA cannot see."""
    happened: list[str] = []

    def answer(name: str, value: object) -> None:
        def said(device: object = None) -> object:
            assert device in (None, torch.device("cuda", 1))
            happened.append(name)
            return value

        monkeypatch.setattr(torch.cuda, name, said)

    answer("mem_get_info", (10, 100))
    answer("memory_reserved", 60)
    answer("memory_allocated", 5)
    answer("ipc_collect", None)
    assert CudaProcessor(torch.device("cuda", 1)).free_bytes() == 10 + 60 - 5
    assert happened[0] == "ipc_collect"
