"""The site of the documents: what it is made of, and what it may not ask for.

`.ci/run` builds it, where a warning, or a command on a page that fails, is an error.
"""

import json
from pathlib import Path

import build_site
import pytest
import reference_pages
import yaml

import scalejax
from scalejax.cli.commands import COMMANDS
from scalejax.config.reference import run_reference
from scalejax.hardware import cluster_names
from scalejax.simulator.frameworks import FRAMEWORKS

DOCS = Path(__file__).parent.parent / "docs"


def navigation(entries: object) -> list[str]:
    """The pages that a navigation leads to, in order."""
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    assert isinstance(inner, list | type({}.values()))
    return [page for entry in inner for page in navigation(entry)]


def test_navigation_leads_to_every_page():
    """Once each: what is written, and what is made from the code."""
    config = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    written = [path.relative_to(DOCS / "pages") for path in (DOCS / "pages").rglob("*.md")]

    assert sorted(navigation(config["nav"])) == sorted(
        [*(path.as_posix() for path in written), *reference_pages.pages()]
    )


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("reference/commands.md", [f"## scalejax {name}\n" for name in COMMANDS]),
        (
            "reference/run-file.md",
            [
                f"`{each.name}`"
                for table in run_reference()
                for each in table.fields
                if each.accepted
            ],
        ),
        ("reference/python.md", [f"## {name}\n" for name in scalejax.__all__]),
        ("reference/clusters.md", [f"## {name}\n" for name in cluster_names()]),
        ("reference/frameworks.md", [f"## {name}\n" for name in FRAMEWORKS]),
    ],
)
def test_reference_has_all_that_there_is(page: str, names: list[str]):
    """It is made from the code, so that nothing is forgotten."""
    text = reference_pages.pages()[page]()

    assert [name for name in names if name not in text] == []


def test_flags_are_those_that_are_typed():
    """With what they take and their default: as `scalejax predict --help` has them."""
    (section,) = (
        part
        for part in reference_pages.commands_page().split("\n## ")
        if part.startswith("scalejax predict\n")
    )

    assert "| `--scaling` | weak, strong | `weak` |" in section
    assert "| `--cluster` | A,B,... | required |" in section
    assert "| `RUN.toml` |" in section


def test_command_of_a_page_is_run():
    """Its output is put below it, without the spaces that end lines of a table."""
    shown = reference_pages.with_output("A.\n\n```console\n$ scalejax models --grep bloom\n```\n")

    assert shown.startswith("A.\n\n```console\n$ scalejax models --grep bloom\nmodel ")
    assert "bloom-176b" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_command_of_a_page_that_fails_is_told():
    """A page with an error on it is never built."""
    with pytest.raises(RuntimeError, match=r"ended with exit code 2.*nonsense"):
        reference_pages.with_output("```console\n$ scalejax hardware nonsense\n```\n")


def test_equations_are_read_off_the_code():
    """With their source; what is not there is refused."""
    text = reference_pages.with_docstrings("::: scalejax.core.metrics:mfu")

    assert "mfu = model_flop / (step_seconds * device_count * peak_flop_per_second)" in text
    assert "arXiv 2204.02311" in text
    with pytest.raises(RuntimeError, match="there is none"):
        reference_pages.with_docstrings("::: scalejax.core.metrics:nothing")


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/iframe-worker/shim">',
        '<link href="https://fonts.gstatic.com" rel="preconnect">',
        "<img alt=x src=//example.org/a.png>",
        "@import 'https://example.org/a.css'",
        "a { background: url(https://example.org/a.png) }",
    ],
)
def test_page_that_asks_for_something_elsewhere_is_refused(text: str, tmp_path: Path):
    """It would not work without a network."""
    (tmp_path / "page.html").write_text(text)

    (problem,) = build_site.problems(tmp_path)

    assert problem.startswith("page.html asks for ")


def test_page_may_link_elsewhere_but_not_to_nothing(tmp_path: Path):
    """A reader may follow a link; a file that is not there is a mistake."""
    (tmp_path / "page.html").write_text(
        '<a href="https://arxiv.org/abs/1706.02677">paper</a> <a href="page.html#here">here</a>'
        '<img src="absent.png">'
    )

    assert build_site.problems(tmp_path) == ["page.html asks for absent.png, which is not there"]


def test_notebook_becomes_a_page(tmp_path: Path):
    """Cells as they were saved: text, code, what it printed, tables, pictures."""
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["2\n"]},
        {"output_type": "stream", "name": "stderr", "text": ["noise\n"]},
        {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>"], "text/plain": ["x"]}},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["y"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Words."]},
        {"cell_type": "code", "source": ["print(1 + 1)"], "outputs": outputs},
    ]
    path = tmp_path / "first.ipynb"
    path.write_text(json.dumps({"cells": cells}))

    files = build_site.notebook_files(path)

    assert files["tutorials/first-0.png"] == b"\0\0\0"
    page = files["tutorials/first.md"].decode()
    assert page.startswith("# Title\nWords.\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n")
    assert '<div class="output">\n<b>x</b>\n</div>\n\n![](first-0.png)\n' in page
    assert "noise" not in page
    assert "/first.ipynb`" in page
