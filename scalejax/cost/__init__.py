"""What a program costs on a cluster: compute, communication, their overlap, memory."""

from scalejax.cost.charges import Charge, charges, device_terms
from scalejax.cost.communication import collective_seconds, wires
from scalejax.cost.compute import OperationTime, operation_time
from scalejax.cost.float8 import in_float8, with_float8_products
from scalejax.cost.input import InputPace, input_pace, with_workers
from scalejax.cost.input_words import input_notes
from scalejax.cost.memory import MemoryVerdict, memory_verdict
from scalejax.cost.occupancy import as_used, in_graph
from scalejax.cost.pipeline import PIPELINE, Pipeline, pipelined, sent_between_stages
from scalejax.cost.run_terms import RunTerms, StepTerms, run_terms, step_terms
from scalejax.cost.timeline import NOMINAL, Scales, Timeline, WhatIf, timeline, what_if
from scalejax.cost.uncertainty import Band, band, residuals

__all__ = [
    "NOMINAL",
    "PIPELINE",
    "Band",
    "Charge",
    "InputPace",
    "MemoryVerdict",
    "OperationTime",
    "Pipeline",
    "RunTerms",
    "Scales",
    "StepTerms",
    "Timeline",
    "WhatIf",
    "as_used",
    "band",
    "charges",
    "collective_seconds",
    "device_terms",
    "in_float8",
    "in_graph",
    "input_notes",
    "input_pace",
    "memory_verdict",
    "operation_time",
    "pipelined",
    "residuals",
    "run_terms",
    "sent_between_stages",
    "step_terms",
    "timeline",
    "what_if",
    "wires",
    "with_float8_products",
    "with_workers",
]
