"""Imports with the garbage collector out of their way, and only those that come first."""

import gc
import subprocess
import sys

import pytest

from trl_opd import importing, launch


def test_what_is_imported_stays_out_of_the_collectors_way():
    code = """
import gc
from trl_opd import importing
with importing.for_good():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.disable()
with importing.for_good():
    pass
assert not gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_kept_where_the_libraries_are_there_already():
    """`main` called from a script or a notebook: its objects are its own."""
    import transformers  # noqa: F401

    frozen = gc.get_freeze_count()
    with importing.for_good():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize("flags", [[], ["--num_processes", "2"]])
def test_a_run_imports_so(monkeypatch, capsys, flags):
    entered = []
    theirs = importing.for_good
    monkeypatch.setattr(importing, "for_good", lambda: entered.append(1) or theirs())
    assert launch.main("sft", ["--no_such_flag", "1", *flags]) == 2
    assert entered == [1] and "no_such_flag" in capsys.readouterr().err
