"""Entries for the public registry of deployments: valid, as complete as they can be."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from privagrad.report.card import Card
from privagrad.report.registry import registry_entry, registry_yaml, slug_of
from privagrad.report.statement import Statement
from tests.report.cards import card_named
from tests.report.test_card import FULL

SCHEMA = yaml.safe_load((Path(__file__).parent / "opendp-deployments-schema.yaml").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BASIC = Statement(
    name="Stays", curators=("A clinic",), description="A model of the length of stays.",
    purpose="To plan beds.", region="Switzerland", publication_date="2026-02-03",
    registry_authors=("A. Author",),
)  # fmt: skip


def stated(kind: str, statement: Statement) -> Card:
    return {**card_named(kind), "statement": statement.values()}


def parsed(card: Card) -> Any:
    """The entry as a YAML parser reads it, with dates as texts, as JSON has them."""
    loader = type("Plain", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith("timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }})  # fmt: skip
    return yaml.load(registry_yaml(card), loader)


@pytest.mark.parametrize("statement", [BASIC, FULL, replace(BASIC, data_source="Static")])
@pytest.mark.parametrize("kind", ["two classes", "charged", "search", "poisson", "leak", "torch"])
def test_entries_are_valid_under_the_schema_of_the_registry(
    kind: str, statement: Statement
) -> None:
    card = stated(kind, statement)
    entry = parsed(card)
    assert entry == registry_entry(card)
    assert list(VALIDATOR.iter_errors(entry)) == []
    assert entry["status"] == "Draft"
    basic = entry["deployment"]["basic"]
    assert datetime.date.fromisoformat(basic["publication_date"])
    parameters = entry["deployment"]["privacy_loss"]["privacy_parameters"]
    assert parameters["epsilon"] == card["guarantee"]["epsilon"]
    assert parameters["delta"] == card["guarantee"]["delta"]
    details = entry["deployment"]["privacy_loss"]["privacy_parameters_details"]
    assert details.startswith(card["guarantee"]["comparison"])


def test_the_registry_s_schema_refuses_what_is_wrong() -> None:
    entry = registry_entry(stated("two classes", BASIC))
    assert not VALIDATOR.is_valid({**entry, "tier": 4})
    assert not VALIDATOR.is_valid({**entry, "status": "draft"})


def test_the_tier_is_as_high_as_the_fields_allow() -> None:
    tiers = {
        1: BASIC,
        2: replace(BASIC, data_source="Static"),
        3: replace(FULL, group_errors=None, contact=None),
    }
    for tier, statement in tiers.items():
        assert registry_entry(stated("two classes", statement))["tier"] == tier
    for name in ("data_description", "raw_access", "trust", "future_releases", "preprocessing",
                 "storage_security", "justification"):  # fmt: skip
        assert registry_entry(stated("two classes", replace(FULL, **{name: None})))["tier"] == 2


@pytest.mark.parametrize(
    "name",
    ["name", "curators", "description", "purpose", "region", "publication_date",
     "registry_authors"],
)  # fmt: skip
def test_what_the_registry_requires_is_never_invented(name: str) -> None:
    card = stated("two classes", replace(FULL, **{name: None}))
    with pytest.raises(ValueError, match=rf"found none for {name}\. Fill them in"):
        registry_entry(card)


@pytest.mark.parametrize("kind", ["seeded", "not private"])
def test_runs_that_are_not_private_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="Expected a private run for the registry"):
        registry_entry(stated(kind, FULL))


def test_several_runs_of_one_budget_are_many_releases() -> None:
    kinds = {kind: registry_entry(stated(kind, FULL)) for kind in ("charged", "two classes")}
    told = {kind: e["deployment"]["deployment_model"]["release_type"] for kind, e in kinds.items()}
    assert told == {"charged": "Many releases", "two classes": "One release"}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Längen von Aufenthalten (2026)", "langen-von-aufenthalten-2026"),
        ("../../etc/passwd", "etc-passwd"),
        ("Große Straße", "grosse-strasse"),
        ("x" * 200, "x" * 60),
    ],
)
def test_slugs_are_letters_and_digits(name: str, slug: str) -> None:
    assert slug_of(name) == slug


def test_names_without_latin_letters_have_a_fingerprint() -> None:
    assert slug_of("年収") != slug_of("年齢")
    assert slug_of("年収").startswith("deployment-")


RUDE = 'a: b\n- "c" \\ \' # d\t{e} [f] & *g !h %i @j `k` | > ~ null 2026-01-01 é😀'


def test_hostile_texts_stay_texts_in_yaml() -> None:
    statement = replace(FULL, name=RUDE, description=RUDE, curators=(RUDE, "- x", "null"))
    basic = parsed(stated("two classes", statement))["deployment"]["basic"]
    assert (basic["name"], basic["description"]) == (RUDE, RUDE)
    assert basic["data_curators"] == [RUDE, "- x", "null"]
