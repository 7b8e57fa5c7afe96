"""Mixed precision: products in bfloat16 or float16; parameters, sums and gradients in float32.

tf32 is float32 everywhere but in a GPU's matrix products, whose factors are rounded to 10 bits.

bfloat16 has float32's range. float16 has not: the loss is multiplied by a power of two, so that
small gradients do not vanish. A step whose gradients overflow is left out and the factor halved
(Micikevicius et al., ICLR 2018), by the sums over ranks, so the same on every rank.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.processor import processor_of

UNCHANGED = ("float32", "tf32")
"""Precisions whose tensors are all float32."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000
"""Number of steps without overflow after which the factor doubles."""


@dataclass(slots=True)
class Precision:
    """Number format of the forward pass, and the state of the loss's factor."""

    name: str = "float32"
    scale: float = field(init=False, default=1.0)
    """Factor of the loss."""
    skipped: int = field(init=False, default=0)
    """Number of steps left out because a gradient overflowed."""
    _good: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Refuse another precision with PlanError."""
        if self.name not in (*UNCHANGED, *DTYPES):
            known = ", ".join((*UNCHANGED, *DTYPES))
            raise PlanError(f"expected precision {known}, found {self.name}; plan again")
        if self.name == "float16":
            self.scale = FIRST_SCALE

    def set_up(self, device: torch.device) -> None:
        """Set how a device multiplies, for this process, backward passes included."""
        processor_of(device).round_products(yes=self.name == "tf32")

    def forward(self, device_type: str) -> AbstractContextManager[object]:
        """Return the context of the forward pass; the backward pass computes in the same types."""
        if self.name in UNCHANGED:
            return nullcontext()
        return torch.autocast(device_type, dtype=DTYPES[self.name])

    def unscale(self, gradients: Tensor) -> bool:
        """Divide the summed gradients (float32) by the factor; return whether to take the step.

        Gradients of a step that is left out become zero.
        """
        if self.name != "float16":
            return True
        if bool(torch.isfinite(gradients).all()):
            gradients /= self.scale
            self._good += 1
            if self._good == GROW_AFTER:
                self.scale, self._good = min(2 * self.scale, LARGEST_SCALE), 0
            return True
        gradients.zero_()
        self.scale, self._good = max(self.scale / 2, 1.0), 0
        self.skipped += 1
        return False

    def state(self) -> dict[str, float | int]:
        """Return the factor's state for a checkpoint."""
        return {"scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, float | int]) -> None:
        """Go on with the factor that `state` gave."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
        self.skipped = int(state["skipped"])


def widen(logits: Tensor) -> Tensor:
    """Return logits in float32, because losses are sums of many."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
