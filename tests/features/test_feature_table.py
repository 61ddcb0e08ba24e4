"""`docs/trainer-features.md` says what the marks on the tests say: no more, and no less."""

import feature_table
import pytest
from feature_table import PAGE, ROOT, cells_in, page


def test_the_page_is_what_the_marks_make(request):
    """Of the files that this run has collected: all of them in a full run."""
    found = request.config.stash[feature_table.COLLECTED]
    text = PAGE.read_text("utf-8")
    written = cells_in(text)
    assert page(written) == text, "the page has another form than `python tests/feature_table.py` gives it"
    for cell in {*written, *found.cells}:
        here = {entry for entry in written.get(cell, set()) if entry[1] in found.files}
        assert here == found.cells.get(cell, set()), f"{cell}: run `python tests/feature_table.py`"
    for entries in written.values():
        assert all((ROOT / file).is_file() for _, file in entries)


def test_what_a_mark_fills(pytester):
    pytester.makeini("[pytest]\nmarkers = feature: x\n    slow: y\npythonpath = " + str(ROOT / "tests"))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("peft_config", [None, 1])
        @pytest.mark.parametrize("job", ["sft", pytest.param("distill", marks=pytest.mark.skip("not here"))])
        @pytest.mark.feature("DoRA")
        def test_one(job, peft_config): pass

        @pytest.mark.feature("Images", job=["sft", "distill"], model="lora", how="refused")
        def test_two(): pass

        @pytest.mark.skipif(True, reason="never")
        @pytest.mark.feature("QLoRA", job="sft", model="lora")
        def test_three(): pass
        """
    )
    items, _ = pytester.inline_genitems()
    files = pytest.MonkeyPatch()
    files.setattr(feature_table, "ROOT", pytester.path)
    cells = feature_table.cells_of(items)
    files.undo()
    file = "test_what_a_mark_fills.py"
    assert cells == {
        ("DoRA", "sft", "full"): {("tested", file)},
        ("DoRA", "sft", "lora"): {("tested", file)},
        ("Images", "sft", "lora"): {("refused", file)},
        ("Images", "distill", "lora"): {("refused", file)},
    }
    assert cells_in(page(cells)) == cells


@pytest.mark.parametrize("mark", ['"No such"', '"DoRA", job="sft"', '"DoRA", job="sft", model="half"'])
def test_a_mark_that_cannot_be_read_is_an_error(pytester, mark):
    pytester.makeini("[pytest]\nmarkers = feature: x")
    pytester.makepyfile(f"import pytest\n\n@pytest.mark.feature({mark})\ndef test_one(): pass\n")
    items, _ = pytester.inline_genitems()
    with pytest.raises(pytest.UsageError, match=r"test_one: this `feature` mark cannot be read"):
        feature_table.cells_of(items)
