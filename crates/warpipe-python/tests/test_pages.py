"""The Python snippets of the pages: a block marked ``python`` is a program and runs as it stands; ``python,no_run`` is
checked by mypy against the package's stubs."""

import os
import re
import subprocess
import sys

import pytest
from conftest import DEVICE
from test_package import REPOSITORY

pytestmark = pytest.mark.skipif(REPOSITORY is None or DEVICE != "host", reason="the pages are not here, or ran on the host")

BLOCK = re.compile(r"^```python(?P<mark>,no_run)?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# Names of the reader's own program.
GIVEN = "batch camera handle kernel model other stream tensor".split()
PRELUDE = "from typing import Any\nimport torch, warpipe\n" + "".join(f"{name}: Any\n" for name in GIVEN)


def snippets(is_run):
    """The blocks of one kind, each with its page and number."""
    if REPOSITORY is None:
        return []
    pages = [REPOSITORY / "README.md", REPOSITORY / "crates/warpipe-python/README.md"]
    pages += sorted((REPOSITORY / "docs").rglob("*.md"))
    return [
        pytest.param(found["code"], id=f"{page.relative_to(REPOSITORY)}:{number}")
        for page in pages
        for number, found in enumerate(BLOCK.finditer(page.read_text()), 1)
        if (found["mark"] is None) == is_run
    ]


@pytest.mark.parametrize("code", snippets(is_run=True))
def test_a_program_of_a_page_runs_as_it_stands(code, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(code)
    domain = {"WARPIPE_DOMAIN": str(tmp_path / "domain")}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, env={**os.environ, **domain}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_other_snippet_agrees_with_the_stubs(tmp_path):
    pytest.importorskip("mypy")
    found = snippets(is_run=False)
    assert len(found) > 5
    files = [tmp_path / f"snippet_{number}.py" for number in range(len(found))]
    for path, snippet in zip(files, found, strict=True):
        path.write_text(f"# {snippet.id}\n{PRELUDE}{snippet.values[0]}")
    # A class of a package that is not here may be a base class.
    lenient = ["--ignore-missing-imports", "--allow-subclassing-any"]
    command = [sys.executable, "-m", "mypy", "--no-incremental", *lenient, *map(str, files)]
    # A program of its own imports what it uses, once.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + "\n".join(f"{path.name}: {one.id}" for path, one in zip(files, found))
