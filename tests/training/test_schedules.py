"""The learning rate by step: numbers a reader can check on paper, and what holds for all."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.config.schedule import ScheduleConfig
from scalejax.core.errors import ConfigError
from scalejax.training.schedules import learning_rate_schedule


def rates(config: ScheduleConfig, steps: range, *, global_batch: int = 256) -> list[float]:
    """Rates of a run of 10 epochs of 10 steps."""
    schedule = learning_rate_schedule(
        config, global_batch=global_batch, steps_per_epoch=10, total_steps=100
    )
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("scaling", "peak"), [("none", 0.1), ("linear", 3.2), ("sqrt", 0.1 * 32**0.5)]
)
def test_peak_follows_the_scaling_rule(scaling, peak):
    """Goyal et al. 2017: 0.1 at 256 becomes 3.2 at 8192."""
    config = ScheduleConfig(base_learning_rate=0.1, scaling=scaling)

    assert config.scaled(8192)[0] == pytest.approx(peak)
    assert rates(config, range(1), global_batch=8192) == pytest.approx([peak])


def test_gradual_warmup_climbs_by_the_same_amount_every_step():
    """From 0.1 to 0.5 over 2 epochs of 10 steps: 0.02 a step, the peak at step 20."""
    config = ScheduleConfig(
        base_learning_rate=0.1, scaling="linear", warmup="gradual", warmup_epochs=2
    )

    found = rates(config, range(24), global_batch=5 * 256)

    assert found == pytest.approx([0.1 + 0.02 * step for step in range(20)] + [0.5] * 4)


def test_gradual_warmup_from_zero_starts_at_zero():
    """From 0 to 0.1 over one epoch of 10 steps."""
    config = ScheduleConfig(
        base_learning_rate=0.1, warmup="gradual", warmup_epochs=1, warmup_from="zero"
    )

    assert rates(config, range(12)) == pytest.approx([0.01 * s for s in range(10)] + [0.1] * 2)


@pytest.mark.parametrize("decay", ["constant", "cosine"])
@pytest.mark.parametrize("scaling", ["linear", "legw"])
@pytest.mark.parametrize("warmup", ["constant", "gradual"])
def test_a_warmup_of_no_epochs_is_none(warmup, scaling, decay):
    """Every rate to the last bit, so that a sweep over warmup_epochs may begin at 0."""
    if (warmup, scaling) == ("constant", "legw"):
        scaling = "sqrt"  # legw scales a gradual one only
    base = {"base_learning_rate": 0.1, "decay": decay}
    none = ScheduleConfig(**base, scaling="sqrt" if scaling == "legw" else scaling)
    zero = ScheduleConfig(**base, scaling=scaling, warmup=warmup, warmup_epochs=0)

    assert rates(zero, range(24), global_batch=5 * 256) == rates(
        none, range(24), global_batch=5 * 256
    )


def test_constant_warmup_holds_the_base_then_jumps():
    """Goyal et al. 2017, section 2.2: base for the warmup epochs, then the peak at once."""
    config = ScheduleConfig(
        base_learning_rate=0.1, scaling="linear", warmup="constant", warmup_epochs=0.3
    )

    found = rates(config, range(5), global_batch=1024)

    assert found == pytest.approx([0.1, 0.1, 0.1, 0.4, 0.4])


def test_step_decay_counts_epochs_from_the_start_of_training():
    """x0.1 at epochs 3 and 6, whatever the warmup."""
    for warmup in (
        {},
        {"warmup": "gradual", "warmup_epochs": 2.0, "warmup_from": "zero"},
    ):
        config = ScheduleConfig(base_learning_rate=1.0, decay="step", decay_epochs=(3, 6), **warmup)
        schedule = learning_rate_schedule(
            config, global_batch=256, steps_per_epoch=10, total_steps=100
        )

        found = [float(schedule(step)) for step in (20, 29, 30, 59, 60, 99)]
        assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_step_decay_keeps_boundaries_that_round_to_one_step():
    """Two factors at the same step both count."""
    config = ScheduleConfig(base_learning_rate=1.0, decay="step", decay_epochs=(0.31, 0.32))

    assert rates(config, range(2, 4)) == pytest.approx([1.0, 0.01])


def test_cosine_runs_from_the_end_of_warmup_to_the_end_of_training():
    """Half a wave over 80 steps from 1 to 0.2: 0.6 in the middle."""
    config = ScheduleConfig(
        base_learning_rate=1.0,
        warmup="gradual",
        warmup_epochs=2,
        warmup_from="zero",
        decay="cosine",
        end_learning_rate=0.2,
    )
    schedule = learning_rate_schedule(config, global_batch=256, steps_per_epoch=10, total_steps=100)

    found = [float(schedule(step)) for step in (10, 20, 40, 60, 100, 150)]

    quarter = 0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2
    assert found == pytest.approx([0.5, 1.0, quarter, 0.6, 0.2, 0.2])


def test_polynomial_decay_by_hand():
    """Squared: half way down it is end + (1 - end) / 4 (MLPerf's schedule for LARS)."""
    config = ScheduleConfig(
        base_learning_rate=1.0, decay="polynomial", decay_power=2, end_learning_rate=0.2
    )
    schedule = learning_rate_schedule(config, global_batch=256, steps_per_epoch=10, total_steps=100)

    found = [float(schedule(step)) for step in (0, 50, 100, 120)]

    assert found == pytest.approx([1.0, 0.4, 0.2, 0.2])


@pytest.mark.parametrize(
    ("decay", "middle"),
    [
        ({"decay": "polynomial", "decay_power": 1.0}, 0.6),
        ({"decay": "one_minus_sqrt"}, 0.2 + 0.8 * (1 - 0.5**0.5)),
        ({"decay": "cosine"}, 0.6),
    ],
)
def test_warmup_stable_decay_by_hand(decay, middle):
    """10 epochs of 10 steps: one climbs, the last two fall from 1 to 0.2, the peak is between."""
    config = ScheduleConfig(
        base_learning_rate=1.0,
        warmup="gradual",
        warmup_epochs=1,
        warmup_from="zero",
        decay_share=0.2,
        end_learning_rate=0.2,
        **decay,
    )

    found = rates(config, range(101))

    assert found[:10] == pytest.approx([0.1 * step for step in range(10)])
    assert found[10:81] == pytest.approx([1.0] * 71)
    assert found[90] == pytest.approx(middle)
    assert found[100] == pytest.approx(0.2)
    assert all(after < before for before, after in pairwise(found[80:]))


def test_mlperfs_schedule_for_lars():
    """Gradual from zero over 5 of 40 epochs, then peak (1 - t)^2 (poly-2); RCP row 4096."""
    config = ScheduleConfig(
        base_learning_rate=10.0,
        warmup="gradual",
        warmup_epochs=5,
        warmup_from="zero",
        decay="polynomial",
    )
    schedule = learning_rate_schedule(
        config, global_batch=4096, steps_per_epoch=312, total_steps=40 * 312
    )
    steps = np.arange(40 * 312)
    part_over = (steps - 5 * 312) / (35 * 312)

    expected = np.where(steps < 5 * 312, 10 * steps / (5 * 312), 10 * (1 - part_over) ** 2)
    np.testing.assert_allclose(schedule(steps), expected, rtol=1e-4, atol=1e-6)


def test_legw_warms_up_for_more_epochs_at_a_larger_batch():
    """k = 4: the peak doubles, and half an epoch of warmup becomes two."""
    config = ScheduleConfig(
        base_learning_rate=0.1,
        scaling="legw",
        warmup="gradual",
        warmup_epochs=0.5,
        warmup_from="zero",
    )

    found = rates(config, range(22), global_batch=1024)

    assert found == pytest.approx([0.01 * step for step in range(20)] + [0.2] * 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scaling": "legw"}, r"schedule\.scaling='legw' is refused: .* use warmup=\"gradual\""),
        ({"decay_share": 0.2}, r"decay_share=0\.2 is refused: decay='constant' has no end"),
        ({"decay": "cosine", "decay_share": 0.0}, "it must be above 0 and at most 1"),
        ({"decay": "cosine", "decay_share": 1.5}, "it must be above 0 and at most 1"),
    ],
)
def test_impossible_schedules_are_refused(fields, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        ScheduleConfig(base_learning_rate=0.1, **fields)


def test_a_run_shorter_than_its_warmup_only_warms_up():
    """One epoch of a recipe with five of warmup: a fifth of the way."""
    config = ScheduleConfig(
        base_learning_rate=0.1,
        warmup="gradual",
        warmup_epochs=5,
        warmup_from="zero",
        decay="cosine",
    )
    schedule = learning_rate_schedule(config, global_batch=256, steps_per_epoch=10, total_steps=10)

    assert float(schedule(10)) == pytest.approx(0.02)


@pytest.mark.parametrize("decay", ["constant", "step", "cosine", "polynomial"])
def test_one_function_serves_numbers_arrays_and_traces(decay):
    """Training traces it, `config show` calls it, plots give it all steps at once."""
    config = ScheduleConfig(
        base_learning_rate=0.1,
        scaling="linear",
        warmup="gradual",
        warmup_epochs=2,
        decay=decay,
        decay_epochs=(5,) if decay == "step" else (),
    )
    schedule = learning_rate_schedule(config, global_batch=512, steps_per_epoch=10, total_steps=100)
    steps = [0, 7, 20, 60, 99]

    one_by_one = [float(schedule(step)) for step in steps]

    np.testing.assert_allclose(schedule(np.array(steps)), one_by_one, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(schedule))(jnp.array(steps)), one_by_one, rtol=1e-6)
    assert jax.jit(schedule)(jnp.int32(7)).dtype == jnp.float32


schedules = st.builds(
    lambda decay, **fields: ScheduleConfig(
        decay=decay, decay_epochs=(6.0, 8.0) if decay == "step" else (), **fields
    ),
    base_learning_rate=st.floats(1e-4, 1.0),
    scaling=st.sampled_from(["linear", "sqrt"]),
    warmup=st.just("gradual"),
    warmup_epochs=st.floats(0.1, 5.0),
    warmup_from=st.sampled_from(["base", "zero"]),
    decay=st.sampled_from(["constant", "step", "cosine", "polynomial"]),
)


@settings(deadline=None, max_examples=25)  # each example compiles; the first may wait
@given(config=schedules, k=st.integers(1, 64))
def test_a_gradual_warmup_ends_at_the_peak_without_a_jump(config, k):
    """The rate at W is the peak, the step before it one increment below, for every decay."""
    batch = k * config.reference_batch
    peak = config.scaled(batch)[0]
    start = config.base_learning_rate if config.warmup_from == "base" else 0.0
    end = round(config.warmup_epochs * 10)
    increment = (peak - start) / max(end, 1)

    at_end, before = rates(config, range(end, end - 2, -1), global_batch=batch)

    assert at_end == pytest.approx(peak, rel=1e-5)
    if end:
        assert before == pytest.approx(peak - increment, rel=1e-5, abs=1e-7)


@settings(deadline=None, max_examples=25)  # each example compiles; the first may wait
@given(config=schedules, k=st.floats(1, 64))
def test_no_rate_is_above_the_peak_or_below_zero(config, k):
    """Scaling sets the ceiling; warmup and decay stay beneath it."""
    batch = round(k * config.reference_batch)
    schedule = learning_rate_schedule(
        config, global_batch=batch, steps_per_epoch=10, total_steps=100
    )

    found = np.asarray(schedule(np.arange(120)))

    assert found.min() >= 0
    assert found.max() <= config.scaled(batch)[0] * (1 + 1e-5)  # float32


@settings(deadline=None, max_examples=25)  # each example compiles; the first may wait
@given(k=st.integers(1, 1000))
def test_linear_scaling_is_the_square_of_sqrt_scaling(k):
    """Peak over base: k, and root k."""
    linear, root = (
        ScheduleConfig(base_learning_rate=1.0, scaling=rule).scaled(256 * k)[0]
        for rule in ("linear", "sqrt")
    )

    assert linear == pytest.approx(k)
    assert root**2 == pytest.approx(linear)


def test_impossible_lengths_are_refused():
    """No steps in an epoch, and none in the run."""
    config = ScheduleConfig(base_learning_rate=0.1)
    with pytest.raises(ConfigError, match="steps_per_epoch=0 is refused"):
        learning_rate_schedule(config, global_batch=1, steps_per_epoch=0, total_steps=1)
    with pytest.raises(ConfigError, match="total_steps=0 is refused"):
        learning_rate_schedule(config, global_batch=1, steps_per_epoch=1, total_steps=0)
    with pytest.raises(ConfigError, match=r"batch\.global_batch=0 is refused"):
        config.scaled(0)
