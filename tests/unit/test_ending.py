"""What a finished notebook says in a terminal."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import runs
from labkit.runs.ending import conclusion, ending
from labkit.settings import NgramBaseline


def written(folder, outputs):
    """An executed notebook whose last cell has these outputs."""
    cells = [new_markdown_cell("# A question?"), new_code_cell("x", outputs=outputs)]
    path = folder / "02_ngram_baseline.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_a_run_ends_with_conclusion_headline_and_the_next_command(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    stage = runs.Stage(NgramBaseline(run_id="mine", scale="smoke"))
    stage.finish(
        {"baseline_tok_s": 49.26, "ngram_speedup": 1.62, "ngram_speedup_low": 1.1, "ngram_speedup_high": 2}
    )
    said = "**n-gram is faster: 1.62×** (8 prompts).\n\nThe plan: [next.md](../next.md), *held-out* and so on."
    output = new_output("execute_result", data={"text/markdown": said}, execution_count=1)
    text = ending(written(stage.folder, [output]))
    assert "  n-gram is faster: 1.62× (8 prompts).\n\n  The plan: next.md, " in text
    assert "49.3 tok/s" in text
    assert "1.62× [1.10, 2.00]" in text
    assert f"results: {stage.folder}\n  as a page" in text
    assert text.endswith("labkit render mine")


def test_a_notebook_that_shows_nothing_at_its_end_has_no_conclusion(tmp_path):
    assert conclusion(written(tmp_path, [])) == ""
    stream = new_output("stream", text="done")
    assert conclusion(written(tmp_path, [stream])) == ""
    assert all(len(line) <= 100 for line in conclusion(wide(tmp_path)).splitlines())


def wide(folder):
    """A notebook with one long paragraph."""
    return written(folder, [new_output("display_data", data={"text/markdown": "held-out word " * 60})])
