"""Columns that are told about, by names and kinds alone."""

import pytest

from privagrad.data.schema import Column, Schema
from privagrad.fitting.notes import column_notes, looks_like_code

CODES = ("id", "patient_id", "patientId", "ZIP", "zipcode", "post_code", "phone", "icd code", "ID")
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
