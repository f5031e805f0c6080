"""Counts and shapes of a data set, from which a training step is built; no arrays."""

from dataclasses import dataclass
from typing import Literal

from scalejax.core.serialization import document

ExampleKind = Literal["images", "text", "text with hidden words", "rows of numbers"]
"""Kind of the examples of a data set."""

SEGMENT_IDS, POSITIONS = "segment_ids", "positions"
"""Arrays of a batch of packed documents: the document in its example that a token belongs to, and
the token's position in it; int32 with the shape of the tokens (named as in MaxText and Grain)."""
IGNORED_TARGET = -100
"""Target without a loss, that of the last token of a document (`ignore_index` of PyTorch)."""


@document("facts")
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """Counts and shapes of a data set."""

    train_examples: int
    """Examples to train on."""
    test_examples: int
    """Examples to evaluate on."""
    validation_examples: int = 0
    """Validation examples, which are neither trained nor tested on; 0 if there are none."""
    input_shape: tuple[int, ...]
    """Shape of one example: (height, width, channels) of an image, (tokens,) of a text, (features,)
    of a row of numbers."""
    target_shape: tuple[int, ...]
    """Shape of one example's targets: () for a class, (tokens,) for the next token at each
    position, (masked positions,) for masked tokens."""
    classes: int
    """Number of classes, or size of the vocabulary."""
    is_masked: bool = False
    """Whether targets are masked tokens; a batch then also holds their positions, "places"."""
    is_table: bool = False
    """Whether examples are rows of numbers (float32, of mean 0 and deviation 1), not images."""
    is_packed: bool = False
    """Whether an example holds several documents, which do not see each other; a batch then also
    holds "segment_ids" and "positions" of the tokens."""
    pixel_mean: float = 0.5
    """Mean subtracted from pixels scaled to 0..1; images only. It is that of the data set if
    stated, else about that of photographs; or the mean that pretrained weights expect."""
    pixel_std: float = 0.25
    """Standard deviation by which pixels are divided after that; chosen as `pixel_mean` is."""

    @property
    def examples(self) -> int:
        """Examples of all parts."""
        return self.train_examples + self.validation_examples + self.test_examples

    @property
    def kind(self) -> ExampleKind:
        """What the examples are."""
        if self.is_table:
            return "rows of numbers"
        if self.is_masked:
            return "text with hidden words"
        return "text" if self.is_text else "images"

    @property
    def element_bytes(self) -> int:
        """Bytes of one input element in a batch: pixels are uint8, tokens int32, and columns of
        tables float32."""
        return 4 if self.is_text or self.is_table else 1

    @property
    def is_text(self) -> bool:
        """Whether examples are sequences of tokens (int32), not images (uint8) or numbers."""
        return bool(self.target_shape)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in an example; None for images and numbers."""
        return self.input_shape[0] if self.is_text else None
