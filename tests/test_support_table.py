"""docs/support.md may only claim what a test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from families import FAMILIES

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "support.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`(?P<file>[\w/]+\.py)::(?P<test>\w+)`\]\((?P<target>[^)]+)\)")


def collected(path: Path) -> set[str]:
    """Names at the top of a test file that pytest collects: functions, and test cases, which may
    be classes or names given to one (as hypothesis makes them from a state machine)."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        prefix = {ast.FunctionDef: "test_", ast.ClassDef: "Test"}.get(type(node))
        if prefix is not None and node.name.startswith(prefix):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name) and t.id[:4] == "Test"}
    return names


def test_every_test_named_exists():
    links = list(LINK.finditer(TABLE))
    assert len(links) == TABLE.count("::") > 30
    for link in links:
        path = TESTS / link["file"]
        assert (TESTS.parent / "docs" / link["target"]).resolve() == path, link[0]
        assert link["test"] in collected(path), link[0]


def test_what_is_collected(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        "class Machine: pass\nTestMachine = Machine\nclass TestMore: pass\nSIZE = 3\n"
        "def helper(): pass\ndef test_one():\n    def test_inner(): pass\n"
    )
    assert collected(path) == {"TestMachine", "TestMore", "test_one"}


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
