"""The mutants fit the code as it is: `tests/mutants.py` runs the tests on each."""

from __future__ import annotations

import ast

import pytest

pytest.importorskip("nox", reason="bash tests/run.sh")

from tests.mutants import MUTANTS, Mutant, place_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_once_and_changes_the_code(mutant):
    found = place_of(mutant)
    assert found, "its piece is not in the code exactly once"
    path, changed = found
    assert changed != path.read_text()
    if not mutant.native:
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(path.read_text()))


@pytest.mark.parametrize("old", ["self.payload", "nobody.writes(this)"])
def test_a_piece_that_is_there_twice_or_never_is_out_of_date(old):
    assert place_of(Mutant("m", old, "None")) is None
