"""What a data set holds, as far as it shapes a step: counts and shapes, no arrays."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What a data set holds: everything about it that shapes a step."""

    train_examples: int
    """Examples to train on."""
    test_examples: int
    """Examples to evaluate on."""
    input_shape: tuple[int, ...]
    """Of one example: (height, width, channels) of an image, (tokens,) of a text, (features,) of
    a row of numbers."""
    target_shape: tuple[int, ...]
    """Of one example's targets: () for a class, (tokens,) for the next token at each place,
    (masked places,) for the words that are hidden there."""
    classes: int
    """Values that a target can take: classes, or the size of the vocabulary."""
    is_masked: bool = False
    """Whether targets are hidden words; a batch then holds "places" besides, the place of each."""
    is_table: bool = False
    """Whether examples are rows of numbers (float32, of mean 0 and deviation 1), not images."""
    pixel_mean: float = 0.5
    """Taken from inputs scaled to 0..1; images only. Their mean where a data set states it,
    else about that of photographs; or what pretrained weights expect."""
    pixel_std: float = 0.25
    """Divides what is left; their standard deviation, likewise."""

    @property
    def is_text(self) -> bool:
        """Whether examples are sequences of tokens (int32), not images (uint8) or numbers."""
        return bool(self.target_shape)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in an example; None for images and numbers."""
        return self.input_shape[0] if self.is_text else None
