"""The language model: texts as examples, perplexity, and runs that can be resumed."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.experiments import downloads
from privagrad.experiments.language import pretraining, training
from privagrad.experiments.language import tuning as language_tuning
from privagrad.experiments.language.corpus import (
    Sequences,
    Texts,
    Vocabulary,
    read_folder,
    read_texts,
    read_tokens,
)
from privagrad.experiments.language.model import LanguageModel, perplexity
from privagrad.experiments.language.pretraining import _windows
from privagrad.experiments.language.public import public_model, public_moments
from privagrad.experiments.language.settings import RECIPES, Plan, Setting
from privagrad.experiments.language.tables import COLUMNS, interval
from privagrad.experiments.language.training import _factors, train
from privagrad.experiments.language.tuning import Rung, halve, ladder, read_trials
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bands import Correlation
from privagrad.privacy.events import GaussianEvent

WORDS = ["the", "cat", "saw", "a", "dog", "and", "ran", "away", "from", "it", "."]


def story(lines: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(WORDS), (lines, 12), generator=generator)
    # Each word is often followed by the next one in the list: something to learn.
    picks[:, 1::2] = (picks[:, ::2] + 1) % len(WORDS)
    return "\n".join(" ".join(WORDS[i] for i in row) for row in picks.tolist())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "public").mkdir(parents=True)
    (data / "train.txt").write_text(story(1200, 0), encoding="utf-8")
    (data / "valid.txt").write_text(story(40, 1), encoding="utf-8")
    (data / "public" / "wiki.txt").write_text(story(150, 2), encoding="utf-8")
    return data


def test_examples_are_windows_of_the_stream() -> None:
    stream = torch.arange(75)
    data = Sequences(stream, 35)
    assert len(data) == 2
    words, following = data[1]
    assert words.tolist() == list(range(35, 70))
    assert following.tolist() == list(range(36, 71))


def test_the_vocabulary_has_the_frequent_words_and_one_for_others() -> None:
    words = Vocabulary.of(["a", "a", "a", "b", "b", "c", "<unk>", "<unk>", "<unk>", "<unk>"], 3)
    assert words.numbers == {"<unk>": 0, "a": 1, "b": 2}
    assert words.encode(["b", "c", "a"]).tolist() == [2, 0, 1]


def test_sorted_lists_of_public_sentences_are_shuffled(tmp_path: Path) -> None:
    lines = [f"sentence {n:03}" for n in range(100)]
    (tmp_path / "list.txt").write_text("\n".join(lines), encoding="utf-8")
    words = read_folder(tmp_path)
    found = [" ".join(words[k : k + 2]) for k in range(0, len(words), 3)]
    assert sorted(found) == lines
    follows = sum(b == lines[min(lines.index(a) + 1, 99)] for a, b in pairwise(found))
    assert follows < 10
    assert read_folder(tmp_path) == words
    # A text keeps its order.
    (tmp_path / "list.txt").write_text("\n".join(found), encoding="utf-8")
    assert read_folder(tmp_path) == words


def test_windows_of_public_streams_follow_each_other() -> None:
    text = torch.arange(5000)
    for epoch in (0, 1):
        words, targets = zip(*_windows(text, epoch), strict=True)
        assert len({len(part) for part in words}) == 1
        inputs, following = torch.cat(words, 1), torch.cat(targets, 1)
        assert torch.equal(following, (inputs + 1) % 5000)
        assert torch.equal(inputs[:, 1:], following[:, :-1])
        assert inputs.shape == (20, 210)  # three windows of 70 words in each stream
        assert len(set(inputs.flatten().tolist())) == 4200
    assert not torch.equal(next(_windows(text, 0))[0], next(_windows(text, 1))[0])


def test_the_papers_sizes() -> None:
    assert sum(p.numel() for p in LanguageModel(8000).parameters()) == 2_160_320


@pytest.mark.parametrize("carried", [True, False])
def test_perplexity_is_that_of_the_definition(carried: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(9, 6)
    stream = torch.randint(0, 9, (128 * 35 + 150,))
    inputs, targets = stream[None, :-1], stream[1:]
    with torch.no_grad():
        if carried:
            logits = model.decoder(model.lstm(model.embedding(inputs))[0])[0]
        else:
            parts = model.embedding(inputs).split(35, 1)
            logits = torch.cat([model.decoder(model.lstm(part)[0]) for part in parts], 1)[0]
        expected = math.exp(float(F.cross_entropy(logits, targets)))
    assert perplexity(model, stream, carried) == pytest.approx(expected, rel=1e-4)


def test_schedules() -> None:
    assert _factors("constant", 3) == [1.0, 1.0, 1.0]
    assert _factors("linear", 4) == [1.0, 0.75, 0.5, 0.25]
    warm = _factors("warm-up", 20)
    assert warm[:2] == [0.5, 1.0]
    assert warm[-1] == pytest.approx(1 / 18)


def texts(folder: Path) -> Texts:
    return read_texts(folder, folder / "public", quick=True)


@pytest.mark.parametrize(
    "method",
    [
        "dp-sgd",
        "pagan",
        "pasan",
        "sgd",
        "dp-sgd+words",
        "pagan+words",
        "pasan+words",
        "dp-sgd+public",
        "pagan+public",
        "pasan+public",
        "adagrad+public",
    ],
)
def test_every_method_learns_something(folder: Path, method: str, tmp_path: Path) -> None:
    sizes = {"dp-sgd": 8.0, "pagan": 0.3, "pasan": 0.05, "sgd": 8.0, "adagrad": 0.05}
    step_size = sizes[method.partition("+")[0]]
    setting = Setting(method, 8.0, step_size, epochs=3, batch_size=20, width=16)
    result = train(setting, texts(folder), tmp_path / "runs" / method)
    assert result["valid_perplexity"] < 12.5  # 13 kinds of words: 13 before training
    if setting.private:
        assert 7.5 < result["epsilon_spent"] <= 8.0


def test_a_trial_has_the_noise_and_the_steps_of_its_run(folder: Path, tmp_path: Path) -> None:
    data = texts(folder)
    setting = Setting("dp-sgd", 4.0, 4.0, epochs=2, batch_size=40, width=8)
    run = training._Training(setting, data, tmp_path / "run")
    trial = training._Training(replace(setting, sample=5), data, tmp_path / "trial")
    noise = [
        t.optimizer.noise_multiplier * t.optimizer.max_grad_norm / t.optimizer.expected_batch_size
        for t in (run, trial)
    ]
    assert noise[1] == pytest.approx(noise[0], rel=1e-12)
    assert trial.optimizer.expected_batch_size == 5
    assert (trial.steps, trial.step_sizes) == (run.steps, run.step_sizes)
    result = train(replace(setting, sample=5), data, tmp_path / "trial")
    assert result["noise_multiplier"] == run.optimizer.noise_multiplier
    assert result["epsilon_spent"] == math.inf  # a trial is not private, and says so
    assert not (tmp_path / "trial").exists()
    # Without noise there is nothing to keep but the size of steps.
    plain = training._Training(
        Setting("sgd", math.inf, 4.0, epochs=2, batch_size=40, width=8, sample=5), data, tmp_path
    )
    assert plain.steps == math.ceil(run.steps / 8)
    assert plain.loader.batch_size == 40


def test_trials_of_the_command_compare_shaped_noise_with_the_ball(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["reproduce", "table1", "--data-dir", str(folder), "--quick", "--epochs", "1"]
    command += ["--public-dir", str(folder / "public"), "--out", str(out), "--epsilons", "3"]
    done = CliRunner().invoke(app, [*command, "--methods", "dp-sgd,pasan", "--sample", "5"])
    assert done.exit_code == 0, done.output
    assert "against DP-SGD" not in (out / "table1.md").read_text()  # one seed has no interval
    more = ["--methods", "dp-sgd,pasan", "--sample", "5", "--seeds", "2"]
    assert CliRunner().invoke(app, [*command, *more]).exit_code == 0
    with (out / "table1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epsilon_spent"] for row in rows] == ["inf"] * 4
    seen = {(row["method"], row["seed"]): float(row["valid_perplexity"]) for row in rows}
    rises = [100 * (seen["pasan", s] / seen["dp-sgd", s] - 1) for s in "01"]
    table = (out / "table1.md").read_text()
    assert f"PASAN against DP-SGD at epsilon 3: {sum(rises) / 2:+.1f} %" in table
    assert "Not private" in table


def test_without_privacy_the_mean_gradient_is_bounded(folder: Path, tmp_path: Path) -> None:
    setting = Setting("sgd", math.inf, 1.0, radius=1e-3, epochs=1, batch_size=40, width=8)
    run = training._Training(setting, texts(folder), tmp_path)
    before = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.epoch(None)
    moved = nn.utils.parameters_to_vector(run.model.parameters()).detach() - before
    assert 0 < float(moved.norm()) <= 1e-3 * sum(run.step_sizes) * 1.01


def test_intervals_are_students() -> None:
    middle, half = interval([1.0, 2.0, 3.0])
    assert middle == 2.0
    assert half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_batches_in_parts_are_the_same_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = texts(folder)
    setting = Setting("dp-sgd", 4.0, 4.0, epochs=1, batch_size=40, width=8)
    whole = train(setting, data, tmp_path / "whole")
    monkeypatch.setattr(training, "_IN_MEMORY", 7)
    parts = train(setting, data, tmp_path / "parts")
    assert parts["valid_perplexity"] == pytest.approx(whole["valid_perplexity"], rel=1e-3)
    assert parts["epsilon_spent"] == whole["epsilon_spent"]
    assert parts["steps_made"] == whole["steps_made"]


@pytest.mark.parametrize("share", [2 / 3, 3 / 4])
def test_a_run_goes_on_after_its_last_epoch(folder: Path, tmp_path: Path, share: float) -> None:
    """What was released after it and lost with the process is paid all the same."""
    data = texts(folder)
    setting = Setting("dp-sgd", 4.0, 2.0, epochs=3, batch_size=20, width=8)

    class Killed(Exception):
        pass

    def kill(step: int, total: int, perplexity: float, epsilon: float) -> None:
        if step >= share * total:
            raise Killed

    with pytest.raises(Killed):
        train(setting, data, tmp_path / "run", kill)
    result = train(setting, data, tmp_path / "run")
    assert len(result["valid_curve"]) == 3
    assert (result["epsilon_spent"] <= 4.0) == (share == 2 / 3)


def test_the_command_writes_table_and_figure(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["reproduce", "table1", "--data-dir", str(folder), "--quick", "--epochs", "1"]
    command += ["--public-dir", str(folder / "public"), "--out", str(out), "--epsilons", "3"]
    done = CliRunner().invoke(app, [*command, "--methods", "dp-sgd,pagan,sgd"])
    assert done.exit_code == 0, done.output
    assert "no test.txt" in done.output
    header, *rows = (out / "table1.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert [row.split(",")[0] for row in rows] == ["dp-sgd", "pagan", "sgd"]
    table = (out / "table1.md").read_text()
    assert "238.44" in table
    assert "not comparable" in table
    assert (out / "figure2.png").stat().st_size > 1000
    # Finished runs are read, not made again.
    results = sorted(out.glob("runs-*/*/result.json"))
    changed = json.loads(results[0].read_text()) | {"valid_perplexity": 77.0}
    results[0].write_text(json.dumps(changed))
    again = CliRunner().invoke(app, [*command, "--methods", "dp-sgd,pagan,sgd"])
    assert "77.0" in again.output


def test_ladders_fit_into_the_time_and_end_with_three() -> None:
    for minutes in (1, 5, 20, 100, 1000):
        rungs = ladder(60 * minutes, 0.5, 1673, 30)
        assert rungs[-1].candidates == 3
        assert rungs[-1].size <= 1673
        assert rungs[0].size >= 30
        assert sum(rung.candidates * rung.size for rung in rungs) * 0.5 <= 60 * minutes
    assert [rung.candidates for rung in ladder(6000, 0.5, 1673, 30)] == [27, 9, 3]
    with pytest.raises(ValueError, match="minutes of tuning"):
        ladder(30, 0.5, 1673, 30)


def test_halving_finds_the_best_and_spends_most_on_the_good() -> None:
    asked: list[tuple[int, int]] = []

    def score(candidate: int, rung: int, size: int) -> float:
        asked.append((candidate, size))
        # Small trials flatter candidate 0.
        return candidate if size > 10 or candidate else -1.0

    rungs = [Rung(9, 10), Rung(3, 30)]
    assert halve([5, 3, 0, 8, 7, 2, 9, 6, 4, 1], rungs, score) == 0
    assert [c for c, size in asked if size == 30] == [0, 2, 3]
    assert len(asked) == 12


def test_tuning_is_logged_and_its_price_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_tuning, "LEAST", 3)
    # A clock of its own: how many trials fit must not depend on the machine.
    ticks = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: 1.5 * next(ticks)))
    out = tmp_path / "out"
    command = ["reproduce", "table1", "--data-dir", str(folder), "--quick", "--epochs", "2"]
    command += ["--out", str(out), "--epsilons", "8", "--methods", "dp-sgd", "--tune", "0.15"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    trials = read_trials(out / "tuning.csv")
    assert len(trials) == 4  # one to find the pace, and three candidates
    chosen = min((t for t in trials if t.rung == trials[-1].rung), key=lambda t: t.valid_perplexity)
    row = (out / "table1.csv").read_text().splitlines()[1].split(",")
    assert float(row[4]) == chosen.step_size
    assert float(row[5]) == chosen.radius
    # The price is that of as many private runs.
    examples = len(Sequences(texts(folder).train))
    steps = (len(trials) + 1) * 2 * math.ceil(examples / 50)
    run = GaussianEvent(trials[0].noise_multiplier, steps, "poisson", examples, 50)
    expected = PrivacyPlan((run,)).epsilon(1e-5)
    assert f"epsilon {expected:.3g} instead of 8" in (out / "table1.md").read_text()
    # Trials in the log are not made again.
    assert CliRunner().invoke(app, command).exit_code == 0
    assert read_trials(out / "tuning.csv") == trials


def test_recipes_grow_with_the_batch() -> None:
    for name, recipe in RECIPES.items():
        plan = Plan((name,), (2.0,))
        (own,) = plan.settings()
        (larger,) = replace(plan, batch_size=4 * own.batch_size).settings()
        assert own.batch_size == recipe.batch_size(3.0 if own.private else math.inf)
        assert larger.batch_size == 4 * own.batch_size
        growth = {"dp-sgd": 4.0, "pasan": 1.0, "pagan": 1.0}.get(own.kind, 2.0)
        assert larger.step_size == pytest.approx(growth * own.step_size)


@pytest.mark.parametrize("method", ["dp-sgd", "pagan"])
@pytest.mark.parametrize("correlation", [1, 3, "auto"])
def test_correlated_noise_stays_in_the_budget(
    folder: Path, tmp_path: Path, method: str, correlation: Correlation
) -> None:
    """And is that of the engine; "auto" follows the public rule, for plain steps alone."""
    setting = Setting(method, 8.0, 1.0, epochs=1, batch_size=15, width=8, correlation=correlation)
    data = texts(folder)
    run = training._Training(setting, data, tmp_path / "correlated" / "run")
    plain = training._Training(replace(setting, correlation=1), data, tmp_path / "plain" / "run")
    while run.step < run.steps:
        run.epoch(None)
    result = run.result()
    assert {event.bands for event in run.engine.accountant.events} == {result["bands"]}
    assert 7.5 < result["epsilon_spent"] <= 8.0
    if correlation == "auto":
        assert (run.bands > 1) == (method == "dp-sgd")
    else:
        assert run.bands == correlation
    assert (run.noise_multiplier > plain.noise_multiplier) == (run.bands > 1)


def test_correlated_noise_stays_in_the_budget_of_a_run_that_is_resumed(
    folder: Path, tmp_path: Path
) -> None:
    """Each epoch in a process of its own, and each begins another block."""
    setting = Setting("dp-sgd", 8.0, 1.0, epochs=3, batch_size=28, width=8, correlation=3)
    data = texts(folder)
    for _ in range(setting.epochs):
        run = training._Training(setting, data, tmp_path / "run")
        assert run.steps_per_epoch % 3
        run.epoch(None)
        run.save()
    assert 7.5 < run.cost() <= 8.0


@pytest.mark.parametrize("correlation", ["always", "-1", "0", "99"])
def test_correlations_that_do_not_exist_are_refused(
    folder: Path, tmp_path: Path, correlation: str
) -> None:
    command = ["reproduce", "table1", "--data-dir", str(folder), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--correlation", correlation])
    assert done.exit_code == 2
    assert "Expected" in done.output


@pytest.mark.parametrize("start", ["words", "public"])
def test_starts_from_public_text_need_one(folder: Path, tmp_path: Path, start: str) -> None:
    command = ["reproduce", "table1", "--data-dir", str(folder), "--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--methods", "dp-sgd", "--start", start])
    assert done.exit_code == 2
    assert "--public-dir" in done.output


def test_a_public_start_is_the_model_of_the_public_text(folder: Path, tmp_path: Path) -> None:
    """Private steps of size 0 leave it as it is, and it is trained once for all runs."""
    data = texts(folder)
    setting = Setting("dp-sgd+public", 1.0, 1e-30, epochs=1, batch_size=50, width=16)
    seeds = (replace(setting, seed=seed) for seed in (0, 1))
    found = [train(one, data, tmp_path / f"{one.seed}")["valid_perplexity"] for one in seeds]
    model = LanguageModel(len(data.vocabulary), 16)
    model.load_state_dict(public_model(data, setting, tmp_path))
    assert found == [perplexity(model, data.valid)] * 2
    assert found[0] < 12.5


def test_the_public_model_depends_on_the_public_text_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "_STEP", 0.03)  # this text is short
    (folder / "public" / "wiki.txt").write_text(story(1500, 2), encoding="utf-8")
    data = texts(folder)
    setting = Setting("dp-sgd+public", 1.0, 1.0, width=16)
    found = public_model(data, setting, tmp_path / "one")
    model = LanguageModel(len(data.vocabulary), 16)
    model.load_state_dict(found)
    assert perplexity(model, data.valid) < 11.5  # 12.0 with word frequencies alone
    others = replace(data, train=data.train.flip(0), valid=data.valid.flip(0))
    again = public_model(others, setting, tmp_path / "two")
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_public_training_carries_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 0 0 comes 1, after 1 0 comes 0: one word alone does not tell."""
    text = torch.tensor([0, 0, 1, 1]).repeat(300)
    monkeypatch.setattr(pretraining, "_WINDOW", 1)
    monkeypatch.setattr(pretraining, "_STEP", 0.03)
    model = pretraining.pretrained(text, vocabulary=2, width=8)
    assert perplexity(model, text) < 1.8  # 2.0 without the state
    assert model.lstm.dropout == 0


def test_moments_of_a_public_start_are_those_of_its_gradients(folder: Path, tmp_path: Path) -> None:
    data = texts(folder)
    setting = Setting("pagan+public", 1.0, 0.1, width=8)
    moments = public_moments(data, setting, tmp_path)
    model = LanguageModel(len(data.vocabulary), 8)
    model.load_state_dict(public_model(data, setting, tmp_path))
    examples = Sequences(data.require_public(setting.method))
    squares = []
    for row in range(len(examples)):
        words, targets = examples[row]
        loss = model(words[None], targets[None])
        (gradient,) = torch.autograd.grad(loss, [model.get_parameter("decoder.bias")])
        squares.append(gradient.double() ** 2)
    mean = torch.stack(squares).mean(0)
    assert torch.allclose(moments["decoder.bias"].double(), mean + 2 * mean.mean(), rtol=1e-4)


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    for extra in ([], ["--data-dir", str(tmp_path)]):
        done = CliRunner().invoke(app, ["reproduce", "table1", *extra])
        assert done.exit_code == 2
        assert "Traceback" not in done.output


def test_downloads_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    sums = {}
    for name in ("train.txt", "valid.txt"):
        (source / name).write_text(f"words of {name}\n")
        sums[name] = hashlib.sha256((source / name).read_bytes()).hexdigest()
    monkeypatch.setattr(downloads, "SHA256", sums)
    downloads.fetch_wikitext2(tmp_path / "got", source.as_uri())
    assert read_tokens(tmp_path / "got" / "train.txt")[:2] == ["words", "of"]
    (source / "train.txt").write_text("something else\n")
    with pytest.raises(OSError, match="SHA-256"):
        downloads.fetch_wikitext2(tmp_path / "other", source.as_uri())
    assert not (tmp_path / "other" / "train.txt").exists()
