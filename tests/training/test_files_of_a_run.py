"""The files of a run are those that it began with, in every phase and every process of it."""

import pickle
from functools import partial

import numpy as np
import pytest
from parquet_cases import encoded, random_images

from scalejax.config.data import ArrayRecordConfig, ImageFolderConfig, NumpyConfig, TokensConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import for_process, open_source
from scalejax.data.facts import resolve
from scalejax.training import compile as compiling
from scalejax.training.features import open_examples
from scalejax.training.reporter import Silent
from scalejax.training.train import train


def write_tokens(folder, name, first):
    """100 tokens from `first` on."""
    folder.mkdir(exist_ok=True)
    np.arange(first, first + 100, dtype="<u2").tofile(folder / name)


def run_on_tokens(folder):
    """Two epochs, the second of batches twice as large."""
    return build(
        RunConfig,
        {
            "model": {"name": "gpt", "layers": 1, "heads": 1, "hidden": 16},
            "data": {
                "name": "tokens",
                "train": str(folder),
                "tokens": 5,
                "vocabulary": 1000,
                "test_fraction": 0.2,
            },
            "batch": {"global_batch": 4, "ramp_epochs": [1], "ramp_factor": 2},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
            "train": {"epochs": 2},
        },
        where="run",
    )


@pytest.mark.slow  # trains three times
def test_files_that_appear_in_mid_run_are_not_trained_on(tmp_path, monkeypatch):
    """A shard is added once the first phase has begun: both phases see the shards before it."""
    write_tokens(tmp_path / "tokens", "b.bin", 100)
    seen = []
    usual = compiling.training_batches

    def noting(source, *arguments, **options):
        seen.append(source.take(np.arange(len(source)))["inputs"])
        write_tokens(tmp_path / "tokens", "a.bin", 500)
        return usual(source, *arguments, **options)

    monkeypatch.setattr(compiling, "training_batches", noting)
    config = run_on_tokens(tmp_path / "tokens")
    record = train(config, tmp_path / "run", device_count=1)

    assert record.status == "completed"
    first, second = seen
    np.testing.assert_array_equal(first, second)
    assert first.min() == 100
    assert first.max() < 200


def test_files_that_change_while_a_run_begins_are_refused(tmp_path):
    """Its steps were counted before."""
    write_tokens(tmp_path / "tokens", "b.bin", 100)
    run = resolve(run_on_tokens(tmp_path / "tokens"), 1)
    write_tokens(tmp_path / "tokens", "a.bin", 500)

    with pytest.raises(ConfigError, match=r"files of data\.train changed while the run started"):
        open_examples(run, "train", Silent())


def image_folder(folder, *numbers):
    """Images of two classes."""
    for part in ("train", "test"):
        for number in numbers:
            path = folder / part / "ab"[number % 2] / f"{9 - number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(random_images(10)[number]))
    return ImageFolderConfig(train=f"{folder}/train", test=f"{folder}/test", image_size=8)


def arrays(folder, *numbers):
    """An array whose rows are its classes."""
    classes = np.array(numbers)
    images = np.broadcast_to(classes[:, None, None], (len(numbers), 4, 4)).astype(np.uint8)
    np.savez(folder / "a.npz", x_train=images, y_train=classes, x_test=images, y_test=classes)
    return NumpyConfig(train=str(folder / "a.npz"), test=str(folder / "a.npz"))


def tokens(folder, *numbers):
    """A file for each number."""
    for number in numbers:
        write_tokens(folder / "tokens", f"{9 - number}.bin", 100 * number)
    return TokensConfig(train=str(folder / "tokens"), tokens=5, vocabulary=1000)


def records(folder, *numbers):
    """A file for each number."""
    pytest.importorskip("array_record")
    from test_array_record import example, write

    for number in numbers:
        content = [example(image=encoded(random_images(10)[number]), label=number)]
        write(folder / f"{9 - number}.array_record", content)
    return ArrayRecordConfig(train=str(folder), test=str(folder), classes=10, image_size=8)


def as_in_a_process(sent):
    """The source that a worker makes of what it is sent."""
    received = pickle.loads(sent)
    return received() if isinstance(received, partial) else received


@pytest.mark.parametrize("written", [image_folder, tokens, records])
def test_a_process_takes_the_examples_of_the_run(tmp_path, written):
    """Files that come before the others are added before a worker opens the source."""
    source = open_source(written(tmp_path, 1, 2, 3), "train", seed=0)
    indices = np.arange(len(source))
    expected = source.take(indices, 0)
    sent = pickle.dumps(for_process(source, 2))
    written(tmp_path, 4, 5)

    taken = as_in_a_process(sent)

    assert len(taken) == len(source)
    for name, values in expected.items():
        np.testing.assert_array_equal(taken.take(indices, 0)[name], values)


def test_a_process_takes_no_array_written_anew(tmp_path):
    """Of an .npz that another has taken the place of."""
    source = open_source(arrays(tmp_path, 0, 1, 2), "train", seed=0)
    sent = pickle.dumps(for_process(source, 2))
    arrays(tmp_path, 2, 1, 0)

    with pytest.raises(ConfigError, match="was rewritten"):
        as_in_a_process(sent).take(np.arange(3))
