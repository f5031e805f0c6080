"""Mixtures: sources have their shares, wherever in a run and by whatever process it is read."""

import pickle
from dataclasses import replace
from fractions import Fraction
from functools import partial

import jax
import numpy as np
import pytest
from test_datasets import shapes_of
from test_held_out import documents, mixture

from scalejax.config.data import (
    CustomDataConfig,
    MixtureConfig,
    MixtureStage,
    SyntheticTokensConfig,
    TokensConfig,
)
from scalejax.config.input import InputConfig
from scalejax.config.parallelism import Layout
from scalejax.config.run import RunConfig, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import for_process, open_source
from scalejax.data.facts import read_facts, resolve
from scalejax.data.loader.loader import evaluation_batches, rows_held, training_batches
from scalejax.data.loader.prefetch import prefetched_batches
from scalejax.data.loader.sampler import TrainingSampler
from scalejax.data.readers.mixture import Mixture, Turns
from scalejax.training.data_fingerprints import used_files
from scalejax.training.evaluation import build_evaluation
from scalejax.training.logger import evaluation_measurement, samples_by_source
from scalejax.training.mesh import build_mesh
from scalejax.training.step import init_state
from scalejax.training.trackers import tracked_values

RANDOM = SyntheticTokensConfig(tokens=8, vocabulary=50, train_examples=60, test_examples=12)


def train_part(config, seed=3) -> Mixture:
    """The training part."""
    source = open_source(config, "train", seed=seed)
    assert isinstance(source, Mixture)
    return source


def of_weights(*weights, stages=()):
    """A mixture of as many sources."""
    return MixtureConfig(sources=(RANDOM,) * len(weights), weights=weights, stages=stages)


@pytest.mark.parametrize("weights", [(7, 3), (5, 3, 2), (1, 0, 2, 4), (1, 1), (997, 2, 1, 40, 60)])
def test_turns_are_those_of_websters_method(weights):
    """Its rule in whole numbers: the next is the source of the largest weight / (2 count + 1), the
    first of equal ones."""
    counts, expected = [0] * len(weights), []
    for _ in range(1000):
        ratios = [Fraction(w, 2 * count + 1) for w, count in zip(weights, counts, strict=True)]
        expected.append(ratios.index(max(ratios)))
        counts[expected[-1]] += 1

    which, _ = Turns(of_weights(*weights), 1000).between(0, 1000)

    assert which.tolist() == expected


@pytest.mark.parametrize(
    ("sources", "most"), [pytest.param(2, 1, id="2"), pytest.param(3, 1, id="3"), (6, 2)]
)
def test_before_every_example_each_source_has_its_share(sources, most):
    """Also where weights change, one of them to 0; and any stretch is that of the whole."""
    random = np.random.default_rng(sources)
    for _ in range(20):
        first, second, last = random.random((3, sources)) ** 3 + 1e-3
        second[0] = 0
        stages = (
            MixtureStage(until_epoch=0.5, weights=tuple(first)),
            MixtureStage(until_epoch=1.25, weights=tuple(second)),
        )
        turns = Turns(of_weights(*last, stages=stages), 800)
        which, numbers = turns.between(0, 2000)
        shares = np.stack([each / each.sum() for each in (first, second, last)])
        due = np.cumsum(np.repeat(shares, (400, 600, 1000), axis=0), axis=0)
        had = np.cumsum(which[:, None] == np.arange(sources), axis=0)

        assert np.abs(had - due).max() < most
        assert (numbers == had[np.arange(2000), which] - 1).all()
        for begin in random.integers(0, 1990, 20).tolist():
            part = turns.between(begin, begin + 10)
            assert np.array_equal(part, [which[begin : begin + 10], numbers[begin : begin + 10]])
            assert turns.before(begin + 1).tolist() == had[begin].tolist()


def test_a_source_gives_each_example_once_before_it_begins_anew_in_another_order(tmp_path):
    """The epoch of the mixture may end within."""
    config = replace(mixture(tmp_path), weights=(1, 3), epoch_examples=70)
    source = train_part(config)

    seen = np.concatenate([source.order_of_epoch(epoch, 1, 1) for epoch in range(4)])

    of_second = [index for index in seen.tolist() if index % 60 >= 40]
    passes = [of_second[begin : begin + 20] for begin in range(0, 200, 20)]
    assert len(of_second) == 210
    assert [{index - 60 * number for index in each} for number, each in enumerate(passes)] == [
        set(range(40, 60))
    ] * 10
    assert passes[0] != [index - 60 for index in passes[1]]
    assert len(source) == read_facts(config).train_examples == 70
    other = train_part(config, seed=4)
    assert other.order_of_epoch(0, 1, 1).tolist() != seen[:70].tolist()


def test_documents_are_shuffled_by_the_pass_over_their_source(tmp_path):
    """And not by the epoch of the mixture, in which it may be read several times."""
    packed = documents(tmp_path)
    config = MixtureConfig(sources=(packed, packed), weights=(1, 1))
    one, both = (open_source(each, "train", seed=3) for each in (packed, config))

    rows = both.take(np.array([3, 3 + 120, 63 + 240]), 0)["inputs"]

    expected = [one.take(np.array([3]), number)["inputs"][0] for number in (0, 1, 2)]
    np.testing.assert_array_equal(rows, expected)
    assert len({row.tobytes() for row in rows}) == 3


def test_processes_and_resumed_runs_read_what_one_reads_from_the_start(tmp_path):
    """Any number of hosts, from any step, with the same rows of a batch."""
    config = replace(mixture(tmp_path), validation_fraction=0.2)
    shapes = shapes_of(config, 8)
    source = train_part(config)
    all_of_them = training_batches(source, shapes, seed=3, start_step=0, stop_step=18)
    whole = [jax.device_get(batch) for batch in all_of_them]
    assert len(whole) == 18

    for hosts, begin in ((1, 7), (2, 0), (4, 11)):
        devices = np.array_split(np.array(jax.devices()[:4]), hosts)
        there = pickle.loads(pickle.dumps(for_process(source, 2)))
        opened = there() if isinstance(there, partial) else there
        order = TrainingSampler(opened, 8, seed=3, steps=18, first_epoch=0)
        for each in devices:
            rows = rows_held(shapes_of(config, 8, Layout(data=4))["inputs"], set(each))
            batches = list(
                prefetched_batches(
                    order, opened, rows, 64, start=begin, how=InputConfig(), workers=0
                )
            )
            assert len(batches) == 18 - begin
            for batch, expected in zip(batches, whole[begin:], strict=True):
                for name in ("inputs", "targets"):
                    np.testing.assert_array_equal(batch[name], expected[name][rows])


def test_the_record_counts_the_samples_of_each_source(tmp_path):
    """Those of the batches, without what an epoch drops at its end, with a batch that grows."""
    config = build(
        RunConfig,
        {
            "model": {"name": "gpt", "hidden": 8, "layers": 1, "heads": 1},
            "data": {
                "name": "mixture",
                "sources": [
                    {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32, **counts}
                    for counts in ({"train_examples": 100}, {"train_examples": 30})
                ],
                "weights": [1, 2],
                "stages": [{"until_epoch": 0.5, "weights": [1, 0]}],
            },
            "batch": {"global_batch": 9, "ramp_epochs": [1], "ramp_factor": 2},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
            "train": {"epochs": 3},
        },
    )
    run = resolve(config, 1)
    source, counted, step = train_part(config.data), np.zeros(2, int), 0

    for epoch, batch in enumerate((9, 18, 18)):
        order = source.order_of_epoch(epoch, 1, 1)
        for begin in range(0, 130 - batch + 1, batch):
            counted += np.bincount(order[begin : begin + batch] % 130 >= 100, minlength=2)
            step += 1
            assert samples_by_source(run, step) == tuple(counted)

    assert step == run.total_steps
    alone = with_fields(config, {"data": {"name": "synthetic_tokens"}})
    assert samples_by_source(resolve(alone, 1), 1) is None


def evaluated(config, device_count=1):
    """Measurements of the initial weights on validation and test data."""
    run = resolve(config, device_count)
    mesh = build_mesh(run.layout)
    evaluation, state = build_evaluation(run, mesh), init_state(run, mesh)
    for part in ("validation", "test"):
        source = open_source(config.data, part, seed=config.seed)
        sums = [
            evaluation.function(*evaluation.weights(state), batch)
            for batch in evaluation_batches(source, evaluation.batch)
        ]
        yield evaluation_measurement(
            run, sums, split=part, step=0, seconds=1.0, elapsed_seconds=1.0
        )


def test_losses_of_validation_and_test_are_told_by_source():
    """Over two devices, with padding: each is what its source alone has, and together they are the
    loss of all."""
    large = SyntheticTokensConfig(tokens=8, vocabulary=32, train_examples=110, test_examples=13)
    small = replace(large, train_examples=50, test_examples=6)
    data = MixtureConfig(sources=(large, small), weights=(1.0, 1.0), validation_fraction=0.1)
    config = build(
        RunConfig,
        {
            "model": {"name": "gpt", "hidden": 8, "layers": 1, "heads": 1},
            "data": {"name": "synthetic_tokens"},
            "batch": {"global_batch": 8},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
        },
    )
    alone = [[*evaluated(replace(config, data=each))] for each in data.divided_sources]

    together = [*evaluated(replace(config, data=data), device_count=2)]

    for kind, (both, first, second) in enumerate(zip(together, *alone, strict=True)):
        losses, counts = (first.loss, second.loss), (first.examples, second.examples)
        assert counts == ((11, 5), (13, 6))[kind]
        assert first.loss != pytest.approx(second.loss, rel=1e-4)
        assert both.loss_by_source == pytest.approx(losses, rel=1e-6)
        assert both.loss == pytest.approx(np.average(losses, weights=counts), rel=1e-6)
        assert first.loss_by_source is None
        told = tracked_values(both)[f"{('validation', 'test')[kind]}/loss_by_source/1"]
        assert told == both.loss_by_source[1]


def test_the_files_of_every_source_are_held_against_later_ones(tmp_path):
    """Those of tests and training, of sources that are in files."""
    two = mixture(tmp_path)
    third = replace(RANDOM, vocabulary=200_000)
    config = replace(two, sources=(*two.sources, third), weights=(1, 1, 1))

    used = used_files(config)

    assert used is not None
    assert len(used.train) == len(used.test) == 2
    assert config.locations == tuple(
        str(tmp_path / f"{source}_{part}.bin")
        for source in ("large", "small")
        for part in ("train", "test")
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": (1.0,)}, r"data\.weights=\[1\.0\] .* one for each of the 2"),
        ({"weights": (-1.0, 2.0)}, "negative"),
        ({"weights": (0.0, 0.0)}, "one must be above 0"),
        ({"weights": (float("nan"), 1.0)}, "negative"),
        ({"sources": (RANDOM,), "weights": (1.0,)}, r"data\.sources=1 .* two or more"),
        (
            {"sources": (RANDOM, replace(RANDOM, validation_fraction=0.1))},
            r"data\.sources\.1\.validation_fraction=0\.1",
        ),
        (
            {
                "sources": (
                    TokensConfig(train="a.bin", validation="b.bin"),
                    TokensConfig(train="a.bin"),
                )
            },
            r"data\.sources\.1\.validation=None .* all have them, or none",
        ),
        (
            {"stages": (MixtureStage(until_epoch=1, weights=(1.0, 1.0)),) * 2},
            r"data\.stages\.1\.until_epoch=1 .* more than 1",
        ),
        (
            {"stages": (MixtureStage(until_epoch=1, weights=(1.0,)),)},
            r"data\.stages\.0\.weights=\[1\.0\]",
        ),
        ({"epoch_examples": 0}, r"data\.epoch_examples=0"),
    ],
)
def test_words_that_make_no_mixture_are_refused(changed, message):
    """Naming the field."""
    with pytest.raises(ConfigError, match=message):
        MixtureConfig(**{"sources": (RANDOM, RANDOM), "weights": (0.5, 0.5), **changed})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(RANDOM, tokens=9), r"data\.sources\.1\.tokens=9 .* data\.sources\.0 has 8"),
        (replace(RANDOM, vocabulary=51), r"data\.sources\.1\.vocabulary=51"),
        (replace(RANDOM, document_tokens=4), r"data\.sources\.1\.document_mask=True"),
        (
            CustomDataConfig(name="custom", path="toy_own_data:images"),
            r"data\.sources\.1\.name='custom' .* holds images",
        ),
    ],
)
def test_sources_that_are_not_alike_are_refused(other, message):
    """Before a step is compiled."""
    with pytest.raises(ConfigError, match=message):
        read_facts(MixtureConfig(sources=(RANDOM, other), weights=(0.5, 0.5)))


@pytest.mark.parametrize("name", ["mixture", "fashion_mnist"])
def test_a_mixture_is_of_texts_alone(name):
    """Not of other mixtures, and not of images."""
    table = {"name": "mixture", "weights": [1, 1], "sources": [{"name": name}] * 2}

    with pytest.raises(ConfigError, match=rf"data\.sources\.0\.name='{name}' .* python_docs"):
        build(MixtureConfig, table, where="data")
