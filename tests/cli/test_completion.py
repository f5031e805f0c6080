"""What a shell offers after a few words, by running the script in it."""

import shutil
import subprocess

import pytest

from scalejax.cli.commands import COMMANDS
from scalejax.cli.completion import script

OFFERED = """
offered() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _scalejax; echo "${COMPREPLY[@]}"; }
"""


@pytest.fixture(scope="module")
def scripts():
    """The script of each shell."""
    return {shell: script(shell, COMMANDS) for shell in ("bash", "zsh", "fish")}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("scalejax pre", "predict"),
        ("scalejax config ''", "show fields migrate"),
        ("scalejax train run.toml --fo", "--folder"),
        ("scalejax train run.toml --train.ep", "--train.epochs"),
        ("scalejax predict run.toml --cluster dgx-h", "dgx-h100 dgx-h200"),
        ("scalejax predict run.toml --framework megatron-lm", "megatron-lm-2021 megatron-lm-2022"),
        ("scalejax config show run.toml --dev", "--devices"),
        ("scalejax predict run.toml --cluster = dgx-h", "dgx-h100 dgx-h200"),
        ("scalejax plan --clusters dgx-a100,dgx-h", "dgx-a100,dgx-h100 dgx-a100,dgx-h200"),
        ("scalejax hardware dgx-h", "dgx-h100 dgx-h200"),
        ("scalejax config fields batch.glo", "batch.global_batch"),
        ("scalejax completion ''", "bash zsh fish"),
        ("scalejax launch run.toml --target ''", "processes jobset"),
        ("scalejax sweep run.toml --figure-width ''", "column page"),
        ("scalejax train ''", ""),  # files
    ],
)
def test_bash_offers(words, offered, scripts):
    """Commands, flags, fields and names; no flags where a file is due."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    text = f"{scripts['bash']}\n{OFFERED}\noffered {words}\n"
    ran = subprocess.run([bash, "-c", text], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_the_script(shell, scripts, tmp_path):
    """Without an error, where the shell is installed; every command is in it."""
    assert all(word in scripts[shell] for name in COMMANDS for word in name.split())
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell}")
    file = tmp_path / "script"
    file.write_text(scripts[shell])
    ran = subprocess.run([found, "-n", file], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
