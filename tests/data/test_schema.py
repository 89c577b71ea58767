"""Schemas: templates that read back, and every mistake told at once."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privagrad.data.schema import Column, Schema, as_values, from_values, read_schema, template

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=15)
NAMES = st.lists(TEXTS, min_size=1, max_size=6, unique=True)


@given(NAMES, st.data(), st.sampled_from(",;\t|"), st.booleans())
def test_a_template_reads_back(tmp_path_factory, names, data, separator, header):
    kinds = [data.draw(st.sampled_from(["number", "category"])) for _ in names]
    columns = tuple(Column(name, kind) for name, kind in zip(names, kinds, strict=True))
    schema = Schema(columns, names[0], separator, header)
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    path.write_text(template(schema, "people.csv"), encoding="utf-8")
    assert read_schema(path) == schema


@given(NAMES, st.floats(-1e9, 1e9), st.lists(TEXTS, unique=True, max_size=3))
def test_plain_values_read_back(names, number, categories):
    columns = (
        Column(names[0], "number", number, number + 1, number, (), {}),
        *(
            Column(n, "category", categories=tuple(categories), aliases={"a": "b"})
            for n in names[1:]
        ),
    )
    schema = Schema(columns, names[-1], ";", False, ("", "?"))
    assert from_values(as_values(schema)) == schema


def test_a_filled_schema(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(
        """
target = "income"
[file]
blanks = ["?"]
[[column]]
name = "age"
low = 17
high = 90
[[column]]
name = "job"
kind = "category"
categories = ["cook", 3]
[[column]]
name = "income"
kind = "category"
aliases = { "<=50K." = "<=50K" }
""",
        encoding="utf-8",
    )
    schema = read_schema(path)
    assert schema.blanks == ("", "?")
    assert schema.column("age") == Column("age", low=17.0, high=90.0)
    old = from_values(as_values(schema), indicators=False)
    assert old.column("age").missing == 53.5, "what blanks counted as before version 2"
    assert schema.column("job").categories == ("cook", "3")
    assert [c.name for c in schema.features] == ["age", "job"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "Expected TOML"),
        ("", "column"),
        ('[[column]]\nname = "a"\nkind = "nmber"', "kind must be number, category"),
        ('[[column]]\nname = "a"\nlow = 3\nhigh = 1', "low must be below high"),
        ('[[column]]\nname = "a"\nlow = "x"', "low must be a finite number"),
        ('[[column]]\nname = "a"\nlow = true', "low must be a finite number"),
        ('[[column]]\nname = "a"\nlow = inf', "low must be a finite number"),
        ('[[column]]\nname = "a"\nloow = 3', "unknown entry 'loow'"),
        ('[[column]]\nname = "a"\n[[column]]\nname = "a"', "twice"),
        ('[[column]]\nkind = "number"', "needs a name"),
        ('target = "b"\n[[column]]\nname = "bb"', "Did you mean 'bb'"),
        ('column = ["a"]', "column 1"),
        ('[file]\nseparator = ",,"\n[[column]]\nname = "a"', "one character"),
        ('file = 3\n[[column]]\nname = "a"', "file"),
        ('[file]\nblanks = "?"\n[[column]]\nname = "a"', "blanks"),
        ('[[column]]\nname = "a"\ncategories = "x"', "categories"),
        ('[[column]]\nname = "a"\ncategories = ["x", "x"]', "twice"),
        ('[[column]]\nname = "a"\naliases = ["x"]', "aliases"),
        (
            '[[column]]\nname = "a"\nkind = "date"\nformat = "%z %Y-%m-%d"',
            "%z must be the end of format",
        ),
        ('colum = 1\n[[column]]\nname = "a"', "unknown entry 'colum'"),
    ],
)
def test_mistakes_are_told(tmp_path, text, message):
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_schema(path)


def test_no_schema_says_how_to_write_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="privagrad schema"):
        read_schema(tmp_path / "schema.toml")


def test_the_template_is_toml_that_names_what_to_fill_in():
    text = template(Schema((Column("a"), Column("b", "category")), "b"), "t.csv")
    assert tomllib.loads(text)["target"] == "b"
    assert "guessed from its first 10,000 rows" in text
    for word in ("# low", "# high", "# missing", "categories = []", "aliases"):
        assert word in text
