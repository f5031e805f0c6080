"""Run files of earlier versions are read with a note, and rewritten on request."""

import tomllib
from pathlib import Path

import pytest

from scalejax.cli.main import main
from scalejax.config.grid import parse_grammar
from scalejax.config.migrate import RenamedField, current_fields, migrated, migrated_text
from scalejax.config.run import load_config, with_fields
from scalejax.core.errors import ConfigError
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import begin_sweep, plan_sweep, varied_fields

OLD = """\
# a comment that stays
model = { name = "gpt", layers = 2, hidden = 16, heads = 2, remat = "per_op" }  # beside it
[data]
name = "synthetic_tokens"
tokens = 8
vocabulary = 32
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1

  [exchange]  # of compressed gradients
name = "top_k"
fraction = 0.5
[layout]
data = 2
mode = "shard_map"
[emulation]
workers = 2
compression = { method = "two_bit", threshold = 1.0 }
timing = { gradient_seconds = 1.0, exchange_seconds = 0.5 }
[emulation.algorithm]
name = "synchronous"
exchange = "parameter_server"
"""
NEW = (
    OLD.replace('"per_op"', '"selective_op"')
    .replace("[exchange]", "[gradient_sync]")
    .replace("exchange_seconds", "collective_seconds")
    .replace("method =", "name =")
    .replace('exchange = "parameter_server"', 'gradient_sync = "parameter_server"')
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run file with every name of an earlier version."""
    path = tmp_path / "run.toml"
    path.write_text(OLD)
    return path


def test_numbers_of_other_compressions_are_left_out():
    """A table had all of them; what is written down of a run has them still."""
    both = {"threshold": 0.5, "fraction": 0.1}

    tables, _ = migrated({"emulation": {"compression": {"method": "top_k", **both}}})

    assert tables == {"emulation": {"compression": {"name": "top_k", "fraction": 0.1}}}


def test_text_is_rewritten_with_its_comments_and_order():
    """Headers, keys, inline tables and values have the names of now; all else is as it was."""
    text, renamed = migrated_text(OLD)

    assert text == NEW
    assert len(renamed) == 5
    assert migrated_text(text) == (text, ())


def test_dotted_keys_are_rewritten():
    """At the top of a file, and within a table."""
    text = 'exchange.name = "fp16"\n[emulation]\ntiming.exchange_seconds = 0.5\n'

    rewritten, _ = migrated_text(text)

    assert rewritten == (
        'gradient_sync.name = "fp16"\n[emulation]\ntiming.collective_seconds = 0.5\n'
    )


def test_what_only_looks_like_an_old_name_stays():
    """Texts and keys of other tables are no names of these fields."""
    text = '[exchange]\nname = "fp16"\n[model.options]\nexchange = "exchange = 1"\n'

    rewritten, _ = migrated_text(text)

    assert rewritten == text.replace("[exchange]", "[gradient_sync]")


def test_text_that_cannot_be_rewritten_is_refused():
    """A quoted key is left to a person."""
    with pytest.raises(ConfigError, match=r"exchange is gradient_sync now.*by hand"):
        migrated_text('"exchange" = { name = "fp16" }\n')


def test_a_field_under_both_names_is_refused():
    """Nobody can say which is meant."""
    with pytest.raises(ConfigError, match=r"exchange is refused: it is gradient_sync now"):
        migrated({"exchange": {"name": "fp16"}, "gradient_sync": {"name": "fp16"}})
    with pytest.raises(ConfigError, match=r"it is gradient_sync\.name now, which is given too"):
        current_fields({"exchange.name": "fp16", "gradient_sync.name": "fp16"})


def test_an_old_file_is_read_as_the_new_one(old: Path, tmp_path: Path):
    """With a warning that names each field and the command."""
    new = tmp_path / "new.toml"
    new.write_text(NEW)

    with pytest.warns(RenamedField, match=r"exchange is gradient_sync now.*config migrate"):
        config = load_config(old)

    assert config == load_config(new)


def test_old_names_of_replaced_fields_are_read(tmp_path: Path):
    """Those of flags, of sweeps and of Python."""
    new = tmp_path / "new.toml"
    new.write_text(NEW)

    with pytest.warns(RenamedField, match=r"exchange\.fraction is gradient_sync\.fraction now"):
        config = with_fields(load_config(new), {"exchange.fraction": 0.25, "model.remat": "per_op"})

    assert config == load_config(new, {"gradient_sync.fraction": 0.25})


def test_the_command_rewrites_a_file(old: Path, capsys: pytest.CaptureFixture[str]):
    """Once; a file without old names is left alone, and what is no TOML is refused."""
    assert main(["config", "migrate", str(old)]) == 0
    assert "exchange is gradient_sync now" in capsys.readouterr().out
    assert tomllib.loads(old.read_text()) == tomllib.loads(NEW)

    assert main(["config", "migrate", str(old)]) == 0
    assert "has no old names" in capsys.readouterr().out

    old.write_text("[exchange\n")
    assert main(["config", "migrate", str(old)]) == 2
    assert "not valid TOML" in capsys.readouterr().err


def test_a_command_notes_old_names_once(old: Path, capsys: pytest.CaptureFixture[str]):
    """On standard error, however often it reads the file."""
    assert main(["config", "show", str(old), "--exchange.fraction=0.25"]) == 0

    said = " ".join(capsys.readouterr().err.split())
    assert said.count("note: ") == 2
    assert f"`scalejax config migrate {old}` rewrites it" in said
    assert "exchange.fraction is gradient_sync.fraction now" in said


def test_fields_within_a_replaced_table_are_read(tmp_path: Path):
    """A flag that replaces a whole table may hold old names."""
    new = tmp_path / "new.toml"
    new.write_text(NEW)
    model = {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2, "remat": "per_op"}

    with pytest.warns(RenamedField, match="selective_op"):
        config = load_config(new, {"model": model})

    assert config == load_config(new)


def test_fields_of_a_sweep_are_read():
    """Variables, parameters, conditions and their values."""
    with pytest.warns(RenamedField):
        grammar = parse_grammar(
            ["exchange.error_feedback=true"],
            ["exchange.fraction=[0.1, 0.2]", 'model.remat=["none", "per_op"]'],
            ['{"condition": {"exchange.fraction": 0.1}, "parameters": {"exchange.name": "top_k"}}'],
        )

    assert grammar.parameters == {"gradient_sync.error_feedback": True}
    assert grammar.variables == {
        "gradient_sync.fraction": [0.1, 0.2],
        "model.remat": ["none", "selective_op"],
    }
    assert grammar.extensions[0].condition == {"gradient_sync.fraction": 0.1}
    assert grammar.extensions[0].parameters == {"gradient_sync.name": "top_k"}


def test_runs_of_an_old_sweep_are_told_apart(tmp_path: Path):
    """The names in its plan are of the version that wrote it."""
    new = tmp_path / "new.toml"
    new.write_text(NEW)
    configs = [load_config(new, {"gradient_sync.fraction": each}) for each in (0.1, 0.2)]

    varied = varied_fields(["exchange.fraction"], configs)

    assert varied == [{"gradient_sync.fraction": 0.1}, {"gradient_sync.fraction": 0.2}]


def test_a_sweep_goes_on_after_its_run_file_was_migrated(old: Path, tmp_path: Path):
    """It is the same sweep, whichever names its folder holds."""
    old.write_text(OLD.partition("[emulation]")[0])
    grammar = parse_grammar([], ["seed=[0, 1]"], [])
    folder = SweepFolder(path=tmp_path / "sweep")
    with pytest.warns(RenamedField):
        begin_sweep(plan_sweep(old, grammar), folder, resume=False)
    old.write_text(NEW.partition("[emulation]")[0])

    begin_sweep(plan_sweep(old, grammar), folder, resume=True)
