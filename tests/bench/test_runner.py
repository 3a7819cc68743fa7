"""The runner stores rows as they come, goes on after a break, and makes a page of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedel.bench import page, runner
from fedel.bench.section import Goal, Options, Section, sections
from fedel.errors import ConfigError

NAMES = ("a", "b", "c")


def silent(_line):
    pass


def section(measured, break_at=""):
    """Measures three things; notes which in ``measured``."""

    def measure(options, say):
        for name in NAMES:
            if name in options.done:
                continue
            if name == break_at:
                raise KeyboardInterrupt
            measured.append(name)
            yield {"what": name, "seconds": 1.5, "nothing": float("nan")}

    return Section(
        "tiny",
        "A tiny section",
        1,
        measure,
        lambda rows: page.table(["what", "s"], [[row["what"], row["seconds"]] for row in rows]),
        pictures=lambda rows: {"bars": f"<svg>{len(rows)}</svg>"},
        goals=lambda rows: [Goal("how many?", "3", str(len(rows)), len(rows) == 3)],
    )


def test_goes_on_where_it_was_interrupted(tmp_path):
    measured = []
    with pytest.raises(KeyboardInterrupt):
        runner.run([section(measured, break_at="b")], Options(), tmp_path, silent)
    lines = (tmp_path / runner.FILE).read_text().splitlines()
    assert ["a"] == [json.loads(line)["what"] for line in lines if json.loads(line)["section"] == "tiny"]

    rows = runner.run([section(measured)], Options(), tmp_path, silent)
    assert ["a", "b", "c"] == measured
    assert ["a", "b", "c"] == [row["what"] for row in page.of(rows, "tiny")]


def test_measures_again_only_with_other_options(tmp_path):
    measured = []
    whole = section(measured)
    runner.run([whole], Options(), tmp_path, silent)
    runner.run(
        [replace(whole, measure=lambda *_: pytest.fail("was measured before"))], Options(), tmp_path, silent
    )
    called = []
    runner.run([replace(whole, measure=lambda *_: called.append(1) or [])], Options(turns=9), tmp_path, silent)
    assert [1] == called


def test_a_line_that_was_cut_is_left_out(tmp_path):
    file = tmp_path / runner.FILE
    file.write_text('{"section": "tiny", "what": "a"}\n{"section": "ti')
    assert ["a"] == [row["what"] for row in runner.Store(file).rows]


def test_a_row_has_the_load_and_is_json(tmp_path):
    row = page.of(runner.run([section([])], Options(), tmp_path, silent), "tiny")[0]
    assert row["load_before"] >= 0
    assert row["load_after"] >= 0
    assert row["nothing"] is None


def test_the_files_of_a_measurement_are_removed(tmp_path):
    def measure(options, say):
        (options.folder / "large").write_text("x")
        yield {"what": "a", "seconds": 1}

    runner.run([replace(section([]), measure=measure)], Options(), tmp_path, silent)
    assert [runner.FILE] == [file.name for file in tmp_path.iterdir()]


def test_page_has_goals_tables_and_pictures(tmp_path):
    tiny = section([])
    rows = runner.run([tiny], Options(), tmp_path, silent)
    page.write(rows, [tiny], tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert "| how many? | 3 | 3 | yes |" in text
    assert "## A tiny section" in text
    assert "| b | 1.5 |" in text
    assert "Its load before and after the measurements was" in text
    assert "![A tiny section: bars](img/performance/tiny-bars.svg)" in text
    assert "<svg>3</svg>" == (tmp_path / "docs" / "img" / "performance" / "tiny-bars.svg").read_text()


def test_notes_of_people_are_kept(tmp_path):
    tiny, file = section([]), tmp_path / "performance.md"
    rows = runner.run([tiny], Options(), tmp_path, silent)
    page.write(rows, [tiny], file)
    first = file.read_text()
    file.write_text(f"{first}\n## Notes\n\nWhat did not help.\n")
    page.write(rows, [tiny], file)
    assert f"{first}\n## Notes\n\nWhat did not help.\n" == file.read_text()


def test_sections_are_found_in_their_order():
    found = sections()
    assert "floors" in [s.name for s in found]
    assert sorted(s.place for s in found) == [s.place for s in found]
    assert len({s.name for s in found}) == len(found)
    assert all(s.quick for s in sections(quick=True))
    with pytest.raises(ConfigError, match="no section is named 'speed'"):
        sections(["speed"])
