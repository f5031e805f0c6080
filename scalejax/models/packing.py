"""Documents that share the sequence of an example: the document of each token and its place there.

A token attends only to its own document, and positions restart in each (the document mask of
Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.2; packing in
MaxText). Networks are traced in the context of their documents; without any, an example is one
document. Shapes: B batch, S tokens of queries, T tokens of keys.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from scalejax.config.dataset_facts import POSITIONS, SEGMENT_IDS
from scalejax.models.sharding import in_token_order


class Documents(NamedTuple):
    """Documents of the tokens of some examples, in the order of the tokens of a step."""

    segment_ids_BS: jax.Array
    """Number of the document of each token, int32."""
    positions_BS: jax.Array
    """Tokens of its document before each token, int32."""


_DOCUMENTS: ContextVar[Documents | None] = ContextVar("documents", default=None)


@contextmanager
def packed(given: Documents | None) -> Iterator[None]:
    """Context in which networks are traced for examples of these documents."""
    token = _DOCUMENTS.set(given)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def documents() -> Documents | None:
    """The documents of the context; None where an example is one document."""
    return _DOCUMENTS.get()


def documents_of(batch: Mapping[str, Any]) -> Documents | None:
    """The documents of a batch, in the order in which context shards hold its tokens; None if it
    holds none."""
    if SEGMENT_IDS not in batch:
        return None
    return Documents(in_token_order(batch[SEGMENT_IDS]), in_token_order(batch[POSITIONS]))


def same_document(of_queries_BS: jax.Array, of_keys_BT: jax.Array) -> jax.Array:
    """Whether a query and a key are of the same document, bool [B, S, T]."""
    return of_queries_BS[:, :, None] == of_keys_BT[:, None, :]
