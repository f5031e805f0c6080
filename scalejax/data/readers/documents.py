"""Examples cut from a stream of tokens, with the documents that they hold.

Knows where documents end; nothing of files, orders and vocabularies.
"""

import numpy as np

from scalejax.config.dataset_facts import IGNORED_TARGET, POSITIONS, SEGMENT_IDS


def token_rows(
    tokens: np.ndarray, begins: np.ndarray, document_ends: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Inputs, and targets one place on; with documents, also the document of each token, counted
    from 1 within its example, and the token's place in what the example holds of that document.

    The last token of a document has no target. An example may begin or end within a document, whose
    parts are then separate documents, as in Grain's ConcatThenSplit.

    Args:
        tokens: tokens of each row and the one after them, int32 [rows, S + 1].
        begins: place in the stream of the first token of each row, int64 [rows].
        document_ends: places in the stream where documents end, ascending, the last at its end; if
            None, documents do not matter.

    Example:
        >>> import numpy as np
        >>> from scalejax.data.readers.documents import token_rows
        >>> row = token_rows(np.arange(7)[None], np.array([10]), np.array([4, 12, 20]))
        >>> row["segment_ids"].tolist(), row["positions"].tolist(), row["targets"].tolist()
        ([[1, 1, 2, 2, 2, 2]], [[0, 1, 0, 1, 2, 3]], [[1, -100, 3, 4, 5, 6]])
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if document_ends is None:
        return {"inputs": inputs, "targets": targets}
    places = begins[:, None] + np.arange(tokens.shape[1])
    documents = np.searchsorted(document_ends, places, side="right")
    firsts = np.concatenate([[0], document_ends])[documents]
    of_example = np.maximum(firsts, begins[:, None])
    is_own = documents[:, 1:] == documents[:, :-1]
    return {
        "inputs": inputs,
        "targets": np.where(is_own, targets, IGNORED_TARGET).astype(np.int32),
        SEGMENT_IDS: (documents - documents[:, :1] + 1)[:, :-1].astype(np.int32),
        POSITIONS: (places - of_example)[:, :-1].astype(np.int32),
    }
