import numpy as np
import polars as pl
import pytest

from privagrad.files import read_table

FRAME = pl.DataFrame({"age": [30, 40, 50], "income": [1.5, 2.5, 3.5], "label": [0, 1, 1]})


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_frames(tmp_path, ending):
    path = tmp_path / f"people.{ending}"
    if ending == "parquet":
        FRAME.write_parquet(path)
    else:
        FRAME.write_csv(path, separator="\t" if ending == "tsv" else ",")
    table = read_table(path, "label")
    assert table.names == ["age", "income"]
    assert table.X.tolist() == [[30, 1.5], [40, 2.5], [50, 3.5]]
    assert table.y.tolist() == [0, 1, 1]


def test_libsvm(tmp_path):
    path = tmp_path / "rows.libsvm"
    path.write_text("+1 1:0.5 3:2 # a comment\n\n-1 2:1e3\n")
    table = read_table(path)
    assert table.X.toarray().tolist() == [[0.5, 0, 2], [0, 1000, 0]]
    assert table.y.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("name", "text", "target", "message"),
    [
        ("people.csv", "age,label\n1,0\n", "labl", "Did you mean 'label'"),
        ("people.csv", "age,label\n1,0\n", None, "found None"),
        ("people.csv", "age,city,label\n1,Bern,0\n", "label", "'city'"),
        ("people.csv", "age,label\n1,yes\n", "label", "numeric target"),
        ("rows.libsvm", "+1 a:b\n", None, "line 1"),
        ("rows.libsvm", "+1 0:2\n", None, "index 0"),
        ("rows.libsvm", "", None, "found none"),
        ("people.xlsx", "", "label", "Convert it first"),
    ],
)
def test_wrong_files_say_why(tmp_path, name, text, target, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        read_table(path, target)


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
    assert np.array_equal(table.y, y)
