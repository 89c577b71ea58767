"""Tables on disk: what is read, what is refused, and that nothing but types is looked at."""

import csv
import io
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privagrad.data import tables
from privagrad.data.libsvm import read_libsvm
from privagrad.data.readers import chunks, infer_schema, open_table, read_table
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import ColumnTable, Rows


def read_rows(path, schema):
    table = open_table(path, schema)
    return Rows(table.rows(), table.targets, table.encoding.names)


FRAME = pl.DataFrame({"age": [30, 40, 50], "income": [1.5, 2.5, 3.5], "label": [0, 1, 1]})
WRITERS = {
    "csv": lambda frame, path: frame.write_csv(path),
    "tsv": lambda frame, path: frame.write_csv(path, separator="\t"),
    "parquet": lambda frame, path: frame.write_parquet(path),
    "arrow": lambda frame, path: frame.write_ipc(path),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_tables_of_numbers_need_no_schema(tmp_path, ending):
    path = tmp_path / f"people.{ending}"
    WRITERS[ending](FRAME, path)
    table = read_table(path, "label")
    assert table.names == ["age", "income"]
    assert table.X.tolist() == [[30, 1.5], [40, 2.5], [50, 3.5]]
    assert table.y is not None
    assert table.y.tolist() == [0, 1, 1]


def test_libsvm(tmp_path):
    path = tmp_path / "rows.libsvm"
    path.write_text("+1 1:0.5 3:2 # a comment\n\n-1 2:1e3\n")
    table = read_table(path)
    assert table.X.toarray().tolist() == [[0.5, 0, 2], [0, 1000, 0]]
    assert table.y is not None
    assert table.y.tolist() == [1, -1]
    fewer, _ = read_libsvm(path, 2)
    assert fewer.toarray().tolist() == [[0.5, 0], [0, 1000]]


def test_parts_of_libsvm_without_rows(tmp_path, monkeypatch):
    """Blank lines and comments alone, where a file is read part by part."""
    monkeypatch.setattr("privagrad.data.libsvm._BLOCK", 8)
    path = tmp_path / "rows.libsvm"
    path.write_text("+1 1:0.5\n" + "# nothing here\n" * 3 + "\n" * 20 + "-1 2:1\n")
    table = read_table(path)
    assert table.X.toarray().tolist() == [[0.5, 0], [0, 1]]


@pytest.mark.parametrize(
    ("name", "text", "target", "message"),
    [
        ("people.csv", "age,label\n1,0\n", "labl", "Did you mean 'label'"),
        ("people.csv", "age,label\n1,0\n", None, "found None"),
        ("people.csv", "age,city,label\n1,Bern,0\n", "label", "'city'"),
        ("people.csv", "age,label\n1,yes\n", "label", "numeric target"),
        ("people.csv", "", "label", "no first line"),
        ("people.csv", "\n\n", "label", "no first line"),
        ("people.csv", "age,label\n", "label", "found none"),
        ("people.csv", "1,2\n3,4\n", "label", "looks like a row"),
        ("people.csv", "age,age,label\n1,2,0\n", "label", "twice: those of columns 1, 2"),
        ("people.csv", "age,,label\n1,2,0\n", "label", "column 2"),
        ("people.csv", "age,label\n1,0,5\n", "label", "people.csv"),
        ("people.csv", 'age,label\n"1,0\n2,1\n', "label", "people.csv"),
        ("people.csv", "age,label\n1e300,0\n", "label", "give it bounds"),
        ("people.csv", "age,label\ninf,0\n", "label", "give it bounds"),
        ("people.parquet", "this is no parquet file", "label", "people.parquet"),
        ("people.arrow", "this is no arrow file", "label", "people.arrow"),
        ("rows.libsvm", "+1 a:b\n", None, "line 1"),
        ("rows.libsvm", "+1 0:2\n", None, "index 0"),
        ("rows.libsvm", "", None, "found none"),
        ("people.xls", "", "label", "Convert it first"),
        ("rows.libsvm", "+1 4294967296:2\n", None, "indices up to 67,108,864"),
    ],
)
def test_wrong_files_say_why(tmp_path, name, text, target, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        read_table(path, target)


@pytest.mark.parametrize("bytes_", [b"\xff\xfea\x00,\x00b\x00", b"caf\xe9,b\n1,2\n"])
def test_other_encodings_are_named(tmp_path, bytes_):
    path = tmp_path / "people.csv"
    path.write_bytes(bytes_)
    with pytest.raises(ValueError, match="UTF-8"):
        read_table(path, "b")


def test_missing_files_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="found nothing"):
        read_table(tmp_path / "absent.csv", "label")


def test_numbers_survive_the_way_through_a_file(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((20, 3)) * [1e-9, 1, 1e9], rng.standard_normal(20)
    path = tmp_path / "rows.libsvm"
    lines = (
        f"{label!r} " + " ".join(f"{j + 1}:{v!r}" for j, v in enumerate(row))
        for label, row in zip(y.tolist(), X.tolist(), strict=True)
    )
    path.write_text("\n".join(lines))
    table = read_table(path)
    assert np.array_equal(table.X.toarray(), X)
    assert table.y is not None
    assert np.array_equal(table.y, y)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_dialects(tmp_path, mark, separator, end):
    path = tmp_path / "people.csv"
    lines = [
        "age|city|größe".replace("|", separator),
        f'31{separator}"a{separator}b"{separator}1.5',
    ]
    path.write_text(mark + end.join([*lines, f"32{separator}Zürich{separator}", "", ""]), "utf-8")
    found = infer_schema(path)
    assert [(c.name, c.kind) for c in found.columns] == [
        ("age", "number"), ("city", "category"), ("größe", "number"),
    ]  # fmt: skip
    assert found.separator == separator
    city = Column("city", "category", categories=("Zürich", f"a{separator}b"))
    rows = read_rows(path, replace(found.with_columns([city]), target="größe"))
    assert rows.names == ["age", "age is missing", "city=Zürich", f"city=a{separator}b"]
    assert rows.X.tolist() == [[31, 0, 0, 1], [32, 0, 1, 0]]
    assert rows.y[0] == 1.5
    assert np.isnan(rows.y[1])


def test_files_without_a_header(tmp_path):
    path = tmp_path / "people.data"
    path.write_text("31, cook, <=50K\n32, ?, >50K\n\n")
    found = infer_schema(path, header=False)
    assert [(c.name, c.kind) for c in found.columns] == [
        ("column1", "number"), ("column2", "category"), ("column3", "category"),
    ]  # fmt: skip
    schema = Schema(
        (
            Column("age", missing=False),
            Column("job", "category", categories=("cook", "baker")),
            Column("income", "category", categories=("low", "high"),
                   aliases={"<=50K": "low", ">50K": "high"}),
        ),
        "income", header=False, blanks=("", "?"),
    )  # fmt: skip
    rows = read_rows(path, schema)
    assert rows.X.tolist() == [[31, 1, 0], [32, 0, 0]]
    assert rows.y.tolist() == [0, 1]
    path.write_text("31, cook, low\n32, baker, ?\n33, baker, middle\n")
    assert np.array_equal(read_rows(path, schema).y, [0, np.nan, -1], equal_nan=True)
    path.write_text("31, cook\n32, baker\n")
    [part] = chunks(path, schema, target=False)
    assert part.X.tolist() == [[31, 1, 0], [32, 0, 1]]
    path.write_text("31, cook, a, b\n")
    with pytest.raises(ValueError, match="Expected 3 columns"):
        read_rows(path, schema)


SECRET = "Alice Miller,Berlin,HIV positive\n"
ROWS_THAT_LOOK_LIKE_NAMES = {
    "text alone": SECRET + "Bob,Paris,healthy\nEve,Rome,healthy\n" * 100,
    "one row": SECRET,
    "a cell occurs again": "Alice Miller,Berlin,unweighed\nBob, Berlin ,70\nEve,Rome,60\n",
    "missing value": "Alice Miller,Berlin,N/A\nBob,Paris,70\nEve,Rome,60\n",
    "no numbers, but blanks": "Alice Miller,Berlin,x\nBob,Paris,\nEve,Rome, \n",
    "twice the same": "Alice Miller,Berlin,Berlin\nBob,Paris,70\n",
    "a number": "Alice Miller,Berlin,60\nBob,Paris,70\n",
}


@pytest.mark.parametrize("name", ROWS_THAT_LOOK_LIKE_NAMES)
def test_a_first_line_that_might_be_a_row_is_not_published(tmp_path, name):
    """Names of columns are public; nor does the refusal say what the line holds."""
    path = tmp_path / "people.csv"
    path.write_text(ROWS_THAT_LOOK_LIKE_NAMES[name])
    with pytest.raises(ValueError, match="privagrad schema TABLE --no-header --names") as refused:
        infer_schema(path)
    assert not any(cell in str(refused.value) for cell in ("Alice", "Berlin", "HIV", "60"))
    names = [column.name for column in infer_schema(path, header=False).columns]
    assert names == ["column1", "column2", "column3"]


@pytest.mark.parametrize(
    "text",
    [
        "age,city,label\n30,Bern,yes\n40,Rome,no\n",
        "city,age,weight\nBern,,\nRome,30,\n",
        "city,yes\nage,0.5\n",
    ],
)
def test_ordinary_headers_need_no_word(tmp_path, text):
    path = tmp_path / "people.csv"
    path.write_text(text)
    assert [c.name for c in infer_schema(path).columns] == text.splitlines()[0].split(",")


def test_a_header_over_text_alone_is_the_users_word(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("city,job\nBern,cook\nRome,job\n")
    found = infer_schema(path, header=True)
    assert [c.name for c in found.columns] == ["city", "job"]
    jobs = Column("job", "category", categories=("cook", "job"))
    schema = replace(found.with_columns([jobs]), target="city")
    table = open_table(path, replace(schema, target="city"))
    assert table.counts == {"city": Counter({"Bern": 1, "Rome": 1})}
    assert table.rows().tolist() == [[1, 0], [0, 1]]


def test_numbers_are_brought_within_bounds_and_blanks_are_filled(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("a,b,c,y\n-5,1,,1\n500,NA,7,2\n inf ,3,8,3\n")
    schema = Schema(
        (Column("a", low=0, high=100), Column("b", missing=-1.0), Column("c"), Column("y")),
        "y", blanks=("", "NA"),
    )  # fmt: skip
    rows = read_rows(path, schema)
    assert rows.names == ["a", "a is missing", "b", "c", "c is missing"]
    expected = np.array([[0, 0, 1, np.nan, 1], [100, 0, -1, 7, 0], [100, 0, 3, 8, 0]])
    assert np.array_equal(rows.X, expected, equal_nan=True)


def test_rare_one_hot_tables_are_sparse(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("city,age,y\n" + "\n".join(f"c{k % 50},{k},1" for k in range(200)))
    cities = Column("city", "category", categories=tuple(f"c{k}" for k in range(50)))
    rows = read_rows(path, Schema((cities, Column("age"), Column("y")), "y"))
    assert rows.X.nnz <= 400
    assert np.array_equal(rows.X.toarray().sum(axis=1), 1 + np.arange(200))


def test_sparse_rows_of_many_parts_are_those_of_one(tmp_path, monkeypatch):
    """Blanks, other texts and zeros leave rows of different lengths, some of them empty."""
    rng = np.random.default_rng(0)
    cities = [f"c{k}" for k in range(30)]
    picked = rng.choice([*cities, "", "elsewhere", " c1 "], 95)
    numbers, path = rng.integers(0, 2, 95), tmp_path / "people.csv"
    picked[7], numbers[7] = "", 0
    lines = [f"{city},{age},1" for city, age in zip(picked, numbers, strict=True)]
    path.write_text("city,age,y\n" + "\n".join(lines))
    for known in (tuple(cities), ()):
        columns = (
            Column("city", "category", categories=known),
            Column("age", missing=0.0),
            Column("y"),
        )
        table = open_table(path, Schema(columns, "y"))
        table = table if known else table.with_categories({"city": tuple(cities)})
        monkeypatch.setattr(tables, "CHUNK", 10)
        found = table.rows()
        one_hot = picked[:, None] == np.array(cities)
        one_hot[:, 1] |= picked == " c1 "
        assert np.array_equal(found.toarray(), np.column_stack([one_hot, numbers]))
        assert found.has_canonical_format
        parts = [part.X.toarray() for part in table.parts()]
        assert len(parts) == 10
        assert np.array_equal(np.concatenate(parts), found.toarray())
        monkeypatch.undo()


@pytest.mark.parametrize("blanks", [("",), ("", "-9"), ("", "?"), ("", "nan")])
def test_numbers_that_stand_for_missing_values_are_missing(tmp_path, blanks):
    """-9 reads as a number, and is none where it stands for a missing value."""
    path = tmp_path / "people.csv"
    mark = blanks[-1] or "nan"
    path.write_text(f"a,b,y\n1,4,1\n{mark},5,2\n3,6e0,3\n")
    columns = (Column("a", missing=77.0), Column("b", missing=False), Column("y"))
    schema = Schema(columns, "y", blanks=blanks)
    assert read_rows(path, schema).X.tolist() == [[1, 4], [77, 5], [3, 6]]


def test_spellings_of_a_category_count_together(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("city,y\n Rome,1\nRome ,0\nroma,1\n?,1\nBern,\n,?\n")
    city = Column("city", "category", aliases={"roma": "Rome"})
    target = Column("y", "category", categories=("0", "1"))
    table = open_table(path, Schema((city, target), "y", blanks=("", "?")))
    assert table.counts == {"city": Counter({"Rome": 3, "Bern": 1})}
    table = table.with_categories({"city": ("Bern", "Rome")})
    assert table.rows().tolist() == [[0, 1], [0, 1], [0, 1], [0, 0], [1, 0], [0, 0]]
    assert np.array_equal(table.targets, [1, 0, 1, 1, np.nan, np.nan], equal_nan=True)


def test_the_same_categories_in_every_format(tmp_path):
    frame = pl.DataFrame(
        {
            "k": pl.Series(["x", "y", None, "x "], dtype=pl.Categorical),
            "b": [True, False, None, True],
            "y": [1, 2, 3, 4],
        }
    )
    columns = (
        Column("k", "category", categories=("x", "y")),
        Column("b", "category", categories=("true", "false")),
        Column("y"),
    )
    expected = [[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
    for ending, write in WRITERS.items():
        path = tmp_path / f"t.{ending}"
        write(frame, path)
        separator = "\t" if ending == "tsv" else ","
        rows = read_rows(path, Schema(columns, "y", separator))
        assert rows.X.tolist() == expected, ending


def test_chunks_are_the_whole_table_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("privagrad.data.frames.CHUNK", 1000)
    monkeypatch.setattr("privagrad.data.tables.CHUNK", 700)
    path = tmp_path / "long.csv"
    path.write_text("a,b,y\n" + "\n".join(f"{k},{k % 3},{k}" for k in range(25_000)))
    schema = Schema(
        (Column("a"), Column("b", "category", categories=("0", "1", "2")), Column("y")), "y"
    )
    parts = list(chunks(path, schema))
    assert np.array_equal(np.concatenate([part.y for part in parts]), np.arange(25_000))
    assert np.array_equal(read_rows(path, schema).X[:, 0], np.arange(25_000))
    whole = np.concatenate([part.X for part in parts])
    assert np.array_equal(read_rows(path, schema).X, whole)
    unknown = schema.with_columns([Column("b", "category")])
    table = open_table(path, unknown)
    assert table.counts == {"b": Counter({"0": 8334, "1": 8333, "2": 8333})}
    found = table.with_categories({"b": ("0", "1", "2")})
    assert np.array_equal(found.rows(), whole)
    assert np.array_equal(np.concatenate([part.X for part in found.parts()]), whole)
    assert np.array_equal(np.concatenate([part.y for part in found.parts()]), found.targets)


def test_numbers_are_kept_once_and_in_single_precision_where_the_matrix_is_dense(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("a,b,c,y\n1,2,x,no\n3,4,z,yes\n")
    numbers = Column("a", missing=False), Column("b", missing=1.0)
    schema = Schema((*numbers, Column("c", "ignore"), Column("y", "category")), "y")
    table = open_table(path, schema)
    rows = table.rows()
    rows[0, 0] = 7.0
    assert (rows.dtype, table.rows()[0, 0]) == (np.float32, 7.0)
    table = open_table(path, schema.with_columns([Column("c", "category")]))
    assert isinstance(table, ColumnTable)
    assert table.numbers.dtype == np.float64  # c may have so many categories that it is sparse
    assert table.with_categories({"c": ("x", "z")}).rows().dtype == np.float32


def test_text_among_numbers_is_told_by_line(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("a,y\n1,2\nx,3\n2,4\n")
    with pytest.raises(ValueError, match=r"found other text in 1 rows, first in line 3"):
        read_rows(path, Schema((Column("a"), Column("y")), "y"))


def test_a_million_columns(tmp_path):
    path = tmp_path / "wide.csv"
    names = [f"c{k}" for k in range(1_000_000)]
    path.write_text(",".join(names) + "\n")
    with pytest.raises(ValueError, match="at most 20000 columns"):
        read_table(path, "c7")


@contextmanager
def clear_errors():
    """Nothing comes out but errors that say what was expected."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not str(error).startswith("Expected"):
            raise


CELLS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.floats(allow_nan=True).map(repr),
    st.sampled_from(["", "?", '"', "1e999", "-0", "NaN", "0x10", "१२", "\u202e", "a,b", "a;b"]),
)


@given(st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=6), st.sampled_from(",;\t|"))
def test_whatever_a_file_holds_it_is_a_table_or_a_clear_error(tmp_path_factory, rows, separator):
    path = tmp_path_factory.mktemp("fuzz") / "any.csv"
    text = io.StringIO()
    csv.writer(text, delimiter=separator).writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    with clear_errors():
        inferred = infer_schema(path)
        schema = replace(inferred, target=inferred.columns[-1].name)
        table = open_table(path, schema)
        found = {name: tuple(sorted(counts)) for name, counts in table.counts.items()}
        same = read_rows(path, schema.with_columns(
            replace(schema.column(name), categories=values) for name, values in found.items()
        ))  # fmt: skip
        table = table.with_categories(found)
        assert table.encoding.names == same.names
        assert np.array_equal(table.targets, same.y, equal_nan=True)
        assert abs(table.rows() - same.X).max() == 0


@given(st.binary(max_size=200), st.sampled_from(["csv", "parquet", "arrow", "libsvm"]))
def test_whatever_bytes_there_are_no_other_error_comes_out(tmp_path_factory, data, ending):
    path = tmp_path_factory.mktemp("fuzz") / f"any.{ending}"
    path.write_bytes(data)
    with clear_errors():
        read_table(path, "a")


SECRETS = {
    "an open quote": ("t.csv", 'a,b,y\n1,2,3\n"SECRET unterminated,3,1\n4,5,6\n', "from line 3 on"),
    "an open quote in the first row": ("t.csv", 'a,b,y\n"SECRET,3,1\n', "from line 2 on"),
    "text after a quote": ("t.csv", 'a,b,y\n1,"x\ny",3\n"a"SECRET,3,1\n', "from line 4 on"),
    "a ragged line": ("t.csv", "a,b,y\n1,2,3\n4,SECRET,5,6\n", "more cells in line 3"),
    "a ragged line with utf8 in it": ("t.csv", "a,b,y\n1,SECRET,utf8,5\n", "more cells in line 2"),
    "no Parquet": ("t.parquet", "SECRET", "a Parquet file"),
    "no Arrow": ("t.arrow", "SECRET", "an Arrow file"),
    "no LIBSVM": ("t.libsvm", "+1 1:2\n-1 SECRET:2\n", "line 2"),
    "a duration": ("t.csv", "a,b,y\n1,2 min,3\n1,٤٥٦٧٨٩ min,3\n", "durations like.*line 3"),
    "a clock": ("t.csv", "a,b,y\n1,2,3\n1,٤:05:06,3\n", "durations like"),
}


@pytest.mark.parametrize("name", SECRETS)
def test_errors_quote_no_cell(tmp_path, name):
    """Nor does their traceback."""
    ending, text, message = SECRETS[name]
    path = tmp_path / ending
    path.write_text(text, encoding="utf-8")
    schema = Schema((Column("a"), Column("b", "duration"), Column("y")), "y")
    if name not in ("a duration", "a clock"):
        schema = schema.with_columns([Column("b")])
    with pytest.raises(ValueError, match=message) as refused:
        read_table(path, "y") if ending == "t.libsvm" else open_table(path, schema)
    told = "".join(traceback.format_exception(refused.value, limit=0))
    assert told.count("Error") == 1
    assert "SECRET" not in told
    assert "٤" not in told


def test_libsvm_files_are_utf8(tmp_path):
    path = tmp_path / "rows.libsvm"
    path.write_bytes(b"+1 1:2 # caf\xe9\n")
    with pytest.raises(ValueError, match=r"UTF-8 text in rows.libsvm"):
        read_table(path)


@pytest.mark.parametrize(
    "text", ["+1 1:2 5\n2:3\n", "+1 1:2:3 4\n", "2:3 1\n", "  2:3 1\n", "+1 1:2 5\n-1 2:\n"]
)
def test_lines_of_libsvm_files_take_no_numbers_of_others(tmp_path, text):
    """Each of these has as many numbers as colons and labels ask for, but not in each line."""
    path = tmp_path / "rows.libsvm"
    path.write_text("+1 1:2\n" + text)
    with pytest.raises(ValueError, match=r"'label index:value ...' in line [23]"):
        read_table(path)


def test_libsvm_files_have_no_schema(tmp_path):
    path = tmp_path / "rows.libsvm"
    path.write_text("+1 1:2\n")
    with pytest.raises(ValueError, match="needs no schema"):
        infer_schema(path)


def test_columns_of_other_types_are_no_numbers(tmp_path):
    path = tmp_path / "people.parquet"
    days = pl.Series("day", ["2020-01-01"]).str.to_date()
    pl.DataFrame([days, pl.Series("y", [1.0])]).write_parquet(path)
    with pytest.raises(TypeError, match="Expected numbers in column 'day', found Date"):
        open_table(path, Schema((Column("day"), Column("y")), "y"))


@pytest.mark.parametrize("cells", [[b"SECRET\xff"], [["SECRET"]], [timedelta(seconds=3)]])
def test_columns_of_other_types_are_no_categories(tmp_path, cells):
    path = tmp_path / "people.parquet"
    pl.DataFrame({"c": cells, "y": [1.0]}).write_parquet(path)
    with pytest.raises(TypeError, match=r"Expected categories in column 'c', found .* ignored"):
        open_table(path, Schema((Column("c", "category"), Column("y")), "y"))


def test_days_of_any_year_are_dates(tmp_path):
    """Those beyond what microseconds can count were quoted in an error."""
    path = tmp_path / "people.parquet"
    days = pl.Series([2**31 - 1, 19_753], dtype=pl.Int32).cast(pl.Date)
    pl.DataFrame({"day": days, "y": [1, 2]}).write_parquet(path)
    day = Column("day", "date", low=0.0, high=20_000.0, parts=("days",))
    assert read_rows(path, Schema((day, Column("y")), "y")).X[:, 0].tolist() == [20_000, 19_753]


def test_a_table_of_the_target_alone_is_refused(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("a,y\n1,2\n")
    with pytest.raises(ValueError, match=r"columns to read in people.csv, found none"):
        open_table(path, Schema((Column("a", "ignore"), Column("y")), "y"))


def test_categories_that_nobody_has_make_no_columns(tmp_path):
    """A sparse table with a column whose categories are still unknown."""
    path = tmp_path / "people.csv"
    path.write_text("a,b,y\n" + "".join(f"v{k % 40},w,{k}\n" for k in range(80)))
    columns = (
        Column("a", "category", categories=tuple(f"v{k}" for k in range(40))),
        Column("b", "category"),
        Column("y"),
    )
    table = open_table(path, Schema(columns, "y"))
    rows = table.rows()
    assert rows.shape == (80, 40)
    assert rows.nnz == 80
    assert table.with_categories({"b": ("w",)}).rows().shape == (80, 41)


def test_the_usual_marks_of_missing_values_are_blanks_among_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\n1,x,1\nNA,NA,2\n?,?,3\nNull,x,4\n-,x,5\n-3,x,6\nn/a,x,7\n")
    schema = infer_schema(path)
    assert [column.kind for column in schema.columns] == ["number", "category", "number"]
    texts = Column("b", "category", categories=("NA", "x"))
    columns = (Column("a", missing=9.0), texts, Column("y"))
    table = open_table(path, Schema(columns, "y"))
    assert table.rows()[:, 0].tolist() == [1, 9, 9, 9, 9, -3, 9]
    assert table.rows()[1, 1] == 1  # among texts, they may be categories
