"""A privacy card as Markdown, for people: the guarantee in words first, then what is open.

Texts from outside (names of columns, the owner's words) are escaped: in a card they are text, never
markup, whatever reads the Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from privagrad.report.card import Card
from privagrad.report.card_run import BEYOND
from privagrad.report.page import readable, scientific
from privagrad.report.statement import one_line, question_of

# An underscore within a word is no markup.
_MARKUP = re.compile(r"([\\`*\[\]|~$^{}]|(?<![^\W_])_|_(?![^\W_])|^#)")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
_MOST_RUNS = 50


def card_markdown(card: Card) -> str:
    """The card as one Markdown text."""
    return "\n".join(_lines(card)).rstrip() + "\n"


def markdown_escape(text: object) -> str:
    """Text in one line that Markdown and HTML show as it is: no markup, no links."""
    line = one_line(text)
    line = "".join(_ENTITIES.get(character, character) for character in line)
    line = _MARKUP.sub(r"\\\1", line)
    line = re.sub(r"(?i)\b(https?|ftp|mailto|xmpp):", r"\1&#58;", line)
    line = re.sub(r"(?i)\bwww\.", "www&#46;", line)
    return re.sub(r"^([-+]|=+|\d+[.)])(?=\s|$)", _at_the_start, line)


def _at_the_start(found: re.Match[str]) -> str:
    """What would begin a list or underline a heading."""
    return f"{found[1][:-1]}\\{found[1][-1]}"


def _lines(card: Card) -> Iterator[str]:
    statement, product = card["statement"], card["product"]
    name = statement["name"] or product["target"] or product["kind"]
    yield from (f"# Privacy card: {markdown_escape(name)}", "")
    yield from _guarantee(card)
    yield from _open_questions(card)
    yield from _product(card)
    yield from _native(card)
    yield from _protection(card)
    yield from _budget(card)
    yield from _limits(card)
    yield from _statement(card)
    yield from _questions(card)
    yield from (
        f"Written by privagrad {markdown_escape(card['library']['version'])}, format "
        f"{card['format']} {card['version']}. The questions are those of the draft of NIST SP "
        "800-226, in our own words.",
    )


def _guarantee(card: Card) -> Iterator[str]:
    guarantee = card["guarantee"]
    yield from ("## The guarantee", "")
    kind = "**Private.**" if guarantee["private"] else "**NOT PRIVATE.**"
    yield from (f"{kind} {markdown_escape(guarantee['words'])}", "")
    if BEYOND in card["ledger"]["words"]:
        yield from (f"**Beyond its budget.** {BEYOND}", "")
    rows = [
        ("Epsilon", _epsilon(guarantee["epsilon"])),
        ("Delta", _delta(guarantee["delta"])),
        ("Unit of privacy", card["unit"]["level"]),
        ("Neighbouring relation", card["neighbours"]["relation"]),
        ("Definition", guarantee["definition"]),
    ]
    yield from _table(("", ""), rows)
    yield from (markdown_escape(guarantee["comparison"]), "")
    yield from _list(guarantee["remarks"])


def _open_questions(card: Card) -> Iterator[str]:
    questions = card["questions"]
    left = [entry["question"] for entry in questions if entry["status"] == "open"]
    yield from ("## What is open", "")
    if not left:
        yield from ("Every question is answered by the run or by the owner of the data.", "")
        return
    yield from (f"Nobody has answered {len(left)} of {len(questions)} questions:", "")
    yield from _list(left)


def _product(card: Card) -> Iterator[str]:
    product, algorithm = card["product"], card["mechanism"]["algorithm"]
    told = {
        "What it is": product["kind"],
        "It predicts": product["target"],
        f"{card['unit']['level'].capitalize()}s": product["rows"],
        "Columns after encoding": product["columns"],
        "Classes": product["classes"],
        "Table": product["table"],
        "Made at": product["made_at"],
        "Made with": f"privagrad {product['made_with']}" if product["made_with"] else None,
        "Algorithm": algorithm["name"],
        "Loss": algorithm["loss"],
        "Steps": algorithm["steps"],
        "Rows in a step": algorithm["batch_size"],
    }
    yield from ("## What was released", "")
    yield from _table(("", ""), [(k, v) for k, v in told.items() if v is not None])
    utility = card["utility"]
    yield from ("### How good it is", "")
    if utility["verdict"]:
        yield from (markdown_escape(utility["verdict"]), "")
    rows = [
        (f["name"].replace("_", " "), _number(f["value"]), _interval(f["noise"]))
        for f in utility["figures"]
    ]
    if rows:
        yield from _table(("figure", "value", "95 % interval"), rows)
    yield from (f"{markdown_escape(utility['words'])} {markdown_escape(utility['effects'])}", "")


def _native(card: Card) -> Iterator[str]:
    native = card["native"]
    yield from ("## All releases", "")
    units = f"{card['unit']['level']}s"
    rows = [
        (e["purpose"], e["count"], _noise(e), e.get("sampling") or f"all {units}")
        for event in native["events"]
        for e in (event["events"] if event["kind"] == "SelectEvent" else [event])
    ]
    chosen = [event for event in native["events"] if event["kind"] == "SelectEvent"]
    if rows:
        yield from _table(("purpose", "times", "noise multiplier", units), rows)
    for event in chosen:
        yield from (
            f"These are the releases of one run. The best of a secret number of runs was kept, "
            f"{_number(event['mean'])} on average.",
            "",
        )
    gaussian = native["gaussian"]
    if gaussian["mu"] is not None:
        kind = "exactly" if gaussian["is"] == "exact" else "at most"
        yield from (
            f"Gaussian differential privacy: mu is {kind} {_number(gaussian['mu'])}. "
            f"{markdown_escape(gaussian['words'])}",
            "",
        )
    else:
        yield from (f"Mu is not known. {markdown_escape(gaussian['words'])}", "")
    at = [(_delta(one["delta"]), _epsilon(one["epsilon"])) for one in native["epsilon_at"]]
    yield from ("The same releases at other values of delta:", "")
    yield from _table(("delta", "epsilon"), at)
    yield from (markdown_escape(native["comparison"]), "")


def _protection(card: Card) -> Iterator[str]:
    accountant = card["accountant"]
    rows = [
        ("Unit", card["unit"]["words"]),
        ("Its contribution", card["unit"]["contribution"]),
        ("Does the bound reset?", card["unit"]["resets"]),
        ("Neighbours", card["neighbours"]["words"]),
        ("Sampling", card["sampling"]["words"]),
        ("Noise", f"{card['noise']['kind']}. {card['noise']['words']}"),
        (
            "Accountant",
            f"{accountant['name']}, privagrad {accountant['version']}, dp-accounting "
            f"{accountant['dp_accounting']}. {accountant['words']}",
        ),
    ]
    yield from ("## How it is protected", "")
    yield from _table(("", ""), rows)
    yield from ("Public, and not protected:", "")
    yield from _list(card["neighbours"]["public"] or ["Not stated."])
    mechanisms = [(m["mechanism"], m["proof"], m["tests"]) for m in card["mechanism"]["mechanisms"]]
    if mechanisms:
        yield from ("Proofs and tests, as paths in the source of privagrad:", "")
        yield from _table(("mechanism", "proof", "tests"), mechanisms)


def _budget(card: Card) -> Iterator[str]:
    ledger, account = card["ledger"], card["ledger"]["account"]
    yield from ("## The budget of the data", "")
    yield from (f"{markdown_escape(ledger['words'])} {markdown_escape(ledger['query_model'])}", "")
    if account is None:
        return
    rows = [
        ("Budget", ledger["dataset"] or "not named"),
        ("Total epsilon", _number(account["epsilon"])),
        ("Delta", _delta(account["delta"])),
        ("Spent by all runs", _epsilon(account["spent"])),
        ("Left", _number(account["left"])),
        ("Period", account["period"] or "none: the total never starts again"),
        ("Who may spend", account["policy"] or "not stated in the ledger"),
        ("When it is used up", ledger["when_used_up"]),
    ]
    yield from _table(("", ""), rows)
    yield from (markdown_escape(card["guarantee"]["comparison"]), "")
    runs = [(r["run"], r["at"], r["state"], "this one" if r["this_run"] else "")
            for r in account["runs"]]  # fmt: skip
    yield from _table(("run", "reserved at", "state", ""), runs[-_MOST_RUNS:])
    if len(runs) > _MOST_RUNS:
        yield from (f"{len(runs) - _MOST_RUNS} earlier runs are in the JSON card alone.", "")


def _limits(card: Card) -> Iterator[str]:
    yield from ("## What is not protected", "")
    yield from _table(("output", "status"), [(o["what"], o["status"]) for o in card["not_private"]])
    yield from ("## What is assumed", "")
    yield from _list(card["trust"])
    yield from ("## Side channels", "")
    channels = [(channel["channel"], channel["status"]) for channel in card["side_channels"]]
    yield from _table(("channel", "status"), channels)


def _statement(card: Card) -> Iterator[str]:
    yield from ("## What the owner of the data states", "")
    yield from ("Nobody has checked this.", "")
    for name, value in card["statement"].items():
        told = "; ".join(value) if isinstance(value, list) else value
        text = "*open*" if told is None else markdown_escape(told)
        yield f"- **{markdown_escape(question_of(name))}** {text}"
    yield ""


def _questions(card: Card) -> Iterator[str]:
    yield from ("## All questions", "")
    rows = [(q["question"], q["status"], ", ".join(q["where"])) for q in card["questions"]]
    yield from _table(("question", "status", "place in the JSON card"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(markdown_escape(cell) for cell in row)} |"
    yield ""


def _list(texts: Iterable[str]) -> Iterator[str]:
    lines = [f"- {markdown_escape(text)}" for text in texts]
    yield from [*lines, ""] if lines else []


def _epsilon(value: float | str) -> str:
    return "infinite" if isinstance(value, str) else _number(value)


def _delta(value: float) -> str:
    return scientific(value, 2)


def _number(value: float | None) -> str:
    return readable(value)


def _interval(noise: float | None) -> str:
    return "not known" if noise is None else f"± {1.96 * noise:.2g}"


def _noise(event: Card) -> str:
    leak = f", leak {_delta(event['leak'])}" if event.get("leak") else ""
    return f"{_number(event['noise_multiplier'])}{leak}"
