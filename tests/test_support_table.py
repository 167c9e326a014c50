"""docs/support.md may only claim what a test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from families import FAMILIES

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "support.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`(?P<file>[\w/]+\.py)::(?P<test>\w+)`\]\((?P<target>[^)]+)\)")


def test_every_test_named_exists():
    links = list(LINK.finditer(TABLE))
    assert len(links) == TABLE.count("::") > 30
    for link in links:
        path = TESTS / link["file"]
        assert (TESTS.parent / "docs" / link["target"]).resolve() == path, link[0]
        names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert link["test"] in names, link[0]


def test_every_row_is_whole_and_names_a_test():
    kind = 0
    for line in TABLE.splitlines():
        if not line.startswith("|"):
            kind = 0
        elif not kind:
            kind = 1 if "| test |" in line else 2
        elif not line.startswith("|---"):
            assert line.count(" | ") == 2, line
            assert kind == 2 or LINK.search(line), line


def test_every_family_has_a_row():
    listed = re.findall(r"^\|[^|]+\| `(\w+)` \|", TABLE, re.MULTILINE)
    assert sorted(listed) == sorted(FAMILIES)
