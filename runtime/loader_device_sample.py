"""The sample stage on a GPU: batches drawn one by one, or in stacks that are then handed on."""

from collections.abc import Iterator
from typing import Any

import torch

from runtime.loader_bulk import BulkSampleStage, bulk_request, refuse_lists
from runtime.loader_device_batch import DeviceMiniBatch
from runtime.loader_device_place import launching
from runtime.loader_stages import AbstractStage
from runtime.loader_topology import OFFSET_BYTES
from runtime.meter import StageMeter
from runtime.plan import Plan
from runtime.sampling.minibatch import MiniBatch
from runtime.sampling.seeds import SeedSchedule
from runtime.stages import Stage

SAMPLE_LANE = "sample"


class DeviceSampleStage(AbstractStage):
    """Draws and relabels on the device; ids and blocks stay there."""

    name = Stage.SAMPLE
    lane = SAMPLE_LANE

    def __init__(
        self, sampler: Any, device: torch.device, meter: StageMeter, *, counted: bool
    ) -> None:
        """Draw by a sampler.

        Args:
            sampler: as `open_device_sampler` gives it.
            device: where it draws.
            meter: records the lists that are read.
            counted: whether they are, which is where a plan places lists.
        """
        self.device, self._meter, self._last = device, meter, 0
        self._counted = counted
        self.sampler = sampler

    @property
    def resident_bytes(self) -> int:
        """Bytes of adjacency lists and tables on the device."""
        return self.sampler.topology.device_bytes

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        self.reach(index)
        with launching(self.device):
            drawn = self.sampler.sample(
                batch.seeds,
                epoch=batch.epoch,
                step=batch.step,
                input_id=batch.input_id,
                global_num_seeds=batch.global_num_seeds,
            )
        return DeviceMiniBatch(drawn)

    def reach(self, index: int) -> None:
        """Note the latest step that was asked for: lists are metered with it."""
        self._last = max(self._last, index)

    def finish(self) -> None:
        """Meter the lists read so far, where the plan places them; waits for the device."""
        if not self._counted:
            return
        topology, lists, sizes = self.sampler.topology, dict[str, int](), dict[str, int]()
        for place, reads in topology.reads().items():
            kind = "own" if place == "device" else "host"
            if reads.rows:
                lists[kind] = reads.rows
                sizes[kind] = reads.entries * topology.indices.element_size()
        # The offsets of every list lie on the device.
        sizes["own"] = sizes.get("own", 0) + OFFSET_BYTES * sum(lists.values())
        self._meter.count_lists(self._last, lists, sizes)


class DeviceBulkStage(BulkSampleStage):
    """Draws k steps at once on the device, and hands on one after the other.

    Args:
        drawing: the sampler, its topology and what is metered of it.
        plan: k, and the most bytes that a stack may take.
        schedule: seeds of every step.
        in_flight: as in `BulkSampleStage`.

    Raises:
        PlanError: the topology is neither on the host nor replicated.
        SamplerError: the sampler has no stacks.
    """

    lane = SAMPLE_LANE

    def __init__(
        self, drawing: DeviceSampleStage, plan: Plan, schedule: SeedSchedule, in_flight: int
    ) -> None:
        from runtime.sampling.device_stack import StackedBatches, stack_of, with_own_tensors

        refuse_lists(plan)
        self._drawing, self._own_tensors = drawing, with_own_tensors
        budget = plan.strategy.bulk_bytes or None
        stacked = StackedBatches(stack_of(drawing.sampler), budget, 2 * in_flight)

        def draw(epoch: int, steps: range) -> Iterator[list[MiniBatch]]:
            requests = [bulk_request(schedule, epoch, step, schedule.rank) for step in steps]
            for stack in stacked.stacks(requests):
                yield [DeviceMiniBatch(batch) for batch in stack]

        super().__init__(draw, schedule.num_steps, plan.strategy.bulk_batches, in_flight)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """The sampled batch of the batch's epoch and step."""
        self._drawing.reach(index)
        with launching(self._drawing.device):
            return super().submit(batch, index)

    def own(self, batch: MiniBatch) -> MiniBatch:
        """See `BulkSampleStage.own`."""
        assert isinstance(batch, DeviceMiniBatch)
        return DeviceMiniBatch(self._own_tensors(batch.drawn))

    def finish(self) -> None:
        """Meter the lists read so far."""
        self._drawing.finish()
