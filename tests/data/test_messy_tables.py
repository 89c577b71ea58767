"""Dates, durations, other ways to write numbers, and other containers of tables."""

import gzip
from datetime import date, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from privagrad.data.readers import chunks, infer_schema, open_table, open_test_table
from privagrad.data.schema import Column, Schema, as_values, from_values, read_schema, template
from privagrad.data.times import read_dates, read_durations
from tests.data.workbooks import write_xlsx

TEXT = "city;when;price;n\nRom;2024-01-31;1.234,5;1\nBern;;2,5;\nRom;2023-12-01;-3;3\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-31", datetime(2024, 1, 31)),
        ("2024-01-31T10:20:30Z", datetime(2024, 1, 31, 10, 20, 30)),
        ("2024-01-31 10:20:30+02:00", datetime(2024, 1, 31, 10, 20, 30)),
        ("2024/01/31", datetime(2024, 1, 31)),
        ("31.01.2024 10:20", datetime(2024, 1, 31, 10, 20)),
        ("31 Jan 2024", datetime(2024, 1, 31)),
        ("January 31, 2024", datetime(2024, 1, 31)),
        ("01/02/2024", None),
        ("2024-02-30", None),
        ("31.01.24", None),
        ("31.01.24 10:20:30.1234", None),
        ("24-01-31", None),
        ("31 Jan 24", None),
        ("Jan 31, 24", None),
        ("0001-01-01", datetime(1, 1, 1)),
        ("31", None),
    ],
)
def test_dates_in_the_usual_ways(text, expected):
    others = pl.Series(["1999-12-31", text, "5 May 2000", None])
    assert read_dates(others)[1] == expected
    assert read_dates(pl.Series([text]))[0] == expected


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("31.01.24", "%d.%m.%Y", None),
        ("31.01.24", "%d.%m.%y", datetime(2024, 1, 31)),
        ("2024-01-31T22:00:00-0500", "%Y-%m-%dT%H:%M:%S%z", datetime(2024, 1, 31, 22)),
        ("2024-01-31 22:00 +05:30", "%Y-%m-%d %H:%M %:z", datetime(2024, 1, 31, 22)),
        ("2024-01-31 22:00Z", "%Y-%m-%d %H:%M%z", datetime(2024, 1, 31, 22)),
        ("2024-01-31 22:00", "%Y-%m-%d %H:%M%z", None),
    ],
)
def test_dates_in_a_stated_format(text, written, expected):
    assert read_dates(pl.Series([text, None]), written).to_list() == [expected, None]


def test_times_are_those_of_the_clock_on_the_wall(tmp_path):
    """In Parquet too, as everywhere."""
    path = tmp_path / "t.parquet"
    at = pl.Series("at", [datetime(2024, 1, 31, 22), None])
    at.dt.replace_time_zone("America/New_York").to_frame().write_parquet(path)
    when = Column("at", "date", parts=("days", "hour"))
    [part] = chunks(path, Schema((when,)), target=False)
    told = dict(zip(part.names, part.X.toarray()[0], strict=True))
    assert (told["at in days"], told["at hour=22"]) == (19_753 + 22 / 24, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30:00", 5400), ("90 min", 5400), ("1h 30m", 5400), ("1.5 hours", 5400),
        ("PT1H30M", 5400), ("P1DT2H", 93_600), ("2 days 1:00:00", 176_400), ("-5 s", -5),
        ("1:30", None), ("90", None), ("P", None), ("P1Y", None), ("", None), ("x", None),
    ],
)  # fmt: skip
def test_durations_in_the_usual_ways(text, seconds):
    assert read_durations(pl.Series([text]))[0] == seconds


def test_the_parts_of_a_date_follow_a_public_rule(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("when,y\n31/01/2024,1\n,2\n01/02/2024,3\n")
    when = Column("when", "date", format="%d/%m/%Y", parts=("days", "month"))
    table = open_table(path, Schema((when, Column("y")), "y"))
    names = table.encoding.names
    assert names[:3] == ["when in days", "when is missing", "when month=January"]
    assert len(names) == 14
    rows = table.rows().toarray()
    assert rows[0, :4].tolist() == [19_753, 0, 1, 0]
    assert np.isnan(rows[1, 0])
    assert rows[1, 1:].tolist() == [1] + [0] * 12
    assert rows[2, :4].tolist() == [19_754, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("31.1.2024", "date"), ("31.01.2024 10:20", "date"), ("2024-01-31T10:20:30Z", "date"),
        ("1.2.3", "category"), ("31.13.2024", "category"), ("1.234.567", "number"),
    ],
)  # fmt: skip
def test_a_template_knows_dates_that_can_be_read_in_one_way(tmp_path, text, kind):
    path = tmp_path / "t.csv"
    path.write_text(f"when;y\n{text};1,5\n;2\n")
    assert infer_schema(path, header=True).column("when").kind == kind


def test_types_of_parquet_are_kinds(tmp_path):
    path = tmp_path / "t.parquet"
    frame = pl.DataFrame(
        {
            "day": [date(2024, 1, 31), None],
            "at": [datetime(2024, 1, 31, 12), None],
            "took": [timedelta(minutes=2), None],
            "ok": [True, None],
            "y": [1, 2],
        }
    )
    frame.write_parquet(path)
    found = infer_schema(path)
    assert [c.kind for c in found.columns] == ["date", "date", "duration", "category", "number"]
    assert found.column("ok").categories == ("false", "true")
    assert "hour" in found.column("at").parts
    (tmp_path / "s.toml").write_text(template(found, "t.parquet"))
    assert read_schema(tmp_path / "s.toml") == found
    assert from_values(as_values(found)) == found
    [part] = chunks(path, found, target=False)
    told = dict(zip(part.names, part.X.toarray()[0] if hasattr(part.X, "toarray") else part.X[0],
                    strict=True))  # fmt: skip
    assert (told["day in days"], told["at in days"], told["took in seconds"]) == (
        19_753, 19_753.5, 120,
    )  # fmt: skip
    assert told["at hour=12"] == told["day weekday=Wednesday"] == told["ok=true"] == 1


def test_the_parts_of_dates_in_text_do_not_depend_on_values(tmp_path):
    """Whether any entry has a time would become public with the template."""
    path = tmp_path / "t.csv"
    found = []
    for time in ("", " 10:20"):
        path.write_text(f"when,y\n2024-01-31,1\n2024-02-01{time},2\n")
        found.append(infer_schema(path))
    assert found[0] == found[1]
    assert found[0].column("when") == Column("when", "date", parts=("days", "month", "weekday"))


def test_booleans_have_usual_spellings(tmp_path):
    (tmp_path / "s.toml").write_text('[[column]]\nname = "ok"\nkind = "boolean"\n')
    (tmp_path / "t.csv").write_text("ok\nYes\nno\nTRUE\nf\n1\nmaybe\n")
    [part] = chunks(tmp_path / "t.csv", read_schema(tmp_path / "s.toml"), target=False)
    assert part.X.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("how", ["plain", "gz", "latin-1", "utf-16"])
def test_the_same_table_in_other_containers(tmp_path, how):
    path = tmp_path / ("t.csv.gz" if how == "gz" else "t.csv")
    text = TEXT.replace("Rom", "Zürich")
    encoding = how if how in ("latin-1", "utf-16") else "utf-8"
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if how == "gz" else data)
    found = infer_schema(path, encoding=encoding)
    assert [c.kind for c in found.columns] == ["category", "date", "number", "number"]
    assert (found.separator, found.decimal, found.thousands) == (";", ",", ".")
    [part] = chunks(path, found, target=False, keep=["city"])
    assert [list(column) for column in part.kept] == [["Zürich", "Bern", "Zürich"]]
    assert part.X.toarray()[:, part.names.index("price")].tolist() == [1234.5, 2.5, -3]


def test_a_sheet_of_an_excel_file(tmp_path):
    path = tmp_path / "t.xlsx"
    rows = [["age", "city", "n"], [31, "a", 0.1], [None, "b,c", 2]]
    write_xlsx(path, {"one": rows})
    found = infer_schema(path)
    assert [c.kind for c in found.columns] == ["number", "category", "number"]
    [part] = chunks(path, found, target=False, keep=["city"])
    assert np.array_equal(part.X, [[31, 0, 0.1, 0], [np.nan, 1, 2, 0]], equal_nan=True)
    assert [list(column) for column in part.kept] == [["a", "b,c"]]
    write_xlsx(path, {"notes": [["x"]], "data": rows})
    with pytest.raises(ValueError, match="'notes', 'data'"):
        infer_schema(path)
    assert [c.name for c in infer_schema(path, sheet="data").columns] == ["age", "city", "n"]


def test_numbers_in_excel_keep_all_their_digits(tmp_path):
    """Beside texts, dates and truth values, which stay what they are."""
    path = tmp_path / "t.xlsx"
    numbers = [2.5e-10, -1 / 3, 0.1 + 0.2, 1e-300, 3e37, 123456789.123456789, 7, -0.0]
    others = ["007", "12.50", "x,y", "nan", True, 2.5e-10, 3, None]
    when = datetime(2024, 1, 31, 22, 30)
    lines = [[v, o, when] for v, o in zip(numbers, others, strict=True)]
    write_xlsx(path, {"one": [["v", "o", "when"], *lines]})
    found = infer_schema(path)
    assert [c.kind for c in found.columns] == ["number", "category", "date"]
    [part] = chunks(path, found, target=False, keep=["o"])
    rows = part.X.toarray() if hasattr(part.X, "toarray") else part.X
    assert rows[:, 0].tolist() == numbers
    assert set(rows[:, part.names.index("when in days")]) == {19_753 + 22.5 / 24}
    [kept] = part.kept
    assert [str(cell).lower() for cell in kept] == [
        "007", "12.50", "x,y", "nan", "true", "2.5e-10", "3", "none",
    ]  # fmt: skip


def test_a_column_that_is_never_blank_is_held_to_that(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1,1\n2,2\n")
    schema = Schema((Column("a", missing=False), Column("y")), "y")
    fitted = open_table(path, schema)
    path.write_text("a,y\n1,1\n,2\n")
    with pytest.raises(ValueError, match=r"no blanks in column 'a'.*line 3: correct the schema"):
        open_table(path, schema)
    of_model = (
        r"'a', because the model was fitted to a table without.*line 3: fill them in, or drop"
    )
    for read in (
        lambda: list(chunks(path, schema, target=False)),
        lambda: open_test_table(path, fitted),
        lambda: open_table(path, schema, of_model=True),
    ):
        with pytest.raises(ValueError, match=of_model):
            read()


def features(path, names=("a", "b")):
    """The features as they are predicted, and that fits read as many rows."""
    columns = tuple(Column(name, missing=-1.0) for name in names)
    parts = [part.X for part in chunks(path, Schema(columns), target=False)]
    fitted = open_table(path, Schema((*columns, Column(names[0])), names[0])) if names[1:] else None
    rows = np.concatenate(parts) if parts else np.empty((0, len(names)))
    assert fitted is None or fitted.n == len(rows)
    return rows.tolist()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (["1,2", ",", "3,4"], [[1, 2], [-1, -1], [3, 4]]),
        (["1,2", ",", ""], [[1, 2], [-1, -1]]),
        (["1,2", ",", "", "", ""], [[1, 2], [-1, -1]]),
        (["1,2", '"",""', " , ", "", ""], [[1, 2], [-1, -1], [-1, -1]]),
        (["1,2", "", "3,4", ""], [[1, 2], [-1, -1], [3, 4]]),
        (["", "1,2"], [[-1, -1], [1, 2]]),
        ([",", ",", ""], [[-1, -1], [-1, -1]]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 50_000])
def test_each_line_is_a_row_but_empty_ones_at_the_end(
    tmp_path, monkeypatch, end, lines, rows, chunk
):
    """Blank cells leave no row out: predictions stand in the order of the file's rows."""
    monkeypatch.setattr("privagrad.data.frames.CHUNK", chunk)
    monkeypatch.setattr("privagrad.data.sources._CHARACTERS", 3)
    path = tmp_path / "t.csv"
    path.write_text(end.join(["a,b", *lines]), newline="")
    assert features(path) == rows
    path.write_text(end.join(["a", "1", "", "3", "", ""]), newline="")
    assert features(path, ["a"]) == [[1], [-1], [3], [-1]]


def test_a_row_of_nulls_is_a_row(tmp_path):
    frame = pl.DataFrame({"a": [1, None, 3, None], "b": [2, None, 4, None]})
    frame.write_parquet(tmp_path / "t.parquet")
    assert features(tmp_path / "t.parquet") == [[1, 2], [-1, -1], [3, 4], [-1, -1]]
    write_xlsx(tmp_path / "t.xlsx", {"one": [["a", "b"], [1, 2], [None, None], [3, 4], [None]]})
    assert features(tmp_path / "t.xlsx") == [[1, 2], [-1, -1], [3, 4]]


@pytest.mark.parametrize("text", ["1.5", "12.34", "1,2,3", "1.2345"])
def test_numbers_in_another_way_than_stated_are_refused(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(f"a;y\n1.000,5;1\n{text};2\n")
    schema = Schema((Column("a"), Column("y")), "y", ";", decimal=",", thousands=".")
    with pytest.raises(ValueError, match="first in line 3"):
        open_table(path, schema)


def test_columns_that_a_table_lacks_are_named_at_once(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    columns = tuple(Column(name) for name in ("a", "b", "c", "d"))
    with pytest.raises(ValueError, match=r"the columns 'c', 'd' in t\.csv, found none"):
        list(chunks(path, Schema(columns, "b")))
    many = tuple(Column(f"x{k}") for k in range(9))
    with pytest.raises(ValueError, match=r"'x4' and 4 more in t\.csv, found none"):
        list(chunks(path, Schema((*columns[:2], *many), "b")))


def test_a_wrong_kind_is_the_only_problem_of_its_column(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        '[[column]]\nname = "day"\nkind = "dates"\nlow = 2021-01-01\nparts = ["days"]\n'
    )
    with pytest.raises(ValueError, match=r"found: column 'day': kind must be [^;]+'dates'\.$"):
        read_schema(path)
