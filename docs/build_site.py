"""Builds the site: pages of `docs/pages`, pages made from the code, and notebooks, strictly.

    python docs/build_site.py SITE

Commands in blocks "console" are run, and their output is put below them; a line `::: module:name`
becomes the docstring of that function, `::: README.md | head |` a table of the README. Notebooks of
`docs/notebooks` are tutorials. The site opens from files; a page that asks for anything elsewhere
or for a file that is not there, and any warning, ends the build with code 1.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import reference_pages

DOCS = Path(__file__).resolve().parent
_FIRST = ("first_prediction", "bring_your_own_step", "warmup_in_ten_minutes", "which_cluster")
"""Notebooks in the order of the navigation; others come after them."""
_ASKED_FOR = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc\s*=\s*["']?(?:https?:)?//[^"'\s>]*"""
    r"""|<link\b(?![^>]*\brel\s*=\s*["']?canonical)[^>]*\shref\s*=\s*["']?(?:https?:)?//[^"'\s>]*"""
    r"""|@import\s+["']?(?:https?:)?//[^"'\s;]*|url\(\s*["']?(?:https?:)?//[^"')]*""",
    re.IGNORECASE,
)
"""What a browser would fetch from elsewhere; links that a reader may follow are none."""
_LOCAL = re.compile(r"""\s(?:src|href)="(?![a-z]+:|//|#)([^"#?]+)""")
"""A file that a page asks for, or links to."""


def main(arguments: list[str]) -> int:
    """Build the site into a folder; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python docs/build_site.py SITE", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        built = build(Path(folder))
        if built:
            return built
        site = Path(folder) / "site"
        if wrong := problems(site):
            print("\n".join(wrong), file=sys.stderr)
            return 1
        shutil.copytree(site, arguments[0], dirs_exist_ok=True)
    return 0


def write_sources(folder: Path) -> None:
    """Everything that the site is made of: its pages, and its configuration with the notebooks.

    Args:
        folder: where; empty.

    Raises:
        RuntimeError: if a command on a page fails, or a docstring that one asks for is not there.
    """
    pages = folder / "pages"
    shutil.copytree(DOCS / "pages", pages)
    for path in pages.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for put in (
            reference_pages.with_output,
            reference_pages.with_docstrings,
            reference_pages.with_tables,
        ):
            text = put(text)
        path.write_text(text, encoding="utf-8")
    for uri, make in reference_pages.pages().items():
        (pages / uri).write_text(make(), encoding="utf-8")
    notebooks = sorted((DOCS / "notebooks").glob("*.ipynb"), key=_place)
    for path in notebooks:
        for uri, content in notebook_files(path).items():
            (pages / uri).write_bytes(content)
    config = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    for entry in config["nav"]:
        if "Tutorials" in entry:
            entry["Tutorials"] += [_uri(path) for path in notebooks]
    text = yaml.safe_dump(config, sort_keys=False)
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")


def build(folder: Path) -> int:
    """Make `folder/site` of what was written to `folder`; returns the exit code of the builder,
    whose words are shown if it is not 0."""
    command = (sys.executable, "-m", "zensical", "build", "--strict", "--clean")
    done = subprocess.run(
        [*command, "--config-file", str(folder / "mkdocs.yml")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode


def problems(site: Path) -> list[str]:
    """What is wrong with a site that was built, in words: what its pages and style sheets fetch
    from elsewhere, and files that they ask for and that are not there."""
    wrong = []
    for path in (path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(site)
        wrong += [f"{where} asks for {found}" for found in asked_for(text)]
        if path.suffix == ".html" and path.name != "404.html":  # of which paths begin at the root
            absent = {name for name in _LOCAL.findall(text) if not (path.parent / name).exists()}
            wrong += [f"{where} asks for {name}, which is not there" for name in sorted(absent)]
    return wrong


def asked_for(text: str) -> list[str]:
    """What a page or a style sheet makes a browser fetch from elsewhere."""
    return [found[0] for found in _ASKED_FOR.finditer(text)]


def notebook_files(path: Path) -> dict[str, bytes]:
    """A notebook as a page, and the pictures in its outputs, by path on the site.

    Its cells are shown as they were saved; nothing is run here.
    """
    parts: list[str] = []
    files: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                shown, picture = _output(output)
                if picture is not None:
                    name = f"{path.stem}-{len(files)}.png"
                    files[f"tutorials/{name}"] = picture
                    shown = f"![]({name})"
                parts.append(shown)
    where = f"{path.parent.name}/{path.name}"
    parts.append(f"This page is the notebook `docs/{where}`, with the outputs of its last run.")
    files[_uri(path)] = ("\n\n".join(part for part in parts if part) + "\n").encode()
    return files


def _output(output: dict[str, Any]) -> tuple[str, bytes | None]:
    """An output as Markdown; of a picture its bytes."""
    if output["output_type"] == "stream":
        text = "".join(output["text"])
        return (f"```text\n{text.rstrip()}\n```" if output["name"] == "stdout" else ""), None
    data = output.get("data", {})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return f'<div class="output">\n{"".join(data[kind]).strip()}\n</div>', None
    if "image/png" in data:
        return "", base64.b64decode("".join(data["image/png"]))
    if "text/markdown" in data:
        return "".join(data["text/markdown"]), None
    text = "".join(data.get("text/plain", "")).rstrip()
    return (f"```text\n{text}\n```" if text else ""), None


def _place(path: Path) -> tuple[int, str]:
    return (_FIRST.index(path.stem) if path.stem in _FIRST else len(_FIRST)), path.stem


def _uri(path: Path) -> str:
    return f"tutorials/{path.stem}.md"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
