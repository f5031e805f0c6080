"""Python's help topics as a byte-level text data set, which every installation includes."""

from functools import cache

import numpy as np

from scalejax.config.data import PythonDocsConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.readers.documents import token_rows
from scalejax.data.source import Reader, Split
from scalejax.data.transforms.augmentation import Augmentation

BYTE_VALUES = 256
"""Vocabulary of a byte-level text."""
TEST_FRACTION = 0.05
"""Share of the text, at its end, that is held out for evaluation."""


@cache
def python_docs() -> bytes:
    """The help topics of this Python, in the order of their names, UTF-8."""
    return b"".join(_topics())


def _topics() -> list[bytes]:
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def python_docs_facts(config: PythonDocsConfig) -> DatasetFacts:
    """Counts of examples.

    Raises:
        ConfigError: if the text is too short for one example of the requested length.
    """
    text = python_docs()
    test_bytes = int(len(text) * TEST_FRACTION)
    # An example needs one byte more than its tokens: the target of its last position.
    train_examples = (len(text) - test_bytes - 1) // config.tokens
    test_examples = (test_bytes - 1) // config.tokens
    if test_examples < 1:
        accepted = f"it must be at most {test_bytes - 1}, the bytes kept for evaluation less one"
        raise ConfigError(refusal("data.tokens", config.tokens, accepted))
    return DatasetFacts(
        train_examples=train_examples,
        test_examples=test_examples,
        input_shape=(config.tokens,),
        target_shape=(config.tokens,),
        classes=BYTE_VALUES,
        is_packed=config.document_mask,
    )


class PythonDocs(Reader, names=("python_docs",)):
    """Consecutive pieces of the text as int32 tokens; the target is the byte that follows."""

    facts = staticmethod(python_docs_facts)

    def __init__(self, config: PythonDocsConfig, split: Split, augmentation: Augmentation) -> None:
        counts = python_docs_facts(config)
        text = np.frombuffer(python_docs(), np.uint8)
        first = 0
        if split == "train":
            self._length = counts.train_examples
        else:
            self._length = counts.test_examples
            first = len(text) - (self._length * config.tokens + 1)
            text = text[first:]
        self._topic_ends = None
        if config.document_mask:
            self._topic_ends = np.cumsum([len(topic) for topic in _topics()]) - first
        self._windows = np.lib.stride_tricks.sliding_window_view(text, config.tokens + 1)
        self._tokens = config.tokens

    def __len__(self) -> int:
        """Number of pieces."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The pieces at `indices`, and their targets: the pieces shifted by one byte."""
        begins = indices * self._tokens
        return token_rows(self._windows[begins].astype(np.int32), begins, self._topic_ends)
