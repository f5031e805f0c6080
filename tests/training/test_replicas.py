"""Replicas that differ end a run before it goes on with them, or saves them."""

import dataclasses

import jax
import numpy as np
import pytest

from scalejax import train
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError, Damaged, ExitCode
from scalejax.training import train as training
from scalejax.training.record import figures

RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 160
test_examples = 16
[batch]
global_batch = 16
[layout]
data = 4
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
[train]
epochs = 2
log_every_steps = 1
checkpoint_every_steps = 4
compare_replicas_every_steps = 3
"""


def config_of(folder, **fields):
    """The run, with fields replaced: `layout__data=2`."""
    path = folder / "run.toml"
    path.write_text(RUN)
    return load_config(path, {name.replace("__", "."): value for name, value in fields.items()})


def flipped(array, device):
    """`array` with a bit of its first number flipped in the replica of one device."""
    parts = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device.id == device:
            values.view(np.uint32).flat[0] ^= 1 << 20
        parts.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.fixture
def flip(monkeypatch):
    """Has a device flip a bit of its largest parameter in an update: `flip(step, device)`."""
    compiled = training.compile_run

    def at(step, device):
        updates = []

        def compile_run(run, mesh):
            programs = compiled(run, mesh)

            def update(state, batch):
                state, metrics = programs.update(state, batch)
                updates.append(1)
                if len(updates) == step:
                    leaves, tree = jax.tree.flatten(state.params)
                    largest = max(range(len(leaves)), key=lambda each: leaves[each].size)
                    leaves[largest] = flipped(leaves[largest], device)
                    state = dataclasses.replace(state, params=jax.tree.unflatten(tree, leaves))
                return state, metrics

            return dataclasses.replace(programs, update=update)

        monkeypatch.setattr(training, "compile_run", compile_run)

    return at


def test_a_flipped_bit_is_found_before_it_is_saved_and_the_run_goes_back(
    tmp_path, flip, monkeypatch
):
    """In update 7, of device 2 alone: told by the comparison of step 8, that of a checkpoint. What
    is resumed, without it, ends with the weights of a run that was left alone."""
    config = config_of(tmp_path)
    train(config, tmp_path / "whole", predicts=False)
    monkeypatch.undo()
    flip(step=7, device=2)

    said = r"after step 8, .* of device 2, in process 0, differs from that of device 0"
    with pytest.raises(Damaged, match=said) as told:
        train(config, tmp_path / "hit", predicts=False)

    assert told.value.exit_code == ExitCode.DAMAGED
    assert "before the checkpoint of step 4" in str(told.value)
    monkeypatch.undo()
    train(config, tmp_path / "hit", resume=True, predicts=False)
    assert figures(tmp_path / "hit") == figures(tmp_path / "whole")


def test_a_checkpoint_before_which_nothing_was_compared_is_not_said_to_agree(tmp_path, flip):
    """A run goes on from one of a session without comparisons; the message says its step alone."""
    off = {"train__compare_replicas_every_steps": None, "train__checkpoint_every_steps": 10}
    one = config_of(tmp_path, **off, train__epochs=1)
    train(one, tmp_path / "run", predicts=False)
    flip(step=2, device=2)

    on = config_of(tmp_path, train__checkpoint_every_steps=10)
    with pytest.raises(Damaged, match=r"the newest checkpoint is of step 10\.$"):
        train(on, tmp_path / "run", resume=True, predicts=False)


def test_without_a_majority_either_may_be_wrong(tmp_path, flip):
    """Two devices; and with nothing saved yet there is nothing to go back to."""
    flip(step=2, device=0)

    with pytest.raises(Damaged, match=r"or the other way round.*no checkpoint to go back to"):
        train(config_of(tmp_path, layout__data=2), tmp_path / "run", predicts=False)


def test_what_lies_on_one_device_has_nothing_to_differ_from(tmp_path, flip):
    """Parameters over fsdp: the field's description says so."""
    flip(step=2, device=2)

    record = train(
        config_of(tmp_path, layout__data=1, layout__fsdp=4), tmp_path / "run", predicts=False
    )

    assert record.status == "completed"


def test_steps_between_comparisons_are_counted(tmp_path):
    """From 1."""
    with pytest.raises(ConfigError, match="compare_replicas_every_steps=0 is refused"):
        config_of(tmp_path, train__compare_replicas_every_steps=0)
