"""Coordinate checks: exponents by hand, networks of other sizes, and slopes of trained ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalejax.cli.main import main
from scalejax.config.model import LlamaConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.sweep.coordinates import (
    Coordinate,
    arms,
    resized,
    slopes_of,
)

RUN = """
[model]
name = "gpt"
layers = 1
hidden = 16
heads = 2
parametrization = { name = "mup", base_hidden = 16 }
[data]
name = "synthetic_tokens"
tokens = 8
vocabulary = 32
train_examples = 64
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.01
"""


def config_of(**model: Any) -> RunConfig:
    """A run of a decoder."""
    tables: dict[str, Any] = {
        "model": {"name": "llama", "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 88}
        | model,
        "data": {"name": "synthetic_tokens"},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.01},
    }
    return build(RunConfig, tables, where="run")


def coordinates(layer: str, **of: tuple[float | None, ...]) -> list[Coordinate]:
    """Those of a layer at widths of 8, 16 and 32."""
    usual = {"start": (1.0,) * 3, "end": (1.0,) * 3, "change": (1.0,) * 3}
    rows = zip((8, 16, 32), *(usual | of).values(), strict=True)
    return [
        Coordinate(
            parametrization="mup", size=size, layer=layer, start=start, end=end, change=change
        )
        for size, start, end, change in rows
    ]


def test_exponents_by_hand():
    """1, 2, 4 at 8, 16, 32 is the first power; logits may fall before the first update, as the
    root, and not change by more; what is not finite is not flat."""
    one, logits, lost = slopes_of(
        [
            *coordinates("block 1", end=(1.0, 2.0, 4.0)),
            *coordinates("logits", start=(1.0, 0.5**0.5, 0.5)),
            *coordinates("block 2", change=(1.0, None, 1.0)),
        ]
    )

    assert (one.start, one.end, one.is_flat) == (0, pytest.approx(1), False)
    assert (logits.start, logits.is_flat) == (pytest.approx(-0.5), True)
    assert (lost.change, lost.is_flat) == (None, False)
    assert not slopes_of(coordinates("logits", change=(1.0, 2.0, 4.0)))[0].is_flat
    assert not slopes_of(coordinates("logits", end=(1.0, 2.0, 4.0)))[0].is_flat


def test_all_widths_grow_together():
    """Twice as wide: twice the heads, or twice as large ones."""
    config = config_of()

    wide, large = (resized(config, "hidden", 64, kept).model for kept in ("head_size", "heads"))
    deep = resized(config, "layers", 8, "heads").model

    assert isinstance(wide, LlamaConfig)
    assert isinstance(large, LlamaConfig)
    assert (wide.hidden, wide.ffn_hidden, wide.heads, wide.kv_heads) == (64, 176, 8, 4)
    assert (large.hidden, large.ffn_hidden, large.heads, large.head_size) == (64, 176, 4, 16)
    assert (deep.layers, deep.hidden) == (8, 32)  # type: ignore[attr-defined]  a decoder
    assert [name for name, _ in arms(config)] == ["standard"]


@pytest.mark.parametrize(
    ("model", "size", "kept", "said"),
    [
        ({}, 40, "head_size", "widths=40 is refused.*kv_heads=2 it would leave kv_heads=2.5"),
        (
            {"parametrization": {"name": "mup", "base_hidden": 32}},
            64,
            "heads",
            "base_head_size=None is refused.*heads grow",
        ),
        ({"moe": {"experts": 4, "experts_per_token": 2, "expert_hidden": 8}}, 64, "heads", "dense"),
    ],
    ids=["not whole", "no base of heads", "experts"],
)
def test_impossible_checks_are_refused(model, size, kept, said):
    """Before anything is trained, with the field."""
    config = config_of(**model)
    with pytest.raises(ConfigError, match=said):
        resized(config, "hidden", size, kept)


@pytest.mark.slow
def test_activations_of_mup_are_flat_and_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Three networks are compiled and trained. At eight times the width what five steps change
    grows by more than its root without muP, and is flat with it."""
    (tmp_path / "run.toml").write_text(RUN)
    path = tmp_path / "check.json"

    of = ["study", "coordinates", str(tmp_path / "run.toml"), "--widths", "16,128", "--steps", "5"]
    main([*of, "--json", str(path), "--figure", str(tmp_path / "check.svg")])

    found = json.loads(path.read_text())
    assert found["are_flat"] == {"standard": False, "mup": True}
    standard = {
        each["layer"]: each["change"]
        for each in found["slopes"]
        if each["parametrization"] == "standard"
    }
    assert standard["block 1"] > 0.5
    assert standard["logits"] > 0.5
    shown = capsys.readouterr()
    assert "mup: flat." in shown.out
    assert shown.err.count("measuring") == 3, "the base is trained once"
    assert "mup, logits" in (tmp_path / "check.svg").read_text()
