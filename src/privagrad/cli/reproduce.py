"""`privagrad reproduce`: the experiments of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privagrad._internal import validate
from privagrad.cli._output import Json, JsonObject, ReportPath, command, say, say_where, show_table
from privagrad.cli.compare import Epsilons, Out, Workers, parse_epsilons
from privagrad.experiments.images import settings as image_settings
from privagrad.experiments.language.settings import RECIPES, STARTS, Plan, started
from privagrad.privacy.bands import Correlation
from privagrad.privacy.correlation import coefficients_of

app = typer.Typer(
    no_args_is_help=True,
    help="""Run the experiments of the paper.

They use public or synthetic data and seeded noise: the results are for figures, not for release.

Example: `privagrad reproduce figure1 --quick --report figure1.html`""",
)

Quick = Annotated[bool, typer.Option("--quick", help="A small version, about a minute.")]
_IMAGES = image_settings.Plan()
_IMAGE_METHODS = ",".join(_IMAGES.methods)
_IMAGE_EPSILONS = ",".join(f"{epsilon:g}" for epsilon in _IMAGES.epsilons)
_PLAN = Plan()
_METHODS = ",".join(_PLAN.methods)
_EPSILONS = ",".join(f"{epsilon:g}" for epsilon in _PLAN.epsilons)


@app.command()
@command
def figure1(
    out: Out = Path("figure1"),
    quick: Quick = False,
    workers: Workers = None,
    report: ReportPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Figure 1: six methods on absolute regression at epsilon 0.1, 1 and 4.

    The step size and the radius of every method are tuned in the same way; then each method is run
    30 times. Writes figure1.csv, .png, .svg and .json, and figure1-average.* for the averaged
    iterate.

    Example: `privagrad reproduce figure1 --out results --quick`
    """
    from privagrad.experiments import figure1 as experiment
    from privagrad.report.experiments import write_figure1_report

    summary = experiment.run(out, experiment.QUICK if quick else experiment.FULL, workers)
    if report is not None:
        write_figure1_report(report, summary)
    _print_figure1(summary)
    say_where(out, "figure1.csv", "figure1.png", "figure1-average.png", "figure1.json")
    return summary


@app.command()
@command
def rates(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("rates"),
    quick: Quick = False,
    report: ReportPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Rates: measured excess loss against n, d, epsilon and the decay of σ, and the bounds.

    Runs PAGAN on the box and PASAN on the ball, on the linear problems of the lower bounds. Prints
    measured and predicted slopes; writes rates.csv, .json, .png and .svg.

    Example: `privagrad reproduce rates --quick`
    """
    from privagrad.experiments import rates as experiment
    from privagrad.report.experiments import write_rates_report

    outcome = experiment.run(out, quick)
    slopes = [slope._asdict() for slope in outcome.slopes]
    if report is not None:
        points = [point._asdict() for point in outcome.points]
        write_rates_report(report, points, slopes, experiment.LABELS)
    rows = [
        (s.method.upper(), experiment.LABELS[s.varied], f"{s.measured:.2f}",
         f"{s.predicted:.2f}", f"{s.measured - s.predicted:+.2f}")
        for s in outcome.slopes
    ]  # fmt: skip
    columns = ("method", "against", "measured", "predicted", "difference")
    show_table("Slopes of log excess loss", columns, rows, left=2)
    say("Measured: medians over seeds. Predicted: the privacy terms of Theorems 1 and 2.")
    say_where(out, *(path.name for path in outcome.files))
    return {"slopes": slopes, "files": [str(path) for path in outcome.files]}


@app.command("figure2")
@app.command()
@command
def table1(
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with train.txt, valid.txt and, if you have it, test.txt."),
    ] = None,
    public_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with public text, for the moments of pasan and pagan and for --start."
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names separated by commas. dp-sgd+words starts as with --start words, and "
            "dp-sgd+public as with --start public; so do the others."
        ),
    ] = _METHODS,
    start: Annotated[
        str,
        typer.Option(
            help="What every method starts from: random weights; words: also biases of the word "
            "frequencies in the public text; public: a model of the public text (the best)."
        ),
    ] = "random",
    epsilons: Epsilons = _EPSILONS,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = _PLAN.epochs,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = _PLAN.seeds,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Expected examples of a step. The step sizes of dp-sgd, sgd and adagrad grow with "
            "it. Default: that of each method.",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Predict the results by trials with so many examples a step, which are much "
            "faster: with 60, within 1 % at batches of 1000. Trials are NOT private.",
        ),
    ] = None,
    vocabulary: Annotated[
        str, typer.Option(help="The text of the vocabulary: train (NOT private), or public.")
    ] = "train",
    correlation: Annotated[
        str | None,
        typer.Option(
            help="Over how many steps the noise is correlated: a number, or auto (by a public "
            "rule; for dp-sgd alone). Default: auto for dp-sgd+words, 1 for others."
        ),
    ] = None,
    tune: Annotated[
        float,
        typer.Option(
            min=0,
            help="Minutes of tuning of step sizes, radii and schedules, shared equally by all "
            "methods and epsilons.",
        ),
    ] = 0.0,
    download: Annotated[
        bool, typer.Option("--download", help="First download WikiText-2 into --data-dir.")
    ] = False,
    out: Out = Path("table1"),
    quick: Quick = False,
    report: ReportPath = None,
    as_json: Json = False,
) -> list[JsonObject]:
    """Table 1 and Figure 2: an LSTM language model on WikiText-2 at epsilon 3, 1 and 0.5.

    The setting is the paper's: 8,000 words, sequences of 35 words as units of privacy, 2,160,320
    parameters, batches of 250, 7 epochs. That is 1,673 steps, of about a second each on two cores.
    `table1` and `figure2` are the same command. It writes table1.csv, table1.md, curves.csv,
    figure2.png and figure2.svg. An interrupted run is resumed after its last finished epoch.

    Examples:

    `privagrad reproduce table1 --data-dir wikitext-2 --public-dir public --out results`

    `privagrad reproduce table1 --data-dir wikitext-2 --download --methods dp-sgd --quick`

    `privagrad reproduce table1 --data-dir wikitext-2 --methods dp-sgd --epsilons 3 --tune 120`

    `privagrad reproduce table1 --data-dir wikitext-2 --public-dir public --sample 60 --seeds 3`
    """
    if data_dir is None:
        raise ValueError(
            "Expected --data-dir with train.txt and valid.txt, found none: give the folder, or "
            "--data-dir NEW_FOLDER --download."
        )
    validate.choice("start", start, STARTS)
    named = (started(name, start) for name in methods.split(","))
    names = tuple(validate.choice("method", name, RECIPES) for name in named)
    plan = Plan(
        names, parse_epsilons(epsilons), epochs, seeds, batch_size, sample, quick, 60 * tune,
        _bands(correlation),
    )  # fmt: skip
    from privagrad.experiments.downloads import fetch_wikitext2
    from privagrad.experiments.language.corpus import read_texts
    from privagrad.experiments.language.runs import run
    from privagrad.report.experiments import write_language_report

    if download:
        fetch_wikitext2(data_dir)
    texts = read_texts(data_dir, public_dir, vocabulary, quick)
    out.mkdir(parents=True, exist_ok=True)
    rows = run(texts, plan, out)
    if report is not None:
        write_language_report(report, rows)
    _print_table1(rows)
    if texts.test is None:
        say("There was no test.txt: the test column is empty.")
    say_where(out, "table1.csv", "table1.md", "curves.csv", "figure2.png", "figure2.svg")
    return rows


@app.command()
@command
def images(
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with mnist.npz: x_train, y_train, x_test, y_test.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Names separated by commas.")] = _IMAGE_METHODS,
    epsilons: Epsilons = _IMAGE_EPSILONS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = _IMAGES.seeds,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="Measure on a sixth of the training rows, not on the test rows."
        ),
    ] = False,
    out: Out = Path("images"),
    quick: Quick = False,
    report: ReportPath = None,
    as_json: Json = False,
) -> list[JsonObject]:
    """MNIST at epsilon 1 and 3: a linear model on fixed features, in an ellipsoid and in a ball.

    The features are wavelet scattering coefficients in the principal axes of public pictures of
    random strokes. It writes images.csv, .md, .png and .svg. An interrupted run is resumed after
    its last finished training.

    Examples:

    `privagrad reproduce images --data-dir mnist --out results`

    `privagrad reproduce images --data-dir mnist --methods pagan --epsilons 3 --seeds 1`
    """
    if data_dir is None:
        raise ValueError("Expected --data-dir with mnist.npz, found none: give the folder.")
    plan = image_settings.Plan(
        tuple(methods.split(",")), parse_epsilons(epsilons), seeds, quick, held_out
    )
    from privagrad.experiments.images.data import read_digits
    from privagrad.experiments.images.runs import run
    from privagrad.report.experiments import write_images_report

    out.mkdir(parents=True, exist_ok=True)
    rows = run(read_digits(data_dir), plan, out)
    if report is not None:
        write_images_report(report, rows)
    _print_images(rows)
    say_where(out, "images.csv", "images.md", "images.png", "images.svg")
    return rows


def _bands(text: str | None) -> Correlation | None:
    """A number of bands, "auto", or None."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"Expected --correlation auto or a number of steps, found {text!r}.")
    coefficients_of(int(text))  # refuses too many
    return int(text)


def _print_images(rows: list[JsonObject]) -> None:
    from privagrad.experiments.images.tables import LABELS, groups, spread

    shown = [
        (LABELS[method], f"{epsilon:g}", spread([r["accuracy"] for r in group]), len(group),
         f"{sum(r['seconds'] for r in group) / len(group):.0f}")
        for (method, epsilon), group in groups(rows).items()
    ]  # fmt: skip
    columns = ("method", "epsilon", "accuracy in %", "seeds", "seconds a run")
    show_table("Accuracy on digits", columns, shown)


def _print_table1(rows: list[JsonObject]) -> None:
    columns = ("method", "epsilon", "seed", "valid", "reset", "test", "spent", "minutes")
    shown = []
    for r in rows:
        test = "" if r["test_perplexity"] is None else f"{r['test_perplexity']:.1f}"
        shown.append(
            (r["method"], f"{r['epsilon']:g}", r["seed"], f"{r['valid_perplexity']:.1f}",
             f"{r['valid_perplexity_reset']:.1f}", test, f"{r['epsilon_spent']:.3g}",
             f"{r['seconds'] / 60:.1f}")
        )  # fmt: skip
    show_table("Perplexity", columns, shown)
    say("valid: state carried along the text; reset: a new state for every example.")


def _print_figure1(summary: JsonObject) -> None:
    columns = ("method", "epsilon", "loss", "95 % band", "excess", "step size")
    rows = [
        (r["method"], f"{r['epsilon']:g}", f"{r['loss']:.4f}",
         f"{r['low']:.4f}-{r['high']:.4f}", f"{r['excess']:.4f}", f"{r['step_size']:g}")
        for r in summary["results"]
    ]  # fmt: skip
    show_table(f"Figure 1: final losses (optimum {summary['optimum']:.5f})", columns, rows)
    for row in summary["excess_ratio_of_pagan"]:
        say(
            f"epsilon {row['epsilon']:g}: excess loss of pagan / {row['over']} = "
            f"{row['ratio']:.3f} ({row['low']:.3f} .. {row['high']:.3f})"
        )
