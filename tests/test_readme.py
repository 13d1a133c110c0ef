"""The README's first example runs as it stands, and every path that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_first_example_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
    assert "chosen" in capsys.readouterr().out


def test_paths_exist():
    for path in re.findall(r"`(atb_modules/[\w/.]*|tests/[\w/.]*)`", TEXT):
        assert (ROOT / path).exists(), path


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", TEXT):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
