"""Promises of the list of fields."""

import pytest

from scalejax.cli.main import main
from scalejax.config.presets import PRESETS
from scalejax.config.reference import containing, named_reference, run_reference
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import parse_toml


def test_every_field_is_listed_with_what_it_takes_and_means():
    """A field without a docstring, or a table that was forgotten, would leave a gap."""
    tables = run_reference()
    fields = {each.name: each for table in tables for each in table.fields}

    assert all(each.meaning for each in fields.values())
    assert fields["schedule.warmup"].accepted == "none | constant | gradual"
    assert fields["schedule.base_learning_rate"].default == "required"
    assert fields["layout.data"].default == "absent"
    assert fields["train.early_stopping.patience"].accepted == "int"
    assert fields["model.hidden"].name in fields
    assert fields["seed"].default == "0"


def test_defaults_are_as_toml_wants_them():
    """Not as Python writes them: True, (128, 128) and () are refused in a run.toml."""
    fields = [each for table in run_reference() for each in table.fields]
    values = [
        (each.name, parse_toml(f"value = {each.default}")["value"])
        for each in fields
        if each.accepted in ("int", "float", "true | false") or each.accepted.startswith("list of ")
        if each.default not in ("absent", "none", "required")
    ]

    assert ("model.hidden", [128, 128]) in values
    assert ("averaging.is_evaluated", True) in values
    assert ("schedule.decay_epochs", []) in values
    assert len(values) > 100


OF_TESTS = ("[data] name = stripes",)
"""What `toy_data` registers where it is imported."""


def test_every_kind_of_a_table_is_listed():
    """Every member of each union, but for those that other tests register in this process."""
    titles = [table.title for table in run_reference() if table.title not in OF_TESTS]

    assert sum(title.startswith("[model]") for title in titles) == 9
    assert sum(title.startswith("[data]") for title in titles) == 12
    assert sum(title.startswith("[optimizer]") for title in titles) == 14
    assert sum(title.startswith("[schedule]") for title in titles) == 3
    assert sum(title.startswith("[averaging]") for title in titles) == 2
    assert titles[0] == "at the top"


def test_published_names_are_listed_after_the_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Each on a line of its own, before the data; all within 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["config", "fields"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line]
    first_data = next(at for at, line in enumerate(lines) if line.startswith("[data]"))
    assert set(PRESETS) <= {line.split()[0] for line in lines[:first_data] if line}
    assert names.count("llama3-8b") == 1
    assert max(map(len, lines)) <= 80


def test_fields_are_shown_by_the_name_of_their_table_or_their_own():
    """A table with what is below it, of every kind; one field alone; the nearest of what is
    misspelt."""
    block = [each.name for table in named_reference("model.moe") for each in table.fields]
    (stages,) = [each for table in named_reference("layout.pipeline") for each in table.fields]

    assert {"model.moe.experts", "model.moe.router.balance"} <= set(block)
    assert all(name.startswith("model.moe.") for name in block)
    assert stages.name == "layout.pipeline"
    assert len(named_reference("optimizer")) == 14
    with pytest.raises(ConfigError, match=r"did you mean 'layout'"):
        named_reference("layot")
    with pytest.raises(ConfigError, match=r"did you mean 'layout\.pipeline'"):
        named_reference("layout.pipelin")


def test_fields_that_contain_a_text():
    """In name, values or meaning, whatever its case; refused where no field has it."""
    found = {each.name for table in containing(run_reference(), "ADAM") for each in table.fields}
    assert {"optimizer.epsilon", "schedule.scaling"} <= found
    assert "data.name" not in found
    with pytest.raises(ConfigError, match="no field has 'zzz'"):
        containing(run_reference(), "zzz")
