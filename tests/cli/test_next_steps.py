"""What commands say to type next, on a terminal: it is taken, and of the step that was shown."""

import json
import re
import shlex
from pathlib import Path

import pytest
from program_cases import matmul, program_of

from scalejax.cli.main import main, parse
from scalejax.cli.predict import Explain
from scalejax.planning.run_cost import named_decoder
from scalejax.xla.job import Compiled

RUN = """
[model]
name = "mlp"
[data]
name = "fashion_mnist"
[batch]
{batch}
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
"""


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """What a command says to type next, after `scalejax`; None if nothing."""

    def words_after(*typed: str) -> list[str] | None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        assert main(typed) == 0
        said = re.search(r"^To see [^:]*:\s(scalejax .*)$", capsys.readouterr().err, re.MULTILINE)
        return shlex.split(said[1])[1:] if said else None

    return words_after


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A compiler of steps that take a millisecond for each sample of a device."""

    def compiled(jobs, on_done, on_error=None):
        for position, job in enumerate(jobs):
            milliseconds = float(job.run.split.per_device_batch)
            step = program_of(matmul("m", milliseconds), devices=job.run.layout.device_count)
            on_done(position, Compiled(program=step))

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", compiled)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("batch", ["global_batch = 64", "per_device_batch = 32"])
@pytest.mark.parametrize("layout", ["", "[layout]\ndata = 4"])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_what_explains_a_step_is_of_the_last_row(
    batch: str, layout: str, scaling: str, compiler, terminal, tmp_path: Path
):
    """Of its batch, whichever of the two the file gives, and whichever scaling keeps."""
    (tmp_path / "run.toml").write_text(RUN.format(batch=batch) + layout)
    words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "2,8"]

    suggested = terminal(*words, "--scaling", scaling, "--json", "table.json")

    assert suggested is not None
    assert main([*suggested, "--json", "row.json"]) == 0
    table, row = (json.loads((tmp_path / name).read_text()) for name in ("table.json", "row.json"))
    assert row["step_seconds"] == table["predictions"][-1]["step_seconds"]


def test_what_explains_a_step_has_the_flags_that_it_was_predicted_with(
    compiler, terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All that both commands take, but for what is written."""
    monkeypatch.setattr("scalejax.cli.predict.with_input", lambda site, path, config: site)
    monkeypatch.setattr("scalejax.cli.predict.facts_of", lambda config, *given: None)
    (tmp_path / "run.toml").write_text(RUN.format(batch="per_device_batch = 32"))
    flags = {"input_rates": "in put.toml", "facts": "facts.json", "framework": "pytorch"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    own = ["--optimizer.momentum", "0.5", "--network.bytes_per_second", "2x"]

    suggested = terminal(
        "predict", "run.toml", "--cluster", "dgx-h100", "--devices", "8", *words, *own
    )

    assert suggested is not None
    command, overrides = parse(suggested)
    assert isinstance(command, Explain)
    assert {name: str(getattr(command, name)) for name in flags} == flags
    assert overrides == {"optimizer.momentum": 0.5, "network.bytes_per_second": "2x"}


@pytest.mark.parametrize("name", ["bert", "bert-large", "moe", "vit", ""])
def test_model_whose_cost_is_suggested_has_one(name: str, terminal):
    """BERT reads text with hidden words, which cost does not know; images have no tokens."""
    suggested = terminal("models", "--grep", name)

    if suggested is not None:
        parse(suggested)
        named_decoder(suggested[1])
    else:
        assert name in {"bert", "bert-large", "vit"}
