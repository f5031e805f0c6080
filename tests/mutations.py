"""Small mistakes put into the core one at a time, to see which of them the tests catch.

    python tests/mutations.py                  # all of them: first tests, then the whole suite
    python tests/mutations.py --only 3,7,12 --no-whole-suite --jobs 2 --results found.jsonl

Each mutation is made in a temporary copy of the files that Git tracks, never in the checkout. The
tests that mirror the changed module run first; only what survives those is put to the whole default
suite. A mutation counts as caught where a test fails, or a time-out is reached, that does not fail,
or is not reached, in the same copy without it. Exits 0 where at least 36 of 40 are caught, 1 where
fewer are, 2 where the table is not that of these files.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).resolve().parents[1]
LEAST_CAUGHT = (36, 40)
"""How many of how many must be caught."""
_TOKEN = "SCALEJAX_MUTATIONS_RUN"  # in the environment of all that is started here
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
_TESTS_PASSED, _TESTS_FAILED, _INTERRUPTED, _USAGE_ERROR = 0, 1, 2, 4  # pytest.ExitCode
_SECONDS_TO_END = 10.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)

Outcome = Literal["caught", "timed out", "survived", "unproven"]
"""caught: a test failed. timed out: its first tests did not end, which do without it. survived: all
that ran passed. unproven: what failed fails without the mutation too, so that nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mistake in one line or a few, as an engineer could make it."""

    path: str
    """File, from the root of the repository."""
    old: str
    """What is right: occurs there exactly once."""
    new: str
    """What takes its place."""
    mistake: str
    """What is wrong with it, in one line."""
    first_tests: tuple[str, ...]
    """Test files to run first: those that mirror the module."""
    words: str = ""
    """Expression for pytest's -k: which of their tests; all of them if empty."""

    @property
    def key(self) -> str:
        """Identifies the change, and not its number in the table."""
        return hashlib.sha256("\0".join((self.path, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def first_arguments(self) -> tuple[str, ...]:
        """Of pytest, to run the first tests."""
        return (*self.first_tests, *(("-k", self.words) if self.words else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutation."""

    key: str
    """`Mutation.key`."""
    path: str
    """`Mutation.path`."""
    mistake: str
    """`Mutation.mistake`."""
    outcome: Outcome
    """Whether it was caught."""
    by: str
    """Test that failed; empty if none did."""
    is_whole_suite: bool
    """Whether its first tests passed, and the whole suite ran."""
    seconds: float
    """That the tests took with the mutation."""

    @property
    def is_caught(self) -> bool:
        """Whether the tests guard against it."""
        return self.outcome in ("caught", "timed out")

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "Result":
        """What `to_line` wrote.

        Raises:
            ValueError: if it is no such line.
        """
        try:
            result = cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"this is no result of a mutation: {line[:80]!r}") from error
        if result.outcome not in get_args(Outcome):
            raise ValueError(f"{result.outcome!r} is no outcome of a mutation.")
        return result


MUTATIONS: tuple[Mutation, ...] = (
    # --- the step ---
    Mutation(
        path="scalejax/training/gradients.py",
        old='return {**batch, "weights": weights * (weights.size / counted)}',
        new='return {**batch, "weights": weights}',
        mistake="the loss is divided by all rows, not by those that count",
        first_tests=("tests/training/test_example_weights.py",),
        words="rows_that_count",
    ),
    Mutation(
        path="scalejax/training/gradients.py",
        old="total = jax.tree.map(lambda t, g: t + g / microbatches, total, gradient)",
        new="total = jax.tree.map(lambda t, g: t + g, total, gradient)",
        mistake="gradients of microbatches are summed, not averaged",
        first_tests=("tests/training/test_goyal2017.py",),
        words="normalised",
    ),
    Mutation(
        path="scalejax/training/gradients.py",
        old="return share * own + (1 - share) * others",
        new="return (1 - share) * own + share * others",
        mistake="mixup gives a sample its partner's share",
        first_tests=("tests/training/test_mixup.py",),
        words="of_mixed_images",
    ),
    Mutation(
        path="scalejax/training/losses.py",
        old="smoothed = (1 - smoothing) * of_target + smoothing * of_all",
        new="smoothed = of_target + smoothing * of_all",
        mistake="label smoothing leaves the whole weight on the target",
        first_tests=(
            "tests/training/test_mixup.py",
            "tests/training/test_goyal2017.py",
        ),
        words="of_mixed_images or normalised",
    ),
    Mutation(
        path="scalejax/training/state.py",
        old="return lax.pmean(gradient, DATA)",
        new="return lax.psum(gradient, DATA)",
        mistake="gradients of devices are summed, not averaged",
        first_tests=(
            "tests/training/test_goyal2017.py",
            "tests/training/test_conformance.py",
        ),
        words="normalised or but_rounding",
    ),
    Mutation(
        path="scalejax/training/state.py",
        old="return part / lax.axis_size(DATA)",
        new="return part",
        mistake="reduce-scattered gradients (ZeRO) are summed, not averaged",
        first_tests=("tests/training/test_example_weights.py",),
        words="ZeRO",
    ),
    Mutation(
        path="scalejax/training/data_parallel.py",
        old="others = lax.pmean((model_state, rows.weighted(metrics)), DATA)",
        new="others = lax.psum((model_state, rows.weighted(metrics)), DATA)",
        mistake="under shard_map loss and running statistics grow with the devices",
        first_tests=(
            "tests/training/test_goyal2017.py",
            "tests/training/test_conformance.py",
        ),
        words="normalised or per_device_mode",
    ),
    Mutation(
        path="scalejax/training/step.py",
        old="average = averaged(setup.run, step, state.average, weights)",
        new="average = averaged(setup.run, state.step, state.average, weights)",
        mistake="averages of weights count updates from one too few",
        first_tests=("tests/training/test_averaging.py",),
        words="weights_that_training_has",
    ),
    Mutation(
        path="scalejax/training/gradient_sync/device_rows.py",
        old="weight = self.own / self.mean",
        new="weight = jnp.where(self.own > 0, 1.0, 0.0)",
        mistake="devices count alike in a mean, however few of their rows count",
        first_tests=("tests/training/test_uneven_rows.py",),
    ),
    Mutation(
        path="scalejax/training/gradient_sync/local_sgd.py",
        old="(rows.own == 0) & (step >= begin)",
        new="(rows.own < 0) & (step >= begin)",
        mistake="momentum moves a device of local SGD none of whose rows count",
        first_tests=("tests/training/test_uneven_rows.py",),
    ),
    Mutation(
        path="scalejax/training/gradient_sync/local_sgd.py",
        old="made = step + 1 - begin",
        new="made = step - begin",
        mistake="local SGD averages an update late",
        first_tests=("tests/training/test_local_sgd.py",),
    ),
    Mutation(
        path="scalejax/training/noise_scale.py",
        old="/ (1 / small_batch - 1 / big_batch)",
        new="/ (1 / small_batch + 1 / big_batch)",
        mistake="the variance of the noise scale is divided by a sum of inverse batches",
        first_tests=("tests/training/test_noise_scale.py",),
        words="estimates or quadratic",
    ),
    Mutation(
        path="scalejax/training/sharpness.py",
        old="along = jnp.where(is_alive, along, diagonal[0])",
        new="along = jnp.where(is_alive, along, 0)",
        mistake="a Hessian without positive eigenvalues has sharpness 0 once all is spanned",
        first_tests=("tests/training/test_sharpness.py",),
        words="by_sign",
    ),
    # --- learning rates, scaling rules, growing batches ---
    Mutation(
        path="scalejax/training/schedules.py",
        old="jnp.where(jnp.asarray(step) < warmup_end,",
        new="jnp.where(jnp.asarray(step) <= warmup_end,",
        mistake="warmup takes one update more",
        first_tests=("tests/training/test_schedules.py",),
    ),
    Mutation(
        path="scalejax/training/schedules.py",
        old='jnp.searchsorted(jnp.asarray(boundaries), jnp.asarray(step), side="right")',
        new='jnp.searchsorted(jnp.asarray(boundaries), jnp.asarray(step), side="left")',
        mistake="a step decay comes one update late",
        first_tests=("tests/training/test_schedules.py",),
    ),
    Mutation(
        path="scalejax/training/schedules.py",
        old="length, transition_begin=begin",
        new="length, transition_begin=0",
        mistake="a polynomial decay begins during warmup",
        first_tests=("tests/training/test_schedules.py",),
    ),
    Mutation(
        path="scalejax/training/schedules.py",
        old="epoch = (set_at + 1) / steps_per_epoch",
        new="epoch = set_at / steps_per_epoch",
        mistake="Horovod's warmup lags one update",
        first_tests=("tests/training/test_reference_schedules.py",),
    ),
    Mutation(
        path="scalejax/config/optimizer.py",
        old="epsilon=self.epsilon / k**0.5,",
        new="epsilon=self.epsilon * k**0.5,",
        mistake="the SDE rule moves epsilon the wrong way",
        first_tests=("tests/config/test_scaling_rules.py",),
    ),
    Mutation(
        path="scalejax/config/schedule.py",
        old='stretch = k if self.scaling == "legw" else 1.0',
        new='stretch = k**0.5 if self.scaling == "legw" else 1.0',
        mistake="LEGW stretches warmup by the root of k",
        first_tests=("tests/config/test_scaling_rules.py",),
    ),
    Mutation(
        path="scalejax/config/schedule.py",
        old="(first_epoch - last.first_epoch) * last.steps_per_epoch",
        new="first_epoch * last.steps_per_epoch",
        mistake="a phase of a growing batch counts the epochs before it twice",
        first_tests=("tests/training/test_batch_ramp.py",),
    ),
    # --- optimizers, loss scale, batch normalisation ---
    Mutation(
        path="scalejax/training/optimizers/trust_ratio.py",
        old="bounded = jnp.minimum(weight_norm, self.weight_norm_bound)",
        new="bounded = jnp.maximum(weight_norm, self.weight_norm_bound)",
        mistake="LAMB's bound of the norm of weights is from below",
        first_tests=("tests/training/test_optimizers.py",),
    ),
    Mutation(
        path="scalejax/training/optimizers/trust_ratio.py",
        old="update_norm = update_norm + self.decay * weight_norm",
        new="update_norm = jnp.linalg.norm(update)",
        mistake="LARS divides by the norm of the sum, not by the sum of norms",
        first_tests=("tests/training/test_optimizers.py",),
    ),
    Mutation(
        path="scalejax/training/optimizers/__init__.py",
        old="schedule(state.updates_made) / jnp.where(before, before, 1)",
        new="jnp.where(before, before, 1) / schedule(state.updates_made)",
        mistake="momentum correction multiplies by the inverse ratio of rates",
        first_tests=("tests/training/test_optimizers.py",),
    ),
    Mutation(
        path="scalejax/training/optimizers/__init__.py",
        old="optax.masked(ratio, _everything if is_nvidias else mask),",
        new="optax.masked(ratio, mask),",
        mistake="NVLAMB leaves biases without a trust ratio",
        first_tests=("tests/training/test_optimizers.py",),
    ),
    Mutation(
        path="scalejax/training/optimizers/loss_scale.py",
        old="jnp.where(is_finite, state.finite_updates + 1, 0)",
        new="state.finite_updates + is_finite",
        mistake="the loss scale grows after so many updates, not so many in a row",
        first_tests=("tests/training/test_loss_scale.py",),
    ),
    Mutation(
        path="scalejax/training/optimizers/loss_scale.py",
        old="._replace(inner=_chosen(is_finite, inner_state, state.inner)),",
        new="._replace(inner=inner_state),",
        mistake="a skipped update still moves the optimizer's state",
        first_tests=("tests/training/test_loss_scale.py",),
    ),
    Mutation(
        path="scalejax/models/normalization.py",
        old="return MOMENTUM * running + (1 - MOMENTUM) * of_groups.mean(0)",
        new="return (1 - MOMENTUM) * running + MOMENTUM * of_groups.mean(0)",
        mistake="running statistics keep the wrong part",
        first_tests=("tests/models/test_normalization.py",),
    ),
    Mutation(
        path="scalejax/models/normalization.py",
        old="jnp.arange(groups - 1, -1, -1, dtype=jnp.float32)",
        new="jnp.arange(groups, dtype=jnp.float32)",
        mistake="groups enter the running statistics in reverse",
        first_tests=("tests/models/test_normalization.py",),
    ),
    Mutation(
        path="scalejax/models/normalization.py",
        old="moments = jax.lax.pmean(moments, self.scope.axis_name)",
        new="moments = moments.at[0].set(jax.lax.pmean(moments[0], self.scope.axis_name))",
        mistake="devices share their means and not their variances",
        first_tests=("tests/models/test_normalization.py",),
    ),
    # --- mixtures of experts ---
    Mutation(
        path="scalejax/models/moe.py",
        old="earlier_HE[chunk_A, sorted_A] < capacity",
        new="earlier_HE[chunk_A, sorted_A] <= capacity",
        mistake="an expert takes a token beyond its capacity",
        first_tests=("tests/training/test_moe.py",),
    ),
    Mutation(
        path="scalejax/models/moe.py",
        old="gradient_BSD * lax.axis_size(TENSOR)",
        new="gradient_BSD",
        mistake="gradients of experts are smaller by the devices along tensor",
        first_tests=("tests/training/test_moe.py",),
    ),
    # --- layouts, FSDP, pipelines ---
    Mutation(
        path="scalejax/config/parallelism.py",
        old="AXES = (PIPELINE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)",
        new="AXES = (PIPELINE, DATA, FSDP, EXPERT, TENSOR, CONTEXT)",
        mistake="neighbours along tensor are no neighbours in a node",
        first_tests=("tests/config/test_parallelism.py",),
    ),
    Mutation(
        path="scalejax/config/parallelism.py",
        old="samples = split.microbatch * split.layout.batch_shards",
        new="samples = split.per_device_batch * split.layout.batch_shards",
        mistake="groups of BatchNorm are counted over all microbatches at once",
        first_tests=("tests/config/test_parallelism.py",),
    ),
    Mutation(
        path="scalejax/config/parallelism.py",
        old="(least + 1,) * long_stages + (least,) * (stages - long_stages)",
        new="(least,) * (stages - long_stages) + (least + 1,) * long_stages",
        mistake="the last stages of a pipeline are the long ones",
        first_tests=("tests/config/test_parallelism.py",),
    ),
    Mutation(
        path="scalejax/training/state.py",
        old="key=lambda index: (len(split[index]) > 0, -leaf.shape[index]))",
        new="key=lambda index: (len(split[index]) > 0, leaf.shape[index]))",
        mistake="ZeRO divides the shortest dimension, which few devices divide",
        first_tests=("tests/training/test_conformance.py",),
        words="most_devices_divide",
    ),
    Mutation(
        path="scalejax/models/sharding.py",
        old="names = names[:-1]",
        new="names = names[1:]",
        mistake="of several axes that do not divide, the major is dropped first",
        first_tests=("tests/models/test_network.py",),
        words="odd_dimensions",
    ),
    Mutation(
        path="scalejax/models/fsdp.py",
        old="return jnp.zeros_like(table).at[place].add(own)",
        new="return jnp.zeros_like(table).at[place].set(own)",
        mistake="of a token that comes twice one gradient is lost",
        first_tests=("tests/training/test_conformance.py",),
        words="sharded_transformers",
    ),
    Mutation(
        path="scalejax/models/pipeline.py",
        old="chunk = jnp.maximum(time - here, 0) // stages % chunks",
        new="chunk = (time + here) // stages % chunks",
        mistake="later stages are a chunk ahead, not behind",
        first_tests=("tests/models/test_pipeline_stages.py",),
    ),
    Mutation(
        path="scalejax/models/pipeline.py",
        old="if min(counts) == max(counts):",
        new="if min(counts) == most:",
        mistake="stages with chunks report some of their layers twice",
        first_tests=("tests/models/test_pipeline_stages.py",),
    ),
    Mutation(
        path="scalejax/training/pipeline.py",
        old="own = jnp.asarray(counts)[self._here]",
        new="own = jnp.asarray(counts)[-1]",
        mistake="a stage skips the layers that it has more of than the last one",
        first_tests=("tests/training/test_moe.py",),
    ),
    Mutation(
        path="scalejax/models/pipeline.py",
        old="leaving = entered_MC[:, -1] + stages - 1",
        new="leaving = entered_MC[:, -1] + stages",
        mistake="microbatches are taken off the last stage one tick late",
        first_tests=("tests/models/test_pipeline_stages.py",),
    ),
    Mutation(
        path="scalejax/config/pipeline_schedule.py",
        old="return min(self.microbatches, self.stages * times)",
        new="return max(self.microbatches, self.stages * times)",
        mistake="1F1B keeps every microbatch under way",
        first_tests=("tests/config/test_parallelism.py",),
    ),
    Mutation(
        path="scalejax/simulator/transforms/pipeline.py",
        old="part = Fraction(layers, own * pipeline.chunks)",
        new="part = Fraction(layers, own)",
        mistake="interleaving does not shorten the bubble",
        first_tests=("tests/simulator/test_pipeline_transform.py",),
    ),
    Mutation(
        path="scalejax/config/pipeline_schedule.py",
        old="compute(stages + back + 2 * index, stage, backward)",
        new="compute(stages + back + 2 * index + 2, stage, backward)",
        mistake="a stage of 1F1B holds one microbatch more than it must",
        first_tests=("tests/config/test_pipeline_schedule.py",),
    ),
    Mutation(
        path="scalejax/simulator/transforms/pipeline.py",
        old="gate: (sum(shares[gate] for shares in own) - share) / ticks.idle",
        new="gate: sum(shares[gate] for shares in own) / ticks.idle",
        mistake="the last stage waits for logits of the others too",
        first_tests=("tests/simulator/test_pipeline_transform.py",),
    ),
    # --- collectives ---
    Mutation(
        path="scalejax/simulator/collectives/alpha_beta.py",
        old="return transfer_seconds + 2 * math.sqrt(transfer_seconds * ramp_seconds)",
        new="return transfer_seconds + math.sqrt(transfer_seconds * ramp_seconds)",
        mistake="a pipeline of chunks fills in half the time",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/alpha_beta.py",
        old="transfer = (n - 1) / route.narrowest_bytes_per_second",
        new="transfer = n / route.narrowest_bytes_per_second",
        mistake="a ring sends n messages in place of n - 1",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/alpha_beta.py",
        old="hops = passes * (n - 1) - network_hops",
        new="hops = passes * (n - 1)",
        mistake="messages between nodes are charged a hop on the links too",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/all_reduce.py",
        old="network_hops=2 * math.ceil(math.log2(route.nodes)),",
        new="network_hops=2 * math.floor(math.log2(route.nodes)),",
        mistake="a tree over three nodes is as deep as over two",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/all_reduce.py",
        old="payloads = 1 if route.nodes == 2 else 2",
        new="payloads = 1",
        mistake="an inner node of a tree passes one payload on, not two",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/point_to_point.py",
        old="between = g * (n - g) / n * payload_bytes / route.network_bytes_per_second",
        new="between = (n - g) / n * payload_bytes / route.network_bytes_per_second",
        mistake="members of a node do not share its network in an all-to-all",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/route.py",
        old="rate = of_node * network.attainable_fraction / groups_at_once",
        new="rate = of_node * network.attainable_fraction",
        mistake="groups that run at once do not share the cards of a node",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/route.py",
        old="nodes > network.nodes_per_switch:",
        new="nodes >= network.nodes_per_switch:",
        mistake="a group that fills one switch pays for the oversubscribed ones above",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/nvlink_mesh.py",
        old="for a, b in pairwise([*ring, ring[0]]))",
        new="for a, b in pairwise(ring))",
        mistake="a ring of wires need not close",
        first_tests=("tests/simulator/test_nvlink_mesh.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/measured.py",
        old="return math.exp(y0 + x - x0)",
        new="return math.exp(y0)",
        mistake="beyond the largest measured payload time no longer grows",
        first_tests=("tests/simulator/test_collectives_measured.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/placement.py",
        old="seconds += (collective.buffer_count - 1) * _seconds(collective, 0, cluster)",
        new="seconds += collective.buffer_count * _seconds(collective, 0, cluster)",
        mistake="the first of several buffers pays its latency twice",
        first_tests=("tests/simulator/test_cost.py",),
    ),
    Mutation(
        path="scalejax/simulator/collectives/placement.py",
        old="places = max(per_node.values(), key=len)",
        new="places = min(per_node.values(), key=len)",
        mistake="a group is taken to sit as in the node with fewest of it",
        first_tests=("tests/simulator/test_collectives.py",),
    ),
    # --- timeline and streams ---
    Mutation(
        path="scalejax/simulator/timeline/streams.py",
        old="begin = self.now if self.now > idle_from else idle_from",
        new="begin = self.now",
        mistake="collectives on the same wires do not queue",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/streams.py",
        old="elapsed, left = elapsed + beside, left - speed * beside",
        new="elapsed = elapsed + beside",
        mistake="what compute did beside a collective is done again",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/streams.py",
        old="elif each.fraction > slow:",
        new="if each.fraction > slow:",
        mistake="a collective that waits for its wires slows compute",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/streams.py",
        old="each.begin = self._beside_send(each.begin, seconds)",
        new="each.begin += 0.0",
        mistake="what waits behind a collective that a send delays slows compute too early",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/streams.py",
        old="rest = loop.trip_count - done  #",
        new="rest = loop.trip_count - done - 1  #",
        mistake="a loop that has settled loses its last iteration",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/timeline.py",
        old="return max(0.0, self.dispatch_seconds + waited_seconds - busy_seconds)",
        new="return self.dispatch_seconds",
        mistake="a host that is ahead of its devices is waited for",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    Mutation(
        path="scalejax/simulator/timeline/timeline.py",
        old="np.where(times.is_compute_bound, scales.compute, scales.memory)",
        new="np.where(times.is_compute_bound, scales.memory, scales.compute)",
        mistake="what-ifs of compute and of memory are swapped",
        first_tests=("tests/simulator/test_uncertainty.py", "tests/simulator/test_what_if.py"),
    ),
    Mutation(
        path="scalejax/simulator/timeline/schedule.py",
        old="self._compute_loop(item, runs, times * loop.trip_count, events)",
        new="self._compute_loop(item, runs, times, events)",
        mistake="an inner loop forgets how often the outer one runs",
        first_tests=("tests/simulator/test_timeline.py",),
    ),
    # --- operations, memory, uncertainty, runs ---
    Mutation(
        path="scalejax/simulator/operations/matmul.py",
        old="form = attainable.matmul_ramp_seconds + max(compute, memory)",
        new="form = attainable.matmul_ramp_seconds + compute + memory",
        mistake="arithmetic and traffic of a product do not overlap",
        first_tests=("tests/simulator/test_cost.py", "tests/simulator/test_matmul.py"),
    ),
    Mutation(
        path="scalejax/simulator/operations/convolution.py",
        old="return groups, rows, inputs, outputs * window",
        new="return groups, rows, outputs, inputs * window",
        mistake="an input gradient costs as the forward pass",
        first_tests=("tests/simulator/test_convolution.py",),
    ),
    Mutation(
        path="scalejax/simulator/program.py",
        old="held = self.argument_bytes + self.output_bytes - self.alias_bytes",
        new="held = self.argument_bytes + self.output_bytes",
        mistake="donated buffers are counted twice",
        first_tests=("tests/simulator/test_cost.py", "tests/simulator/test_predict.py"),
    ),
    Mutation(
        path="scalejax/simulator/memory.py",
        old="peak_bytes=peak_bytes + chip.runtime_reserve_bytes,",
        new="peak_bytes=peak_bytes,",
        mistake="the runtime's own memory is forgotten",
        first_tests=("tests/simulator/test_cost.py",),
    ),
    Mutation(
        path="scalejax/config/pipeline_schedule.py",
        old="times = 1 + self.idle / (self.stages * self.chunks) if self.chunks > 1 else 1",
        new="times = 1 + self.idle / self.stages if self.chunks > 1 else 1",
        mistake="interleaved stages hold as much whatever their chunks",
        first_tests=("tests/config/test_parallelism.py",),
        words="stage_holds",
    ),
    Mutation(
        path="scalejax/simulator/uncertainty.py",
        old="return math.hypot(*changes)",
        new="return sum(changes)",
        mistake="independent deviations are added, not in quadrature",
        first_tests=("tests/simulator/test_uncertainty.py",),
    ),
    Mutation(
        path="scalejax/simulator/uncertainty.py",
        old="p10_seconds=median * math.exp(-shift(-1)),",
        new="p10_seconds=median * math.exp(-shift(+1)),",
        mistake="the lower end of the band mirrors the upper one",
        first_tests=("tests/simulator/test_uncertainty.py",),
    ),
    Mutation(
        path="scalejax/simulator/reliability.py",
        old="return (run_mtbf_seconds + down_seconds) * math.exp(restart) * math.expm1(attempt)",
        new="return (run_mtbf_seconds + down_seconds) * math.expm1(attempt)",
        mistake="failures during a restart are forgotten",
        first_tests=("tests/simulator/test_site_effects.py",),
    ),
    Mutation(
        path="scalejax/simulator/site_effects.py",
        old="held = 1 + np.count_nonzero(np.diff(of_nodes, axis=1), axis=1).max()",
        new="held = 1 + np.count_nonzero(np.diff(of_nodes, axis=1), axis=1).min()",
        mistake="input is that of the node that delivers least",
        first_tests=("tests/simulator/test_site_effects.py",),
    ),
    # --- compiled programs ---
    Mutation(
        path="scalejax/xla/replica_groups.py",
        old="for axis in reversed(order):",
        new="for axis in order:",
        mistake="transposed replica groups are counted from the wrong end",
        first_tests=("tests/xla/test_replica_groups.py",),
    ),
    Mutation(
        path="scalejax/xla/replica_groups.py",
        old="strides[name] * size // (int(before) * int(part))",
        new="strides[name] * size // int(part)",
        mistake="a part of a mesh axis forgets the parts before it",
        first_tests=("tests/xla/test_replica_groups.py",),
    ),
    Mutation(
        path="scalejax/xla/reader.py",
        old="return max(0, end - start)",
        new="return max(0, end - start + 1)",
        mistake="a loop read from its condition runs once more",
        first_tests=("tests/xla/test_tpu_text.py",),
    ),
    Mutation(
        path="scalejax/xla/flop.py",
        old='n = _rest(rhs, dimensions["rhs_batch"] + dimensions["rhs_contracting"])',
        new='n = _rest(rhs, dimensions["rhs_contracting"])',
        mistake="FLOP of a batched product count the batch twice",
        first_tests=("tests/xla/test_flop.py",),
    ),
    Mutation(
        path="scalejax/xla/flop.py",
        old="remainders[(self.padding - output * self.stride) % self.holes]",
        new="remainders[(self.padding + output * self.stride) % self.holes]",
        mistake="holes of a dilated convolution are counted on the wrong side",
        first_tests=("tests/xla/test_flop.py",),
    ),
    Mutation(
        path="scalejax/xla/reader.py",
        old='gathered = sent * group.size if name == "all_gather" else sent',
        new="gathered = sent",
        mistake="an all-gather is charged for one member's part",
        first_tests=("tests/xla/test_reader.py",),
    ),
    Mutation(
        path="scalejax/xla/bytes.py",
        old="return [min(sizes[0], need), *sizes[1:]]",
        new="return sizes",
        mistake="a slice reads the whole stack",
        first_tests=("tests/xla/test_bytes.py",),
    ),
    # --- checkpoints, order of samples, images ---
    Mutation(
        path="scalejax/training/checkpoint.py",
        old="kept = set(steps[-self._keep :])",
        new="kept = set(steps[: self._keep])",
        mistake="the first checkpoints are kept, not the latest",
        first_tests=("tests/training/test_checkpoint.py",),
    ),
    Mutation(
        path="scalejax/training/checkpoint.py",
        old="kept.add(max(rated, key=rated.__getitem__))",
        new="kept.add(min(rated, key=rated.__getitem__))",
        mistake="the worst checkpoint is kept in place of the best",
        first_tests=("tests/training/test_checkpoint.py",),
    ),
    Mutation(
        path="scalejax/training/loop.py",
        old="start_step=self._step,",
        new="start_step=phase.first_step,",
        mistake="a resumed run sees samples again that it has seen",
        first_tests=("tests/training/test_batch_ramp.py", "tests/training/test_resume.py"),
        words="killed",
    ),
    Mutation(
        path="scalejax/data/loader/loader.py",
        old="_batches(order, source, shapes, start_step - first_step, how, skipped, workers)",
        new="_batches(order, source, shapes, start_step, how, skipped, workers)",
        mistake="batches of a later phase begin too far into it",
        first_tests=("tests/training/test_batch_ramp.py",),
    ),
    Mutation(
        path="scalejax/data/loader/sampler.py",
        old="epoch, first = self._first_epoch + past, position * self._global_batch",
        new="epoch, first = self._first_epoch, position * self._global_batch",
        mistake="every epoch has the order of the first",
        first_tests=("tests/data/test_datasets.py",),
    ),
    Mutation(
        path="scalejax/data/loader/sampler.py",
        old="weights = np.arange(first, end) < len(shuffled)",
        new="weights = np.arange(first, end) <= len(shuffled)",
        mistake="the first row that fills an epoch up counts",
        first_tests=("tests/data/test_skip_unreadable.py",),
    ),
    Mutation(
        path="scalejax/data/transforms/augmentation.py",
        old="left = int(across * (width - box_width + 1))",
        new="left = int(across * (width - box_width))",
        mistake="a random crop never reaches the last column",
        first_tests=("tests/data/test_augmentation.py",),
        words="crop",
    ),
    Mutation(
        path="scalejax/data/transforms/pixels.py",
        old="starts[:, None] + lengths[:, None] * steps - 0.5, 0, size - 1)",
        new="starts[:, None] + lengths[:, None] * steps, 0, size - 1)",
        mistake="scaled crops are half a pixel off",
        first_tests=("tests/data/test_augmentation.py",),
    ),
    Mutation(
        path="scalejax/data/readers/parquet.py",
        old='int(np.searchsorted(self._ends, index, side="right"))',
        new='int(np.searchsorted(self._ends, index, side="left"))',
        mistake="the first row of a row group is named as one beyond the group before",
        first_tests=("tests/data/test_parquet_files.py", "tests/data/test_parquet_reading.py"),
        words="named",
    ),
    Mutation(
        path="scalejax/data/formats/petastorm.py",
        old="places = epoch * taken + np.arange(taken)",
        new="places = epoch * steps + np.arange(taken)",
        mistake="readers of Petastorm go on from where one row per step would end",
        first_tests=("tests/data/test_petastorm.py",),
    ),
    # --- gradient compression, emulation ---
    Mutation(
        path="scalejax/training/gradient_sync/adasum.py",
        old="1 - product / (2 * jnp.where(is_zero, 1.0, squared_norm))",
        new="1 - product / jnp.where(is_zero, 1.0, squared_norm)",
        mistake="Adasum takes off the whole of what gradients share",
        first_tests=("tests/training/test_gradient_sync.py",),
        words="adasum_adds",
    ),
    Mutation(
        path="scalejax/training/gradient_sync/top_k.py",
        old="lax.top_k(jnp.abs(layer), ",
        new="lax.top_k(layer, ",
        mistake="large negative entries are never sent",
        first_tests=("tests/training/test_gradient_sync.py",),
        words="definition and top_k",
    ),
    Mutation(
        path="scalejax/training/gradient_sync/method.py",
        old="whole = jax.tree.map(jnp.add, ",
        new="whole = jax.tree.map(jnp.subtract, ",
        mistake="error feedback takes off what it kept back",
        first_tests=("tests/training/test_gradient_sync.py",),
        words="definition and top_k",
    ),
    Mutation(
        path="scalejax/emulation/algorithms/easgd.py",
        old="params = instructions.combine_shards((1.0, -1.0), (params, difference))",
        new="params = instructions.combine_shards((1.0, 1.0), (params, difference))",
        mistake="elastic averaging pushes workers away from the centre",
        first_tests=("tests/emulation/test_easgd.py",),
    ),
    Mutation(
        path="scalejax/emulation/algorithms/local_sgd.py",
        old="pull = rate * (1 + momentum)",
        new="pull = rate",
        mistake="the outer step has no Nesterov look-ahead",
        first_tests=("tests/emulation/test_emulation_local_sgd.py",),
    ),
    Mutation(
        path="scalejax/emulation/algorithms/stale_synchronous.py",
        old="while self._sent[worker] - min(self._clocks) > self._bound:",
        new="while self._sent[worker] - min(self._clocks) >= self._bound:",
        mistake="workers may get one clock less ahead",
        first_tests=("tests/emulation/test_stale_synchronous.py",),
    ),
    Mutation(
        path="scalejax/emulation/virtual_cluster.py",
        old="begin = max(now, self._free_at)",
        new="begin = now",
        mistake="what shares a wire does not wait for each other",
        first_tests=("tests/emulation/test_emulation_queues.py",),
    ),
    Mutation(
        path="scalejax/emulation/virtual_cluster.py",
        old="np.exp(sigma * generator.standard_normal() - sigma**2 / 2)",
        new="np.exp(sigma * generator.standard_normal())",
        mistake="lognormal times have the mean as their median",
        first_tests=("tests/emulation/test_emulation_timing.py",),
        words="times_of_gradients",
    ),
    Mutation(
        path="scalejax/emulation/sampler.py",
        old="epoch, place = divmod(rows.index, own // size)",
        new="epoch, place = divmod(rows.index, len(self._source) // size)",
        mistake="a worker's epoch is as long as that of all",
        first_tests=("tests/emulation/test_emulation_sampler.py",),
    ),
    # --- convergence and plans ---
    Mutation(
        path="scalejax/planning/convergence/hyperbola.py",
        old="return self.reference_batch * (1 - share) / share if share",
        new="return self.reference_batch * share / (1 - share) if share",
        mistake="the critical batch is inverted about the reference batch",
        first_tests=("tests/planning/test_convergence.py",),
    ),
    Mutation(
        path="scalejax/planning/convergence/hyperbola.py",
        old="between_runs = self.run_deviation**2 / run_count",
        new="between_runs = self.run_deviation**2",
        mistake="the mean of many runs is as uncertain as one run",
        first_tests=("tests/planning/test_convergence.py",),
    ),
    Mutation(
        path="experiments/convergence_fit/limits.py",
        old="math.hypot((1 - part) * good.standard_error, part * bad.standard_error)",
        new="math.hypot(part * good.standard_error, (1 - part) * bad.standard_error)",
        mistake="errors of the two trials about a limit are swapped",
        first_tests=("tests/planning/test_convergence.py",),
    ),
    Mutation(
        path="scalejax/planning/time_to_target/plan.py",
        old="run_seconds = needed * prediction.step_seconds / (prediction.goodput or 1.0)",
        new="run_seconds = needed * prediction.step_seconds * (prediction.goodput or 1.0)",
        mistake="failures make a run shorter",
        first_tests=("tests/planning/test_time_to_target.py",),
    ),
    Mutation(
        path="scalejax/planning/time_to_target/plan.py",
        old="return max(late, dear)",
        new="return min(late, dear)",
        mistake="a plan need meet its deadline or its budget, not both",
        first_tests=("tests/planning/test_time_to_target.py",),
    ),
)
"""The mistakes, by the part of the core that they are in; the command counts them from 1."""


def inapplicable(root: Path) -> list[str]:
    """Why the table does not fit the files under `root`, a sentence for each mutation that does
    not; empty if all do."""
    problems = []
    for number, mutation in enumerate(MUTATIONS, 1):
        path = root / mutation.path
        count = path.read_text().count(mutation.old) if path.is_file() else None
        name = f"Mutation {number} ({mutation.mistake})"
        if count is None:
            problems.append(f"{name}: there is no {mutation.path}.")
        elif count != 1:
            problems.append(f"{name}: {mutation.path} holds {mutation.old!r} {count} times.")
        if mutation.old == mutation.new:
            problems.append(f"{name} changes nothing.")
        missing = [test for test in mutation.first_tests if not (root / test).is_file()]
        problems += [f"{name}: there is no {test}." for test in missing]
    return problems


# --- running tests in a copy ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of pytest."""

    code: int | None
    """Its exit status; None where it was cut off."""
    failed: str
    """First test that failed; empty if none did."""
    seconds: float
    output: str


class Stopped(Exception):
    """The command is being ended."""


class Processes:
    """The pytest processes under way, which can all be ended at once."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, arguments: Sequence[str], copy: "Copy", limit_seconds: float) -> _Run:
        """Run pytest in `copy`, for so long at most.

        Raises:
            Stopped: if `stop` is called meanwhile.
        """
        copy.temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy.root),
            "TMPDIR": str(copy.temporary),
            _TOKEN: f"{self._token}-{copy.root.name}",
        }
        begin, code = time.perf_counter(), None
        with (copy.temporary / "output").open("w+b") as output:
            with self._lock:
                if self._is_stopped:
                    raise Stopped
                process = subprocess.Popen(
                    [*_PYTEST, *arguments],
                    cwd=copy.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_seconds)
            finally:
                self._end(process, environment[_TOKEN])
            output.seek(0)
            text = output.read().decode(errors="replace")
        shutil.rmtree(copy.temporary, ignore_errors=True)
        if self._is_stopped:
            raise Stopped
        found = _FAILED.search(text)
        seconds = time.perf_counter() - begin
        return _Run(code=code, failed=found[1] if found else "", seconds=seconds, output=text)

    def stop(self) -> None:
        """End all that runs; nothing is started any more."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            _interrupt(process)
            process.kill()

    def _end(self, process: subprocess.Popen[bytes], token: str) -> None:
        """End a pytest that still runs, and whatever its tests have left running."""
        _interrupt(process)
        process.kill()
        process.wait()
        for number in _started_with(token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        with self._lock:
            self._running.discard(process)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send what Ctrl-C sends, so that fixtures clean up; give it some time."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)


def _started_with(token: str) -> list[int]:
    """Processes whose environment holds `token`: those that a run of pytest began, wherever they
    belong now. None where there is no /proc."""
    found = []
    wanted = f"{_TOKEN}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@dataclass(frozen=True, slots=True)
class Copy:
    """The tracked files of the checkout as they are now, in a folder of their own."""

    root: Path
    """Its folder."""

    @property
    def temporary(self) -> Path:
        """Where its tests put their own files."""
        return self.root.parent / f"{self.root.name}t"

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The copy with that mistake in it."""
        path = self.root / mutation.path
        right = path.read_text()
        self._write(path, right.replace(mutation.old, mutation.new))
        try:
            yield
        finally:
            self._write(path, right)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        # Python tells sources apart by their size and second: what it compiled must go.
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def copied(source: Path, target: Path) -> Copy:
    """A copy of all files that Git tracks under `source`, as they are in the working tree.

    Raises:
        subprocess.CalledProcessError: if `source` is no checkout.
    """
    command = ["git", "-C", str(source), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    for name in listed.split("\0"):
        if name and (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)
    return Copy(target)


# --- one mutation ---


class Inconclusive(Exception):
    """Pytest could not say whether tests pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiner:
    """Puts mutations to the tests."""

    processes: Processes
    limit_seconds: float
    """Of each run of pytest."""
    has_whole_suite: bool
    """Whether what survives its first tests is put to the whole suite."""

    def examine(self, mutation: Mutation, copy: Copy) -> Result:
        """What becomes of `mutation`.

        Raises:
            Inconclusive: if pytest could not run its tests.
            Stopped: if the command is being ended.
        """
        with copy.mutated(mutation):
            run = self._run(mutation.first_arguments, copy)
            seconds, is_whole_suite = run.seconds, False
            if run.code == _TESTS_PASSED and self.has_whole_suite:
                run, is_whole_suite = self._run((), copy), True
                seconds += run.seconds
        outcome: Outcome = "caught"
        if run.code == _TESTS_PASSED or (run.code is None and is_whole_suite):
            outcome = "survived"  # a suite that was cut off has shown nothing
        elif not self._passes_without(mutation, run, copy):
            outcome = "unproven"
        elif run.code is None:
            outcome = "timed out"
        return Result(
            key=mutation.key,
            path=mutation.path,
            mistake=mutation.mistake,
            outcome=outcome,
            by=run.failed,
            is_whole_suite=is_whole_suite,
            seconds=round(seconds, 1),
        )

    def _passes_without(self, mutation: Mutation, failed: _Run, copy: Copy) -> bool:
        """Whether what failed, or did not end, passes in the copy as it is."""
        if failed.code is None or not failed.failed:
            return self._run(mutation.first_arguments, copy).code == _TESTS_PASSED
        again = self.processes.run((failed.failed,), copy, self.limit_seconds)
        if again.code == _USAGE_ERROR:  # a name that the command line cannot say
            again = self._run((failed.failed.partition("::")[0],), copy)
        return again.code == _TESTS_PASSED

    def _run(self, arguments: Sequence[str], copy: Copy) -> _Run:
        run = self.processes.run(arguments, copy, self.limit_seconds)
        if run.code not in (_TESTS_PASSED, _TESTS_FAILED, _INTERRUPTED, None):
            last = "\n".join(run.output.strip().splitlines()[-5:])
            raise Inconclusive(f"pytest {' '.join(arguments)} exited with {run.code}:\n{last}")
        return run


# --- the command ---


class ProgressLine:
    """A line at the bottom of a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._begin = time.monotonic()

    def show(self, done: int, total: int, running: Sequence[int]) -> None:
        """Say how far it is."""
        if self._is_shown:
            numbers = ", ".join(map(str, running))
            seconds = time.monotonic() - self._begin
            text = f"{done} of {total} done, running {numbers}, {seconds:.0f} s"
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Make room for a line above it."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def in_words(number: int, result: Result) -> str:
    """The line of a result."""
    by = result.by if result.outcome == "caught" else ""
    how = {
        "caught": f"caught by {by}",
        "timed out": "caught by time-out",
        "survived": "SURVIVED",
        "unproven": f"UNPROVEN, for {result.by or 'its tests'} would not pass without it either",
    }[result.outcome]
    if result.is_whole_suite:
        how += " (whole suite)"
    return f"{number:3d}  {how}  {result.seconds:.1f} s  [{result.path}: {result.mistake}]"


def answered(path: Path | None, *, has_whole_suite: bool) -> dict[str, Result]:
    """The results that `path` holds, by the keys of their mutations: the last of each; without
    those that survived where the whole suite is yet to run.

    Raises:
        ValueError: if a line of it is none.
    """
    if path is None or not path.exists():
        return {}
    results = map(Result.from_line, path.read_text().splitlines())
    return {
        result.key: result
        for result in results
        if result.is_caught or result.is_whole_suite or not has_whole_suite
    }


def examine_all(
    chosen: Sequence[int],
    examiner: Examiner,
    jobs: int,
    tell: Callable[[int, Result], None],
    line: ProgressLine,
) -> None:
    """Put the mutations of those numbers to the tests, `jobs` at a time, each in a copy.

    Raises:
        Inconclusive: if pytest could not run the tests of one.
    """
    running: list[int] = []
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def examine(number: int) -> tuple[int, Result]:
        copy = copies.get()
        running.append(number)
        try:
            return number, examiner.examine(MUTATIONS[number - 1], copy)
        finally:
            running.remove(number)
            copies.put(copy)

    with (
        tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        try:
            for job in range(jobs):
                copies.put(copied(ROOT, Path(folder) / str(job)))
            waiting: set[Future[tuple[int, Result]]] = {
                pool.submit(examine, number) for number in chosen
            }
            while waiting:
                done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    line.clear()
                    tell(*future.result())
                line.show(len(chosen) - len(waiting), len(chosen), running)
            line.clear()
        except BaseException:
            line.clear()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is to come between
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            examiner.processes.stop()
            pool.shutdown(cancel_futures=True)
            raise


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= len(MUTATIONS) for number in numbers):
        raise argparse.ArgumentTypeError(f"numbers are 1 to {len(MUTATIONS)}")
    return numbers


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the table, and run nothing")
    parser.add_argument("--only", type=_numbers, metavar="3,7,12", help="these mutations alone")
    parser.add_argument(
        "--no-whole-suite", action="store_true", help="do not run it for what survives"
    )
    parser.add_argument(
        "--seconds-limit",
        type=float,
        default=900.0,
        metavar="N",
        help="time for each run of pytest (default: 900); first tests that do not end count as "
        "caught by time-out, a whole suite that does not as survived",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="JSON lines; a rerun skips what it answers"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parsed(arguments)
    chosen: list[int] = options.only or list(range(1, len(MUTATIONS) + 1))
    if problems := inapplicable(ROOT):
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    if options.list:
        for number in chosen:
            mutation = MUTATIONS[number - 1]
            print(f"{number:3d}  {mutation.path}: {mutation.mistake}")
        return 0
    has_whole_suite = not options.no_whole_suite
    try:
        known = answered(options.results, has_whole_suite=has_whole_suite)
    except ValueError as error:
        print(f"{options.results}: {error}", file=sys.stderr)
        return 2
    results = {
        number: known[MUTATIONS[number - 1].key]
        for number in chosen
        if MUTATIONS[number - 1].key in known
    }
    for number, result in results.items():
        print(in_words(number, result), "(known)")

    def tell(number: int, result: Result) -> None:
        results[number] = result
        print(in_words(number, result), flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(result.to_line() + "\n")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # A shell has what it runs in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    examiner = Examiner(
        processes=Processes(), limit_seconds=options.seconds_limit, has_whole_suite=has_whole_suite
    )
    left = [number for number in chosen if number not in results]
    try:
        examine_all(left, examiner, max(1, options.jobs), tell, ProgressLine())
    except KeyboardInterrupt:
        print(f"interrupted; {len(results)} of {len(chosen)} are known", file=sys.stderr)
        return 130
    except Inconclusive as error:
        print(error, file=sys.stderr)
        return 2
    return summarise(results)


def summarise(results: dict[int, Result]) -> int:
    """Print how many were caught; returns the exit code."""
    caught = sum(result.is_caught for result in results.values())
    by_time_out = sum(result.outcome == "timed out" for result in results.values())
    print(f"{caught} of {len(results)} caught", end="")
    print(f", {by_time_out} of them by time-out" if by_time_out else "")
    least, of = LEAST_CAUGHT
    return int(caught * of < least * len(results))


if __name__ == "__main__":
    sys.exit(main())
