"""Pages: whole without a network, readable by everybody, made from any run folder or zip, hostile ones too."""

import base64
import io
import json
import re
import shutil
import stat
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from labkit import cli, files, runs
from labkit.runs import accessibility, archive, images
from labkit.settings import NgramBaseline

NAME = "02_ngram_baseline"
FRAME = """<div><style scoped>.dataframe tbody tr th { vertical-align: top; }</style>
<table border="1" class="dataframe"><thead><tr><th></th><th>tok_s</th></tr></thead>
<tbody><tr><th>code</th><td>40.2</td></tr></tbody></table></div>"""
HOSTILE = """<script>steal()</script><img src="http://evil.example/p.png" alt="dot"><iframe src="//evil"></iframe>
<a href="javascript:steal()" onclick="steal()">click</a><style>@import url(http://evil.example/x.css);</style>
<p style="background:url(http://evil.example/y)">text</p><link rel="stylesheet" href="http://evil.example/z.css">
<svg><image href="http://evil.example/s.png"></image></svg><form action="http://evil.example"><input></form>"""


def picture(width=300, height=200, noise=False):
    """A PNG in base64."""
    colours = (
        np.random.default_rng(0).integers(0, 255, (height, width, 3))
        if noise
        else np.full((height, width, 3), 250)
    )
    packed = io.BytesIO()
    Image.fromarray(colours.astype("uint8")).save(packed, "PNG")
    return base64.b64encode(packed.getvalue()).decode()


def shown(**data):
    """An output with data of these kinds."""
    kinds = {"png": "image/png", "html": "text/html", "plain": "text/plain", "markdown": "text/markdown"}
    data = {kinds.get(kind, kind): value for kind, value in data.items()}
    return new_output("display_data", data=data)


def make(folder: Path, cells=None, **more):
    """A finished run of notebook 02 under `folder`, without an engine; returns the run folder."""
    stage = runs.Stage(NgramBaseline(run_id="r", max_tokens=77))
    assert stage.folder.is_relative_to(folder)
    axes = plt.subplots(figsize=(3, 2))[1]
    axes.plot([1, 2], label="n-gram")
    axes.set(title="Decode rate by category", xlabel="category", ylabel="rate (tok/s)")
    stage.figure("rates", axes)
    plt.close("all")
    path = stage.finish({"baseline_tok_s": 40.25, "ngram_speedup": 1.5})
    files.write_json(path, files.read_json(path) | more)
    cells = cells or [
        new_markdown_cell("# How fast?\nAnswer: a rate."),
        new_code_cell("target = 1", metadata={"tags": ["parameters"]}),
        new_markdown_cell("#### Rates of *each* category"),
        new_code_cell('stage.figure("rates", x)', outputs=[shown(png=picture(), plain="<Figure size 3x2>")]),
        new_markdown_cell("## A table"),
        new_code_cell("frame", outputs=[shown(html=FRAME, plain="frame"), shown(png=picture(), plain="<Figure>")]),
    ]
    nbformat.write(new_notebook(cells=cells), stage.folder / f"{NAME}.ipynb")
    return stage.folder.parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    return lambda cells=None, **more: make(tmp_path / "outputs", cells, **more)


def page_of(folder):
    return (folder / NAME / f"{NAME}.html").read_text()


def test_pages_have_no_problem(run, capsys):
    folder = run()
    index = runs.render("r")
    assert accessibility.problems(index.read_text()) == []
    assert accessibility.problems(page_of(folder)) == []
    assert capsys.readouterr().err == ""


def test_alt_text_is_the_figures_title_or_the_heading(run):
    folder = run()
    runs.render(folder)
    first, second = BeautifulSoup(page_of(folder), "html.parser").find_all("img")
    assert first["alt"] == "Decode rate by category; rate (tok/s) by category; n-gram"
    assert second["alt"] == "Figure under the heading: A table"


def test_headings_and_tables_are_put_in_order(run):
    folder = run(
        [new_markdown_cell("# One"), new_markdown_cell("#### Four\n# Again"), new_markdown_cell("###### Six")]
    )
    runs.render(folder)
    soup = BeautifulSoup(page_of(folder), "html.parser")
    found = [(tag.name, tag.get_text()) for tag in soup.find_all(re.compile("^h[1-6]$"))]
    assert found == [
        ("h1", "One"),
        ("h2", "Four"),
        ("h2", "Again"),
        ("h3", "Six"),
        ("h2", "How this page was made"),
    ]


def wide(columns):
    """A frame as pandas shows it, with one row and so many columns of long names."""
    return pd.DataFrame([[1.25] * columns], columns=[f"speedup_of_kind_{n}" for n in range(columns)]).to_html()


def test_the_verdict_is_the_first_thing_on_a_page(run):
    said = "N-gram speculation is measured without an interval: 1.50× as fast as the target alone."
    index = runs.render(run())
    for path in (index, index.parent / NAME / f"{NAME}.html"):
        soup = BeautifulSoup(path.read_text(), "html.parser")
        assert soup.h1.find_next("p").get_text() == said
        assert "<" not in soup.h1.get_text()


def test_wide_tables_are_made_narrow_or_say_that_they_go_on(run):
    cells = [
        new_markdown_cell("# Wide?"),
        *(new_code_cell("x", outputs=[shown(html=wide(n))]) for n in (3, 9, 30)),
    ]
    folder = run(cells)
    runs.render(folder)
    page = page_of(folder)
    assert accessibility.problems(page) == []
    soup = BeautifulSoup(page, "html.parser")
    tables = soup.find_all("table", class_="dataframe")
    assert ["tight" in table["class"] for table in tables] == [False, True, True]
    assert [len(table.thead.find_all("wbr")) for table in tables] == [0, 27, 90], "three underscores a name"
    assert tables[1].thead.find("th").get_text() == "speedup_of_kind_0", "found by a search"
    hints = [p for p in soup.find_all("p", class_="muted") if "sideways" in p.get_text()]
    assert [hint.get_text().split()[0] for hint in hints] == ["31"]
    assert hints[0].find_next("table") is tables[2]


def test_progress_and_long_prints_are_folded_and_short_ones_are_not(run):
    bar = "requests: 100%|####| 16/16 [00:31<00:00]\n"
    prints = [bar, bar * 8, "all is well\n", "a line\n" * 13, bar + "2 failed\n"]
    outputs = [new_output("stream", name="stdout", text=text) for text in prints]
    folder = run([new_markdown_cell("# Long?"), *(new_code_cell("x", outputs=[o]) for o in outputs)])
    runs.render(folder)
    page = page_of(folder)
    assert accessibility.problems(page) == []
    streams = BeautifulSoup(page, "html.parser").find_all("div", class_="output_stream")
    folded = [stream.find_parent("details") for stream in streams]
    said = [found.summary.get_text() if found else "" for found in folded]
    assert said == ["progress (1 line)", "progress (8 lines)", "", "output (13 lines)", ""]


def test_page_says_how_it_was_made(run):
    """Parameters, versions, hardware and the command, once as it was run, once worked out from the settings."""
    folder = run(executed={"command": "labkit run 02 --run-id r -p max_tokens=77", "wall_seconds": 5.4})
    runs.render(folder)
    text = BeautifulSoup(page_of(folder), "html.parser").get_text(" ")
    record = files.read_json(folder / NAME / "run.json")
    assert "labkit run 02 --run-id r -p max_tokens=77" in text
    for name, value in record["settings"].items():
        assert re.search(rf"{name}\s+{re.escape(str(value)) if value != '' else '–'}", text), name
    for said in (record["provenance"]["hardware"]["cpu"], record["provenance"]["packages"]["torch"]):
        assert said in text
    by_hand = run()
    assert "labkit run 02 --run-id r -p max_tokens=77<" in runs.render(by_hand).read_text()


def test_code_is_folded_without_scripts(run):
    folder = run()
    runs.render(folder)
    soup = BeautifulSoup(page_of(folder), "html.parser")
    code = soup.find("details", class_="code")
    assert "target" in code.get_text()
    assert not code.has_attr("open")
    assert code.find("summary").get_text() == "code"
    assert not soup.find("script")


def test_widgets_leave_nothing_dead(run):
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "m"},
        "text/plain": "VBox(children=(Slider(),))",
    }
    cells = [new_markdown_cell("# Q"), new_code_cell("x", outputs=[new_output("display_data", data=view)])]
    folder = run(cells)
    runs.render(folder)
    assert "VBox" not in page_of(folder)
    assert "model_id" not in page_of(folder)


def test_a_hostile_notebook_runs_and_fetches_nothing(run):
    cells = [new_markdown_cell("# Q <script>steal()</script>\n![x](http://evil.example/m.png)")]
    cells += [new_code_cell("x", outputs=[shown(html=HOSTILE), shown(markdown=HOSTILE)])]
    folder = run(cells)
    runs.render(folder)
    text = page_of(folder)
    assert list(accessibility.external(BeautifulSoup(text, "html.parser"))) == []
    assert not BeautifulSoup(text, "html.parser").find(string=re.compile("steal"))
    assert not re.search(r"(src|style|href)=\"[^\"]*evil", text)
    assert "default-src 'none'" in text


def test_a_page_of_many_pictures_stays_small(run, capsys):
    outputs = [shown(png=picture(600, 600, noise=True)) for _ in range(3)]
    assert sum(len(output.data["image/png"]) for output in outputs) > 4e6
    folder = run([new_markdown_cell("# Q"), new_code_cell("x", outputs=outputs)])
    runs.render(folder)
    assert len(page_of(folder)) < 3e6
    assert len(BeautifulSoup(page_of(folder), "html.parser").find_all("img")) == 3
    assert capsys.readouterr().err == ""


def test_a_picture_keeps_its_colours_and_shape():
    axes = plt.subplots()[1]
    axes.bar([1, 2], [3, 4], color="#D55E00")
    packed = io.BytesIO()
    axes.figure.savefig(packed)
    plt.close("all")
    small = images.smaller(packed.getvalue(), 4000)
    assert len(small) < len(packed.getvalue())
    before, after = (
        np.asarray(Image.open(io.BytesIO(c)).convert("RGB"), dtype=int) for c in (packed.getvalue(), small)
    )
    assert before.shape == after.shape
    assert np.abs(before - after).mean() < 1
    assert images.smaller(b"no picture", 100) == b"no picture"


def test_endless_text_is_cut_and_says_so(run):
    stream = new_output("stream", name="stdout", text="line\n" * 900_000)
    folder = run([new_markdown_cell("# Q"), new_code_cell("x", outputs=[stream])])
    runs.render(folder)
    assert len(page_of(folder)) < 3e6
    assert "characters left out" in page_of(folder)


def zipped(folder, path, inside="r/"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive_file:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive_file.write(file, f"{inside}{file.relative_to(folder)}")
    return path


@pytest.mark.parametrize("inside", ["r/", "", "deep/er/r/"])
def test_a_zip_is_rendered_elsewhere(run, tmp_path, monkeypatch, inside):
    folder = run()
    (tmp_path / "sent").mkdir()
    path = zipped(folder, tmp_path / "sent/mine.zip", inside)
    shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path / "sent")
    monkeypatch.setattr("sys.argv", ["labkit", "render", "mine.zip"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert {str(p.relative_to(path.parent)) for p in path.parent.rglob("*") if p.is_file()} == {
        "mine.zip",
        "mine-pages/index.html",
        f"mine-pages/{NAME}/{NAME}.html",
    }
    assert accessibility.problems((path.parent / "mine-pages" / NAME / f"{NAME}.html").read_text()) == []


def test_an_unpacked_folder_is_rendered_where_it_is_or_into_another(run, tmp_path, monkeypatch):
    moved = tmp_path / "else where"
    shutil.move(run(), moved)
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "none"))
    assert runs.render(moved) == moved / "index.html"
    before = sorted(moved.rglob("*"))
    assert runs.render(moved, tmp_path / "pages") == tmp_path / "pages/index.html"
    assert sorted(moved.rglob("*")) == before
    assert (tmp_path / f"pages/{NAME}/{NAME}.html").exists()


@pytest.mark.parametrize(
    "name", ["../run.json", "/etc/run.json", "a/../../b.json", "C:\\x.json", "c:/x.json", "..\\x.png"]
)
def test_a_zip_that_leaves_its_folder_is_refused(tmp_path, name):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive_file:
        archive_file.writestr("r/02_ngram_baseline/run.json", "{}")
        archive_file.writestr(zipfile.ZipInfo(name), "{}")
    with pytest.raises(runs.BadArchive, match="leaves the folder"), archive.opened(path):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["x.zip"]


def test_links_bombs_and_broken_zips_are_refused(tmp_path, monkeypatch):
    link = zipfile.ZipInfo("r/run.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    made = {"link": [(link, "/etc/passwd")], "bomb": [("r/02/run.json", b"\0" * 60_000_000)]}
    made["many"] = [(f"r/{n}.json", b"{}") for n in range(30)]
    made["large"] = [(f"r/{n}.json", np.random.default_rng(n).bytes(40_000)) for n in range(5)]
    monkeypatch.setattr(archive, "MOST_FILES", 20)
    monkeypatch.setattr(archive, "MOST_BYTES", 150_000)
    for name, members in made.items():
        path = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive_file:
            for member, content in members:
                archive_file.writestr(member, content)
        with pytest.raises(runs.BadArchive), archive.opened(path):
            pass
    (tmp_path / "half.zip").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(runs.BadArchive, match="cannot be unpacked"), archive.opened(tmp_path / "half.zip"):
        pass


def test_a_zip_that_lies_about_sizes_is_refused(tmp_path, monkeypatch):
    """The directory says 10 bytes, the member holds more: what is counted is what is read."""
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive_file:
        archive_file.writestr("r/02_ngram_baseline/run.json", b"x" * 100_000)
    real = (100_000).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(real, (10).to_bytes(4, "little")))
    with pytest.raises(runs.BadArchive), archive.opened(path):
        pass


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ("{", files.BrokenFile),
        ("[]", runs.BadRecord),
        (json.dumps({"notebook": NAME}), runs.BadRecord),
        (json.dumps({"notebook": "../x", "settings": {}, "headline": {}, "provenance": {}}), runs.BadRecord),
    ],
)
def test_a_record_that_no_notebook_wrote_is_refused(run, record, error):
    folder = run()
    (folder / NAME / "run.json").write_text(record)
    with pytest.raises(error):
        runs.render(folder)


def test_a_record_of_another_version_is_shown(run):
    """Settings that are gone, hardware that says less."""
    folder = run()
    path = folder / NAME / "run.json"
    record = files.read_json(path)
    record["settings"] |= {"no_longer": "there"}
    record["provenance"] = {"packages": None}
    record["headline"] = {"baseline_tok_s": "fast", "ngram_speedup": [1], "ngram_acceptance_length": 2.5}
    files.write_json(path, record)
    index = runs.render(folder)
    assert "no_longer=there" in index.read_text()
    assert "2.50" in index.read_text()
    assert accessibility.problems(page_of(folder)) == []


def colours(**more):
    """A page with these declarations in a rule of its own, by theme."""
    rules = "".join(
        f"@media (prefers-color-scheme: {t}) {{ p {{ {d} }} }}" for t, d in more.items() if t == "dark"
    )
    light = more.get("light", "")
    return f"""<html lang="en"><head><title>t</title><style>:root {{ --ink: #000; --paper: #fff; --soft: #eee; }}
        @media (prefers-color-scheme: dark) {{ :root {{ --ink: #fff; --paper: #000; --soft: #222; }} }}
        p {{ {light} }} {rules}</style></head><body><h1>t</h1></body></html>"""


def test_contrast_is_what_the_standard_says():
    """#777 on white is 4.48 to 1, #767676 is 4.54: the best known pair beside the limit; black on white is 21."""
    ratio = accessibility.ratio_of
    grey, white, black = ((int(h, 16) / 255,) * 3 + (1,) for h in ("77", "ff", "00"))
    assert ratio(grey, white) == pytest.approx(4.48, abs=0.005)
    assert ratio((0x76 / 255,) * 3 + (1,), white) == pytest.approx(4.54, abs=0.005)
    assert ratio(black, white) == pytest.approx(21)
    half = accessibility.over((0, 0, 0, 0.5), white)
    assert half[:3] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        ({"light": "color: #767676; background: #fff"}, ["dark"][:0]),
        ({"light": "color: #777; background: #fff"}, ["light", "dark"]),
        ({"light": "background: #444"}, ["light"]),
        ({"light": "color: #222"}, ["dark"]),
        ({"dark": "color: #444"}, ["dark"]),
        ({"light": "opacity: .4"}, ["light", "dark"]),
        ({"light": "color: rgba(0, 0, 0, .3); background: white"}, ["light", "dark"]),
    ],
)
def test_contrast_is_checked_in_both_themes(rules, wrong):
    found = accessibility.problems(colours(**rules))
    assert sorted({line.split(":")[0] for line in found}) == sorted(wrong)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<h1>a</h1><h1>b</h1>", "2 headings of level 1"),
        ("<h1>a</h1><h3>b</h3>", "jumps from level 1 to 3"),
        ("<h1>a</h1><img src='data:image/png;base64,AA'>", "alt=''"),
        ("<h1>a</h1><img alt='rates.png' src='data:image/png;base64,AA'>", "alt='rates.png'"),
        ("<h1>a</h1><table><tr><th>x</th></tr></table>", "has no scope"),
        ("<h1>a</h1><table><tr><td>x</td></tr></table>", "without headers"),
        ("<h1>a</h1><img alt='a good one' src='https://x.example/a.png'>", "would be fetched"),
        ("<h1>a</h1><img alt='a good one' srcset='a.png 2x'>", "would be fetched"),
        ("<h1>a</h1><style>p { background: url(x.png) }</style>", "CSS would fetch"),
        ("<h1>a</h1><p onmouseover='x()'>", "is a script"),
        ("<h1>a</h1><script>1</script>", "a script element"),
        ("<h1>a</h1><pre>&lt;Figure size 640x480 with 1 Axes&gt;</pre>", "dead placeholder"),
        ("<h1>a</h1>" + "x" * 3_000_000, "more than 3"),
    ],
)
def test_each_kind_of_problem_is_found(body, problem):
    page = colours().replace("<h1>t</h1>", body)
    assert any(problem in line for line in accessibility.problems(page))
    assert any("lang" in line for line in accessibility.problems(page.replace(' lang="en"', "")))
