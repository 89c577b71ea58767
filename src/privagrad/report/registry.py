"""A privacy card as an entry of the public registry of deployments (OpenDP's), in YAML.

Nothing is invented: what the run does not know comes from the owner's statement, or is left out and
lowers the tier. What the registry requires must be stated.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from privagrad.report.card import Card
from privagrad.report.card_markdown import markdown_escape

_REQUIRED = ("name", "curators", "description", "purpose", "region", "publication_date",
             "registry_authors")  # fmt: skip
_LONGEST_SLUG = 60
_POST_PROCESSING = (
    "Centres, units, coefficients in the columns' own units, probabilities and figures are "
    "computed from noisy sums alone. Shares are cut to [0, 1]."
)
_RELATION = {
    "zero-out": "Two tables with the same number of {unit}s n are adjacent if one {unit} "
    "contributes nothing in one of them. n is public.",
    "replace-one": "Two tables with the same number of {unit}s n are adjacent if they differ in "
    "the values of one {unit}. n is public.",
}


def registry_entry(card: Card) -> dict[str, Any]:
    """The card as the registry's schema has it, with the highest tier that its fields allow.

    The status is "Draft". A run that is not private is refused.
    """
    statement = card["statement"]
    if missing := [name for name in _REQUIRED if statement[name] is None]:
        raise ValueError(
            f"Expected a statement with {', '.join(_REQUIRED)} for the registry, found none for "
            f"{', '.join(missing)}. Fill them in: privagrad card --template statement.toml"
        )
    if not card["guarantee"]["private"]:
        raise ValueError(
            "Expected a private run for the registry, found one that is not: "
            f"{card['guarantee']['words']}"
        )
    parts = {
        "dp_variant": _variant(card),
        "privacy_loss": _loss(card),
        "deployment_model": _model(card),
        "accounting": _accounting(card),
        "implementation": _implementation(card),
    }
    filled = {name: told for name, part in parts.items() if (told := _without_blanks(part))}
    deployment = {"basic": _without_blanks(_basic(statement)), **filled}
    deployment["administrative"] = _without_blanks(
        {
            "sources": "\n\n".join(statement["links"]) if statement["links"] else None,
            "notes": _notes(card),
            "registry_authors": statement["registry_authors"],
        }
    )
    return {
        "url_slug": slug_of(statement["name"]),
        "status": "Draft",
        "tier": _tier(parts),
        "deployment": deployment,
    }


def registry_yaml(card: Card) -> str:
    """The entry as YAML that any parser reads in the same way."""
    return "\n".join(_yaml(registry_entry(card), 0)) + "\n"


def slug_of(name: str) -> str:
    """Letters and digits of a name with hyphens between; of other scripts, a fingerprint."""
    latin = unicodedata.normalize("NFKD", name.casefold()).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", latin).strip("-")[:_LONGEST_SLUG].strip("-")
    return slug or f"deployment-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _basic(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": told["name"],
        "data_curators": told["curators"],
        "description": told["description"],
        "intended_use": told["purpose"],
        "data_product_type": "Machine learning model",
        "data_product_region": told["region"],
        "publication_date": told["publication_date"],
        "data_product_sector": told["sector"],
    }


def _variant(card: Card) -> dict[str, Any]:
    public = [markdown_escape(fact) for fact in card["neighbours"]["public"]]
    return {
        "variant_name": "Approximate DP",
        "data_domain": card["statement"]["data_description"],
        "unprotected_quantities": "; ".join(public) or None,
    }


def _loss(card: Card) -> dict[str, Any]:
    guarantee, unit = card["guarantee"], card["unit"]["level"]
    stated = card["statement"]["privacy_unit"]
    return {
        "privacy_unit": f"{unit.capitalize()}-level. {stated}" if stated else f"{unit}-level",
        "privacy_unit_details": f"{_RELATION[card['neighbours']['relation']].format(unit=unit)} "
        f"{card['unit']['contribution']} Rows of one person: "
        f"{card['statement']['rows_per_person'] or 'not stated'}.",
        "privacy_parameters": {"epsilon": guarantee["epsilon"], "delta": guarantee["delta"]},
        "privacy_parameters_details": " ".join([guarantee["comparison"], *guarantee["remarks"]]),
    }


def _model(card: Card) -> dict[str, Any]:
    told, ledger = card["statement"], card["ledger"]
    runs = ledger["account"]["runs"] if ledger["account"] else []
    many = sum(run["state"] != "released" for run in runs) > 1
    known = {"Raw rows": told["raw_access"], "Releases": told["release_access"],
             "Assumed": told["trust"]}  # fmt: skip
    actors = " ".join(f"{name}: {text}" for name, text in known.items() if text)
    return {
        "model_name": "Central",
        "model_name_details": card["trust"][0],
        "actors": actors if all(known.values()) else None,
        "release_type": "Many releases" if many else "One release",
        "release_type_details": told["future_releases"],
        "data_source_type": told["data_source"],
        "access_type": "Non-interactive",
        "access_type_details": f"{ledger['query_model']} {ledger['words']}",
    }


def _accounting(card: Card) -> dict[str, Any]:
    accountant = card["accountant"]
    return {
        "post_processing": _POST_PROCESSING,
        "composition": f"Adaptive sequential composition of all releases by {accountant['name']}, "
        f"privagrad {accountant['version']}. {accountant['words']} {_events(card)}",
    }


def _implementation(card: Card) -> dict[str, Any]:
    told = card["statement"]
    channels = " ".join(
        f"{c['channel'].capitalize()}: {c['status']}" for c in card["side_channels"]
    )
    security = [told["storage_security"], told["access_control"]]
    kinds = ", ".join(m["mechanism"] for m in card["mechanism"]["mechanisms"])
    text = f"{kinds}. privagrad {card['product']['made_with']}. {channels}"
    if all(security):
        text += f" Storage: {security[0]} Access: {security[1]}"
    return {
        "preprocessing_and_hyperparameter_tuning": told["preprocessing"],
        "mechanisms": text if all(security) else None,
        "justification": told["justification"],
    }


def _events(card: Card) -> str:
    """The releases in short, so that a reader can compose them again."""
    kinds = []
    for event in card["native"]["events"]:
        if event["kind"] == "SelectEvent":
            kinds.append(f"the best of {event['mean']:g} runs on average")
        else:
            everybody = f"all {card['unit']['level']}s"
            noise, sampling = event["noise_multiplier"], event["sampling"] or everybody
            purpose = markdown_escape(event["purpose"])
            kinds.append(
                f"{event['count']} x {purpose} at noise multiplier {noise:.6g} ({sampling})"
            )
    return "Releases: " + "; ".join(kinds) + "."


def _notes(card: Card) -> str | None:
    figures = ", ".join(
        f"{f['name'].replace('_', ' ')} {f['value']:.4g} (noise {f['noise']:.2g})"
        for f in card["utility"]["figures"]
        if f["value"] is not None and f["noise"] is not None
    )
    found = [card["statement"]["notes"], f"Private figures: {figures}." if figures else None]
    return " ".join(text for text in found if text) or None


def _tier(parts: dict[str, dict[str, Any]]) -> int:
    """3 if nothing is missing, 2 if the fields of tier 2 are there, else 1."""
    model = parts["deployment_model"]
    if model["data_source_type"] is None:
        return 1
    complete = all(value is not None for part in parts.values() for value in part.values())
    return 3 if complete else 2


def _without_blanks(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if value is not None}


def _yaml(value: dict[str, Any], depth: int) -> Iterator[str]:
    """Blocks of names; texts in double quotes, in which JSON and YAML agree."""
    indent = "  " * depth
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield f"{indent}{name}:"
            yield from _yaml(inner, depth + 1)
        elif isinstance(inner, list):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {_scalar(part)}" for part in inner)
        else:
            yield f"{indent}{name}: {_scalar(inner)}"


def _scalar(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    text = repr(value)
    # YAML 1.1 reads 1e-06 as a text.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
