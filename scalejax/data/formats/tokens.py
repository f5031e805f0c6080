"""Flat files of tokens: their number, type and offset."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from scalejax.config.data import Split, TokensConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.formats.npy_headers import header_of_file

if TYPE_CHECKING:  # other data sets need no Arrow, and commands start sooner without it
    from scalejax.core.filesystem import DataFile

SUFFIXES = (".bin", ".npy", ".txt")
"""Suffixes of token files."""
LLM_C_TYPES = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""First number of a file of llm.c, and the type of the tokens after its header of 256 int32: this
number, version, count of tokens, the others unused (its dev/data/data_common.py)."""
LLM_C_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of tokens."""

    file: "DataFile"
    """The file."""
    dtype: np.dtype
    """Type of a token."""
    offset: int
    """Bytes before the first token."""
    count: int
    """Tokens in it."""


def tokens_facts(config: TokensConfig) -> DatasetFacts:
    """Counts of examples.

    Raises:
        ConfigError: as for `token_files`; if a part has too few tokens for an example.
    """
    examples = {}
    for part in config.parts:
        begin, end = token_span(config, part)
        # An example needs one token beyond its own: the target of its last place.
        examples[part] = (end - begin - 1) // config.tokens
        if examples[part] < 1:
            of = getattr(config, own_part(config, part))
            accepted = f"the {part} part of {of} has {end - begin}; an example needs one more"
            raise ConfigError(refusal("data.tokens", config.tokens, accepted))
    return DatasetFacts(
        train_examples=examples["train"],
        test_examples=examples["test"],
        validation_examples=examples.get("validation", 0),
        input_shape=(config.tokens,),
        target_shape=(config.tokens,),
        classes=config.vocabulary,
        is_packed=config.document_mask,
    )


def own_part(config: TokensConfig, part: Split) -> Split:
    """The part whose files hold the tokens of `part`: test tokens may be the end of `train`."""
    return "train" if part == "test" and config.test is None else part


def token_span(config: TokensConfig, part: Split) -> tuple[int, int]:
    """First token and end of a part in the stream of its files."""
    total = sum(file.count for file in token_files(config, part))
    if config.test is not None or part == "validation":
        return 0, total
    of_test = int(total * config.test_fraction)
    return (0, total - of_test) if part == "train" else (total - of_test, total)


def token_files(config: TokensConfig, part: Split) -> tuple[TokenFile, ...]:
    """The files of one part, in order; of both parts if `config.test` is absent.

    Raises:
        ConfigError: if there are no files, one is incomplete, or its type is not the declared one.
    """
    from scalejax.core.filesystem import listed

    named = own_part(config, part)
    field, location = f"data.{named}", getattr(config, named)
    files = listed(field, location, lambda name: name.endswith(SUFFIXES), f"file of {SUFFIXES}")
    found = tuple(_token_file(field, file, config.dtype) for file in files)
    for each in found:
        is_said = config.dtype is not None or each.offset or each.file.path.endswith(".npy")
        if not is_said and each.dtype.itemsize > 1 and config.vocabulary > 2**16:
            accepted = f"{each.file.path} does not say its type; name uint16 or uint32"
            raise ConfigError(refusal("data.dtype", config.dtype, accepted))
    return found


@lru_cache(maxsize=65536)
def _token_file(field: str, file: "DataFile", given: str | None) -> TokenFile:
    if file.path.endswith(".npy"):
        header = header_of_file(field, file)
        if len(header.shape) != 1 or header.dtype.kind not in "iu":
            raise ConfigError(
                f"{field}: {file.path} holds {header.dtype} {list(header.shape)}: tokens are "
                "integers in one dimension."
            )
        found = TokenFile(
            file=file, dtype=header.dtype, offset=header.offset, count=header.shape[0]
        )
    elif file.path.endswith(".txt"):
        found = TokenFile(file=file, dtype=np.dtype("u1"), offset=0, count=file.size_bytes)
    else:
        found = _binary_file(field, file, np.dtype(given or "uint16").newbyteorder("<"))
    if given is not None and found.dtype != np.dtype(given):
        accepted = f"{file.path} holds {found.dtype}; leave it out"
        raise ConfigError(refusal("data.dtype", given, accepted))
    return found


def _binary_file(field: str, file: "DataFile", dtype: np.dtype) -> TokenFile:
    from scalejax.core.filesystem import opened

    with opened(field, file) as stream:
        first = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    if (said := LLM_C_TYPES.get(int(first[0]))) is not None:
        count, needed = int(first[2]), LLM_C_HEADER_BYTES + int(first[2]) * said.itemsize
        if count < 0 or file.size_bytes != needed:
            raise ConfigError(
                f"{field}: {file.path} is incomplete: its header says {count} tokens, {needed} "
                f"bytes in all, but it has {file.size_bytes}; write or copy it again."
            )
        return TokenFile(file=file, dtype=said, offset=LLM_C_HEADER_BYTES, count=count)
    if file.size_bytes % dtype.itemsize:
        raise ConfigError(
            f"{field}: {file.path} has {file.size_bytes} bytes, and tokens of {dtype} take "
            f"{dtype.itemsize} each: it is incomplete, or data.dtype is wrong."
        )
    return TokenFile(file=file, dtype=dtype, offset=0, count=file.size_bytes // dtype.itemsize)
