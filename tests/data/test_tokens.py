"""Tokens in files: which example holds what, that none is lost, and what is refused."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.config.data import TokensConfig
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.readers.tokens import cut
from scalejax.data.source import UnreadableExample
from scalejax.training.train import train

STREAM = np.random.default_rng(0).integers(1, 998, 500)
"""Tokens but 0, which ends documents where it is put, and two that end files."""


def write_raw(path, tokens, dtype="<u2"):
    """As nanoGPT does."""
    np.asarray(tokens).astype(dtype).tofile(path)


def write_llm_c(path, tokens, *, magic=20240520, version=1, dtype="<u2"):
    """As llm.c does: 256 int32 before the tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())


def write_llama(path, tokens):
    """As llm.c does for Llama 3."""
    write_llm_c(path, tokens, magic=20240801, version=7, dtype="<u4")


def write_npy(path, tokens):
    """An array of NumPy's."""
    np.save(path, np.asarray(tokens, np.int64))


KINDS = {"a.bin": write_raw, "b.bin": write_llm_c, "c.bin": write_llama, "d.npy": write_npy}


def config_of(train, **changed):
    """Examples of 8 tokens of a vocabulary of 1000."""
    return TokensConfig(**{"train": str(train), "tokens": 8, "vocabulary": 1000, **changed})


def as_url(folder):
    """The files of a folder in a store in memory."""
    fsspec = pytest.importorskip("fsspec")
    for path in folder.iterdir():
        fsspec.filesystem("memory").pipe(f"/{folder.name}/{path.name}", path.read_bytes())
    return f"memory://{folder.name}"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_its_tokens(tmp_path, name):
    """Of 500, a twentieth at the end is kept: 475 hold 59 examples of 8, and 25 hold 3."""
    KINDS[name](tmp_path / name, STREAM)
    config = config_of(tmp_path / name)

    rows = open_source(config, "train", seed=0).take(np.arange(59), 0)
    of_test = open_source(config, "test", seed=0).take(np.arange(3))

    assert (read_facts(config).train_examples, read_facts(config).test_examples) == (59, 3)
    np.testing.assert_array_equal(rows["inputs"].reshape(-1), STREAM[: 59 * 8])
    np.testing.assert_array_equal(rows["targets"].reshape(-1), STREAM[1 : 59 * 8 + 1])
    np.testing.assert_array_equal(of_test["targets"].reshape(-1), STREAM[476 : 476 + 24])
    assert (rows["inputs"].dtype, rows["targets"].dtype) == (np.int32, np.int32)


def test_a_text_is_read_by_bytes(tmp_path):
    """UTF-8, a letter may be two of them."""
    (tmp_path / "a.txt").write_text("Übergänge " * 20, encoding="utf-8")

    rows = open_source(config_of(tmp_path), "train", seed=0).take(np.array([1]))

    assert bytes(rows["inputs"][0].astype(np.uint8)) == ("Übergänge " * 20).encode()[8:16]


@pytest.mark.parametrize("is_url", [False, True])
def test_files_are_one_stream(tmp_path, is_url):
    """Of all kinds and lengths, in the order of their names, an example crossing several."""
    bounds = [0, 3, 4, 200, 500]
    for (name, write), begin, end in zip(KINDS.items(), bounds[:-1], bounds[1:], strict=True):
        write(tmp_path / name, STREAM[begin:end])
    np.save(tmp_path / "e.npy", np.array([7, 8, 9], np.int32))
    (tmp_path / "notes.md").write_text("no tokens")
    where = as_url(tmp_path) if is_url else tmp_path
    indices = np.array([58, 0, 24, 25, 0])

    config = config_of(where, test=f"{where}/d.npy")
    source = open_source(config, "train", seed=0)
    rows = source.take(indices, 0)

    assert len(source) == 502 // 8
    assert read_facts(config).test_examples == 299 // 8
    np.testing.assert_array_equal(
        rows["targets"], [STREAM[8 * index + 1 : 8 * index + 9] for index in indices]
    )


def packed(folder, ends, **changed):
    """Documents that end at `ends` of the stream, in two files, packed anew each epoch."""
    tokens = STREAM.copy()
    tokens[np.array(ends) - 1] = 0
    tokens[[299, 499]] = 998, 999
    write_raw(folder / "a.bin", tokens[:300])
    write_npy(folder / "b.npy", tokens[300:])
    write_raw(folder / "test.raw", tokens[:20])
    config = config_of(
        f"{folder}/[ab].*",
        test=f"{folder}/test.raw",
        packing="documents",
        end_of_document=0,
        **changed,
    )
    return config, tokens


ENDS = [5, 6, 30, 100, 170, 173, 290, 305, 420]


def test_documents_are_put_in_another_order_each_epoch(tmp_path):
    """One after the other and whole, cut into examples: every token is a target once, but for
    the first and for those at the end that fill no example."""
    config, tokens = packed(tmp_path, ENDS)
    bounds = sorted({0, *ENDS, 300, 500})
    documents = {tuple(tokens[a:b]) for a, b in pairwise(bounds)}
    source = open_source(config, "train", seed=3)
    orders = set()

    for epoch in range(4):
        rows = source.take(np.arange(len(source)), epoch)
        stream = np.append(rows["inputs"].reshape(-1), rows["targets"][-1, -1])

        assert len(source) == 499 // 8
        np.testing.assert_array_equal(rows["targets"].reshape(-1), stream[1:])
        lost = Counter(tokens.tolist()) - Counter(stream[1:].tolist())
        assert sum(lost.values()) == 500 - 8 * (499 // 8)
        # the file's end ends a document without a 0: taken off where it is one of them
        whole, place = [], 0
        while match := next(
            (d for d in documents if tuple(stream[place : place + len(d)]) == d), None
        ):
            whole.append(match)
            place += len(match)
        assert len(set(whole)) == len(whole) >= len(documents) - 1
        assert 501 - place <= 8 + max(map(len, documents))
        orders.add(tuple(whole))
    assert len(orders) == 4


def test_an_example_is_the_same_whenever_it_is_taken(tmp_path):
    """Seed, epoch and index decide it; to evaluate, documents lie as in the files."""
    config, tokens = packed(tmp_path, ENDS)
    whole = open_source(config, "train", seed=1).take(np.arange(62), 5)["inputs"]

    source = open_source(config, "train", seed=1)
    for epoch in (0, 5, 2, 7, 5):
        rows = source.take(np.array([40, 3]), epoch)["inputs"]
        assert (rows == whole[[40, 3]]).all() == (epoch == 5)
    np.testing.assert_array_equal(source.take(np.array([0]))["inputs"][0], tokens[:8])
    other = open_source(config, "train", seed=2).take(np.arange(62), 5)["inputs"]
    assert (other != whole).any()


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
@pytest.mark.parametrize("epoch", [None, 3])
def test_documents_are_told_apart(tmp_path, epoch, packing):
    """In the order of the files and of an epoch: a token that ends a document, or a file, has no
    target, and what follows is the first of another."""
    config, tokens = packed(tmp_path, ENDS, document_mask=True)
    config = replace(config, packing=packing)
    end = 0 if packing == "documents" else None
    plain = replace(config, document_mask=False, end_of_document=end)
    whole = open_source(plain, "train", seed=3).take(np.arange(62), epoch)

    rows = open_source(config, "train", seed=3).take(np.arange(62), epoch)

    assert read_facts(config).is_packed
    np.testing.assert_array_equal(rows["inputs"], whole["inputs"])
    is_last = np.isin(whole["inputs"], [0, *tokens[[299, 499]]])
    np.testing.assert_array_equal(rows["targets"], np.where(is_last, -100, whole["targets"]))
    np.testing.assert_array_equal(rows["positions"][:, 1:] == 0, is_last[:, :-1])
    np.testing.assert_array_equal(np.diff(rows["segment_ids"]), is_last[:, :-1])
    assert (rows["positions"][:, 0] == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda each: sum(each)),
    data=st.data(),
)
def test_ranges_are_cut_where_pieces_end(lengths, data):
    """Put together again they are what they were, and each lies within its piece."""
    total = sum(lengths)
    begins = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5)))
    ends = np.array([data.draw(st.integers(begin + 1, total)) for begin in begins.tolist()])
    owner = np.repeat(np.arange(len(lengths)), lengths)

    pieces, cut_begins, cut_ends = cut(begins, ends, np.cumsum(lengths))

    places = [np.arange(a, b) for a, b in zip(cut_begins, cut_ends, strict=True)]
    for piece, range_ in zip(pieces, places, strict=True):
        assert (owner[range_] == piece).all()
        assert range_.size
    expected = [np.arange(a, b) for a, b in zip(begins, ends, strict=True)]
    np.testing.assert_array_equal(np.concatenate(places), np.concatenate(expected))


def test_a_token_beyond_the_vocabulary_is_named_by_file_and_place(tmp_path):
    """In the second file, in both orders."""
    write_raw(tmp_path / "a.bin", STREAM[:100])
    spoilt = STREAM[100:].copy()
    spoilt[117] = 1000
    write_raw(tmp_path / "b.bin", spoilt)

    for changed in ({}, {"packing": "documents", "end_of_document": 5}):
        source = open_source(config_of(tmp_path, **changed), "train", seed=0)
        with pytest.raises(UnreadableExample, match=r"b\.bin, token 117: 1000 is beyond data\.voc"):
            source.take(np.arange(len(source)), 0)


def _half(path):
    path.write_bytes(path.read_bytes()[:-501])


@pytest.mark.parametrize(
    ("name", "damage", "changed", "message"),
    [
        ("a.bin", _half, {}, r"a\.bin has 499 bytes, and tokens of uint16 take 2 each: it is inc"),
        ("b.bin", _half, {}, r"b\.bin is incomplete: its header says 500 tokens, 2024"),
        ("d.npy", _half, {}, r"d\.npy is incomplete"),
        ("b.bin", None, {"dtype": "uint32"}, r"data\.dtype='uint32' .*b\.bin holds uint16"),
        ("d.npy", None, {"dtype": "uint16"}, r"data\.dtype='uint16' .*d\.npy holds int64"),
        ("a.bin", None, {"vocabulary": 128_256}, r"data\.dtype=None .*a\.bin does not say its"),
        ("a.bin", None, {"tokens": 25}, r"data\.tokens=25 .*the test part of .* has 25; an ex"),
        ("a.bin", None, {"test_fraction": 1.0}, r"data\.test_fraction=1\.0 is refused"),
        ("a.bin", None, {"end_of_document": 0}, r"data\.end_of_document=0 is refused: it is for"),
        ("a.bin", None, {"train": "none.bin"}, r"data\.train='none\.bin' is refused: there is no"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, name, damage, changed, message):
    """Half files, types that are others, parts that are too short."""
    KINDS[name](tmp_path / name, STREAM)
    if damage:
        damage(tmp_path / name)

    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(changed.pop("train", tmp_path / name), **changed))


def test_an_array_of_more_dimensions_is_refused(tmp_path):
    """Or of other numbers."""
    for array in (np.zeros((100, 2), np.uint16), np.zeros(100)):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ConfigError, match=r"a\.npy holds .*: tokens are integers in one"):
            read_facts(config_of(tmp_path))


@pytest.mark.slow  # trains a gpt
def test_a_run_learns_from_tokens(tmp_path):
    """A text that counts, its documents packed: the next token is soon known."""
    write_raw(tmp_path / "a.bin", np.tile(np.arange(10), 400))
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "gpt"\nlayers = 1\nhidden = 32\nheads = 2\n'
        f'[data]\nname = "tokens"\ntrain = "{tmp_path}/a.bin"\ntokens = 8\nvocabulary = 16\n'
        'packing = "documents"\nend_of_document = 9\n'
        '[batch]\nglobal_batch = 16\n[optimizer]\nname = "adamw"\n'
        "[schedule]\nbase_learning_rate = 0.01\n[train]\nepochs = 3\n"
    )

    record = train(load_config(tmp_path / "run.toml"), tmp_path / "run", device_count=1)

    assert record.evaluations[-1].test_accuracy is not None
    assert record.evaluations[-1].test_accuracy > 0.95


@pytest.mark.parametrize(
    ("train", "vocabulary", "is_told"),
    [("a.txt", 50_304, True), ("a.txt", 256, False), ("a.bin", 50_304, False)],
)
def test_bytes_that_fill_no_vocabulary_are_told(train, vocabulary, is_told):
    """The default is GPT-2's, whose embeddings are most of a small network's work."""
    note = TokensConfig(train=train, vocabulary=vocabulary).note

    assert (note is not None and "256 would do" in note) == is_told
