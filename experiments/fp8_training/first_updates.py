"""Trains 110 updates on random windows of the text, without the training loop, in both formats.

Prints the mean loss of five batches, every ten updates.
"""

import statistics
from pathlib import Path

import jax
import numpy as np

from scalejax import build_mesh, build_step, init_state, load_config, resolve
from scalejax.data.readers.python_docs import python_docs

HERE = Path(__file__).parent
ROWS, TOKENS, UPDATES = 64, 64, 110


def main() -> None:
    """Train both, one after the other."""
    text = np.frombuffer(python_docs(), np.uint8)
    for name in ("bfloat16", "float8"):
        run = resolve(load_config(HERE / "run.toml", {"model.compute_dtype": name}), 1)
        mesh = build_mesh(run.layout, jax.devices()[:1])
        step, state = build_step(run, mesh), init_state(run, mesh)
        generator, losses = np.random.default_rng(0), []
        for update in range(1, UPDATES + 1):
            starts = generator.integers(0, len(text) - TOKENS - 1, ROWS)
            rows = np.stack([text[start : start + TOKENS + 1] for start in starts]).astype(np.int32)
            state, metrics = step.function(state, {"inputs": rows[:, :-1], "targets": rows[:, 1:]})
            losses.append(float(metrics["loss"]))
            if update % 10 == 0:
                print(name, update, f"{statistics.mean(losses[-5:]):.4f}")


if __name__ == "__main__":
    main()
