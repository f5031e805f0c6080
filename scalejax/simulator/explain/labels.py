"""Descriptions of operations for tables and notes."""

import math

from scalejax.simulator.program import Operation


def in_words(operation: Operation) -> str:
    """Description of an operation: its kind, type, and size or mesh axes."""
    collective = operation.collective
    if collective is not None:
        over = " x ".join(collective.group.axes) or f"{collective.group.size} devices"
        name = collective.name.replace("_", "-")
        return f"{name} {collective.payload_bytes / 1e6:.3g} MB {over}"
    if operation.grouped_pass is not None and operation.shape:
        groups, rows, outer, inner = operation.shape
        size = f"{groups} groups of {rows} x {outer} x {inner}"
        return f"matmul {operation.dtype} {size} {operation.grouped_pass.replace('_', ' ')}"
    if operation.kind == "matmul" and operation.shape:
        sizes = operation.shape if operation.shape[0] > 1 else operation.shape[1:]
        return f"matmul {operation.dtype} {' x '.join(map(str, sizes))}"
    if operation.kind == "convolution" and operation.shape:
        _, _, inputs, outputs, windows = operation.shape
        side = math.isqrt(windows)
        window = f"{side}x{side}" if side * side == windows else f"{windows}"
        kind = (operation.convolution_pass or "forward").replace("_", " ")
        return f"convolution {operation.dtype} {window} {inputs}>{outputs} {kind}"
    moved = (operation.read_bytes + operation.write_bytes) / 1e6
    return f"{operation.kind} {operation.dtype} {moved:.3g} MB"
