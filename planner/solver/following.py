"""Choices that follow from a candidate's own price, and are not enumerated.

threads.capture   a GPU samples by one CUDA graph, where launches cost more than its buffers
threads.comm      the gradient is sent while the backward pass runs, where that saves more
                  than the noise; why, or why not, stands in the stage's provenance
"""

from dataclasses import replace

from planner.candidate import Candidate, PlacedRows
from planner.cost.all_reduce import gradient_bytes
from planner.cost.gpu_capture import MOST_OF_MEMORY, buffer_bytes, capture_gain, timed_gain
from planner.cost.gpu_memory import gpu_capacity
from planner.cost.memory import size_text
from planner.cost.model import Request, predict
from planner.cost.on_cores import batch_and_timing
from planner.cost.overlap import UNMEASURED, hidden_share, measured_eta
from planner.settings import PlanSettings
from runtime.plan import Prediction
from runtime.train.parts import most_parts

ALL_REDUCE = "all_reduce"


def with_capture(settings: PlanSettings, request: Request, candidate: Candidate) -> Candidate:
    """The candidate, sampling by a graph where its GPUs gain from that."""
    threads = replace(candidate.threads, capture=0, comm=0)
    plain = settings.sampler == "neighbor" and not settings.sampler_parameters
    node = request.graph.task != "link" and candidate.las is None and candidate.bulk == 1
    if candidate.kind == "cuda" and plain and node:
        size = buffer_bytes(request, candidate)
        room = min(
            gpu_capacity(request.machine, candidate, rank, request.budgets)
            for rank in range(candidate.num_ranks)
        )
        if 0 < size <= MOST_OF_MEMORY * room:
            timed = batch_and_timing(request, candidate)[1].gpu
            gain = timed_gain(timed, candidate) if timed else capture_gain(request, candidate, size)
            threads = replace(threads, capture=int(gain > 0))
    return replace(candidate, threads=threads)


def with_parts(
    request: Request, candidate: Candidate, placed: PlacedRows, prediction: Prediction
) -> tuple[Candidate, Prediction]:
    """The candidate and its price, the gradient sent beside the backward pass if that pays.

    Args:
        request: on the hosts that the candidate uses.
        candidate: whose gradient is sent afterwards.
        placed: its rows.
        prediction: its price.
    """
    if candidate.num_ranks == 1 or candidate.batching == "cooperative":
        return candidate, prediction
    size = gradient_bytes(batch_and_timing(request, candidate)[1].num_parameters)
    why = _refusal(request, candidate, size)
    if why:
        return candidate, _told(prediction, f"sent after the backward pass: {why}")
    beside = replace(candidate, threads=replace(candidate.threads, comm=1))
    found = predict(request, beside, placed)
    gain = 1 - found.step_seconds.value / prediction.step_seconds.value
    if gain <= request.machine.noise:
        words = f"in parts it would save {gain:.1%} of the step, which is within the noise"
        if gain <= 0:
            words = "in parts it would take longer, for their latencies"
        return candidate, _told(prediction, f"sent after the backward pass: {words}")
    parts = most_parts(size)
    eta = hidden_share(request.machine, candidate)
    words = f"sent in {parts} parts beside the backward pass, overlap measured: {eta:.0%}"
    return beside, _told(found, f"{words}; {gain:.1%} less")


def _refusal(request: Request, candidate: Candidate, size: int) -> str:
    """Why nothing can be hidden; empty where something can."""
    machine = request.machine
    if most_parts(size) == 1:
        return f"{size_text(size)} are a single part"
    if measured_eta(machine, candidate) is None:
        return UNMEASURED
    if candidate.kind == "cuda":
        return ""
    if candidate.busy_threads + candidate.num_ranks > machine.num_cores:
        return "no core is free for it"
    return ""


def _told(prediction: Prediction, words: str) -> Prediction:
    known = prediction.provenance.get(ALL_REDUCE, "derived")
    return replace(
        prediction, provenance={**prediction.provenance, ALL_REDUCE: f"{known}; {words}"}
    )
