"""Mixed precision: products in bfloat16 or float16, parameters, sums and gradients in float32.

bfloat16 has float32's range and needs nothing more. float16 has not: the loss is multiplied by a
power of two, so that small gradients do not vanish; a step whose gradients overflow is left out and
the factor halved (Micikevicius et al., ICLR 2018). Gradients are checked after they were added over
ranks, so every rank leaves out the same steps.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnplan.runtime.errors import PlanError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000
"""Steps without overflow after which the factor doubles."""


@dataclass(slots=True)
class Precision:
    """How the forward pass computes; state of the loss's factor."""

    name: str = "float32"
    scale: float = field(init=False, default=1.0)
    """What the loss is multiplied by."""
    skipped: int = field(init=False, default=0)
    """Steps left out because a gradient overflowed."""
    _good: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            PlanError: another precision.
        """
        if self.name != "float32" and self.name not in DTYPES:
            raise PlanError(
                f"expected precision float32, {', '.join(DTYPES)}, found {self.name}; plan again"
            )
        if self.name == "float16":
            self.scale = FIRST_SCALE

    def forward(self, device_type: str) -> AbstractContextManager[object]:
        """Around the forward pass; the backward pass computes in the same types by itself."""
        if self.name == "float32":
            return nullcontext()
        return torch.autocast(device_type, dtype=DTYPES[self.name])

    def unscale(self, gradients: Tensor) -> bool:
        """Divide the summed gradients by the factor; False where the step must be left out.

        Args:
            gradients: float32, of all ranks; set to zero where the step is left out.
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
        """The factor as it stands, for a checkpoint."""
        return {"scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, float | int]) -> None:
        """Go on with the factor that `state` gave."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
        self.skipped = int(state["skipped"])


def widened(logits: Tensor) -> Tensor:
    """Logits in float32 where they came in half of it: losses are sums of many."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
