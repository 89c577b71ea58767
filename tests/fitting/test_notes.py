"""Columns that are told about, by names and kinds alone."""

import pytest

from privagrad.data.schema import Column, Schema
from privagrad.fitting.notes import column_notes, hidden_notes, looks_like_code

CODES = (
    "id", "patient_id", "patientId", "ZIP", "zipcode", "post_code", "phone", "icd code", "ID",
    "Fallnummer", "Kunden-Nr", "kundennr", "PLZ", "Postleitzahl", "caseNo", "mrn",
)  # fmt: skip
QUANTITIES = (
    "age",
    "paid",
    "humid",
    "episode",
    "hours",
    "income",
    "decode_time",
    "valid",
    "period",
    "casino",
    "Zahl der Kinder",
)


@pytest.mark.parametrize("name", CODES)
def test_names_of_codes(name):
    assert looks_like_code(name)


@pytest.mark.parametrize("name", QUANTITIES)
def test_names_of_quantities(name):
    assert not looks_like_code(name)


def test_nothing_is_said_of_ordinary_columns():
    columns = (Column("age"), Column("city", "category", categories=("Bern",)))
    assert (
        column_notes(Schema((*columns, Column("id", "category", categories=("a", "b"))), "id"))
        == []
    )


def test_columns_of_which_noise_hides_everything_are_named():
    columns = (
        Column("age"),
        Column("insured", "category", categories=("yes", "no")),
        Column("town", "category", categories=("Bern", "Basel")),
        Column("empty", "date", missing=False),
        Column("y"),
    )
    schema = Schema(columns, "y")
    dates = [
        f"{part.name}={value}" for part in columns[3].encoded for value in part.categories
    ]  # fmt: skip
    hidden = ["age is missing", "insured=yes", "insured=no", "town=Bern", "empty in days", *dates]
    (told,) = hidden_notes(schema, hidden)
    assert "Nothing was learned of 'insured', 'empty':" in told
    assert hidden_notes(schema, ["age is missing", "town=Bern", *dates]) == []
