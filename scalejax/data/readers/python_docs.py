"""Python's help topics as a byte-level text data set, which every installation includes."""

import numpy as np

from scalejax.config.data import PythonDocsConfig, facts, python_docs
from scalejax.data.source import Split


class PythonDocs:
    """Consecutive pieces of the text as int32 tokens; the target is the byte that follows."""

    def __init__(self, config: PythonDocsConfig, split: Split) -> None:
        counts = facts(config)
        text = np.frombuffer(python_docs(), np.uint8)
        if split == "train":
            self._length = counts.train_examples
        else:
            self._length = counts.test_examples
            text = text[-(self._length * config.tokens + 1) :]
        self._windows = np.lib.stride_tricks.sliding_window_view(text, config.tokens + 1)
        self._tokens = config.tokens

    def __len__(self) -> int:
        """Number of pieces."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The pieces at `indices`, and their targets: the pieces shifted by one byte."""
        windows = self._windows[indices * self._tokens].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
