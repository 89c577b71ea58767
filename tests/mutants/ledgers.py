"""Bugs of ledgers, commands and what fits are charged."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LEDGER = "tests/privacy/test_ledger.py::"
_FILTERS = "tests/privacy/test_filters.py::"
_FITTING = "tests/fitting/test_fitting.py::"
_EVALUATION = "tests/queries/test_evaluation.py::"
_SEARCH = "tests/estimators/test_search.py::"
_DOORS = "tests/estimators/test_doors.py::"
_CLI = "tests/cli/test_cli.py::"

_BUDGETS = (
    Mutant(
        "two who reserve at once get the same rest",
        "privacy/ledger.py",
        "if store.size(tables, name) != seen:",
        "if store.size(tables, name) < seen:",
        (f"{_LEDGER}test_eight_processes_never_overspend_together[file]",),
    ),
    Mutant(
        "a finished run may be given back",
        "privacy/ledger.py",
        'if state != "reserved":',
        'if state == "released":',
        (f"{_LEDGER}test_everything_reserved_counts_until_the_run_tells_what_it_made[file]",),
    ),
    Mutant(
        "a run that was given back while alive ends for free",
        "privacy/ledger.py",
        'store.add_entry(tables, entry.dataset, run, "finished", note or entry.note, made)',
        'charged = made if state == "reserved" else ()\n'
        "            note_made = note or entry.note\n"
        '            store.add_entry(tables, entry.dataset, run, "finished", note_made, charged)',
        (f"{_LEDGER}test_a_run_that_was_given_back_while_alive_is_charged_when_it_finishes[file]",),
    ),
    Mutant(
        "results of a run that was given back are shown",
        "privacy/ledger.py",
        'if state == "released":',
        'if state == "released" and not made:',
        (f"{_FITTING}test_a_run_that_was_given_back_while_alive_saves_no_model",),
    ),
    Mutant(
        "runs that are not finished are not charged",
        "privacy/account.py",
        "runs = [merged(run.events) for run in self.runs]",
        'runs = [merged(run.events) for run in self.runs if run.state == "finished"]',
        (f"{_LEDGER}test_everything_reserved_counts_until_the_run_tells_what_it_made[file]",),
    ),
    Mutant(
        "a cost that is no number fits",
        "privacy/ledger.py",
        "if not after <= account.epsilon:",
        "if after > account.epsilon:",
        (f"{_LEDGER}test_a_cost_that_is_no_number_fits_no_budget[file]",),
    ),
    Mutant(
        "the same rows get two budgets",
        "privacy/ledger.py",
        "if others := [other for other in owners if other != name]:",
        "if others := [other for other in owners if other == name]:",
        (f"{_LEDGER}test_one_content_has_one_budget[file]",),
    ),
    Mutant(
        "rows that a budget has paid for are used with another one",
        "privacy/ledger.py",
        "                _require_only_budget(name, store.owners(tables, fingerprint))\n",
        "",
        (f"{_LEDGER}test_content_that_a_budget_was_charged_for_has_no_other_budget[file]",),
    ),
    Mutant(
        "the history may be changed",
        "privacy/ledger_file.py",
        'when[f"{table}_no_UPDATE"] = f"UPDATE ON {table}"',
        "pass",
        (f"{_LEDGER}test_the_history_cannot_be_changed",),
    ),
    Mutant(
        "damaged entries are read as free",
        "privacy/ledger_store.py",
        "        if is_charged:\n",
        "        if is_charged and not told:\n",
        (f"{_LEDGER}test_a_damaged_entry_stops_a_data_set_until_its_run_is_given_back",),
    ),
    Mutant(
        "runs that are chosen by results cost what fixed ones cost",
        "privacy/filters.py",
        "return PrivacyPlan((*first, rest)).epsilon(delta - aside)",
        "return PrivacyPlan(tuple(e for events in charged for e in events)).epsilon(delta)",
        (
            f"{_FILTERS}test_runs_chosen_by_looking_at_the_first_stay_within_the_total"
            "[flat or steep]",
        ),
    ),
    Mutant(
        "a later run is compared with its cover at the same epsilons alone",
        "privacy/filters.py",
        "beside = np.append(_gaussian_profile(mu, _EPSILONS[1:]), 0.0)",
        "beside = _gaussian_profile(mu, _EPSILONS)",
        (f"{_FILTERS}test_the_cover_is_above_the_profile_everywhere",),
    ),
    Mutant(
        "later runs leak more than their part of delta",
        "privacy/filters.py",
        "math.isfinite(mu) and used <= aside * (1 + 1e-9) and aside < delta",
        "math.isfinite(mu) and aside < delta",
        (f"{_FILTERS}test_leaks_of_later_runs_have_their_own_part_of_delta",),
    ),
)

_FITS = (
    Mutant(
        "a fit reserves after its releases",
        "fitting/fit.py",
        "        run_name = _reserve(job)\n    model = run_fit(problem, plan, releases, progress)",
        "    model = run_fit(problem, plan, releases, progress)\n"
        "    run_name = run_name if job.discovers else _reserve(job)",
        (f"{_DOORS}test_a_fit_is_reserved_before_its_first_release_and_finished_after_its_last",),
    ),
    Mutant(
        "categories are released before the reservation",
        "fitting/fit.py",
        "        run_name = _reserve(job)\n"
        "        table = job.table.with_categories(_discover(job, releases, users))",
        "        table = job.table.with_categories(_discover(job, releases, users))\n"
        "        run_name = _reserve(job)",
        (f"{_FITTING}test_everything_released_was_reserved_before",),
    ),
    Mutant(
        "all rows of a user vote for categories",
        "fitting/fit.py",
        "            counts = job.table.counts_of(users.chosen)\n",
        "            counts = dict(counts)\n",
        (
            "tests/fitting/test_users.py::"
            "test_a_fit_tells_users_alone_and_finds_no_category_of_one_user",
        ),
    ),
    Mutant(
        "a fit ends for free",
        "fitting/save.py",
        "ledger.finish(run, fitted.model.privacy.events)",
        "ledger.finish(run, ())",
        (f"{_DOORS}test_a_fit_is_reserved_before_its_first_release_and_finished_after_its_last",),
    ),
    Mutant(
        "a model is saved before the ledger knows its cost",
        "fitting/save.py",
        "save_model(saved, out, tell_ledger)",
        "save_model(saved, out, lambda: None)\n            tell_ledger()",
        (f"{_FITTING}test_a_run_that_was_given_back_while_alive_saves_no_model",),
    ),
    Mutant(
        "the rows fitted are not those that are paid for",
        "fitting/plan.py",
        "LocalFiles(stack.enter_context(snapshot(request.table)) if copied else request.table)",
        "LocalFiles(request.table)",
        (f"{_FITTING}test_the_rows_that_are_fitted_are_those_of_the_fingerprint[csv-True]",),
    ),
    Mutant(
        "columns' centres are not charged",
        "linear/plan.py",
        "privacy = PrivacyPlan.calibrate_event(event, epsilon, delta, others)",
        'free = [one for one in others if "around" in one.purpose]\n'
        "        paid = [one for one in others if one not in free]\n"
        "        alone = PrivacyPlan.calibrate_event(event, epsilon, delta, paid)\n"
        "        privacy = PrivacyPlan((*free, *alone.events), alone.training)",
        (f"{_EVALUATION}test_the_plan_pays_for_what_comes_before_it",),
    ),
    Mutant(
        "the discovery of categories is not charged",
        "linear/plan.py",
        "privacy = PrivacyPlan.calibrate_event(event, epsilon, delta, others)",
        "paid = [one for one in others if one not in given]\n"
        "        alone = PrivacyPlan.calibrate_event(event, epsilon, delta, paid)\n"
        "        privacy = PrivacyPlan((*given, *alone.events), alone.training)",
        (f"{_EVALUATION}test_the_plan_pays_for_what_comes_before_it",),
    ),
    Mutant(
        "the evaluation of a fit is not charged",
        "linear/plan.py",
        "privacy = PrivacyPlan.calibrate_event(event, epsilon, delta, others)",
        "free = [one for one in others if one.purpose == EVALUATION.purpose]\n"
        "        paid = [one for one in others if one not in free]\n"
        "        alone = PrivacyPlan.calibrate_event(event, epsilon, delta, paid)\n"
        "        privacy = PrivacyPlan((*free, *alone.events), alone.training)",
        (f"{_EVALUATION}test_the_evaluation_is_an_event_of_the_plan",),
    ),
    Mutant(
        "a budget pays for seeded noise",
        "fitting/budget.py",
        "    if seeded:\n",
        "    if seeded and math.isinf(epsilon):\n",
        (
            f"{_DOORS}test_nothing_is_spent_on_what_is_refused"
            "[options0-seeded noise protects nobody]",
        ),
    ),
)

_COMMANDS = (
    Mutant(
        "an evaluation ends for free",
        "fitting/evaluate.py",
        'ledger.finish(about["run"], report.events)',
        'ledger.finish(about["run"], ())',
        (f"{_FITTING}test_an_evaluation_is_reserved_before_its_release_and_finished_after_it",),
    ),
    Mutant(
        "an evaluation reserves after its release",
        "fitting/evaluate.py",
        "    if job.account is not None and ledger is not None:\n"
        '        about["run"] = _reserve(job, job.account, ledger, job.plan)\n'
        "    releases = Releases(job.plan, random_source(request.seed), job.delta)\n"
        "    rows = job.rows\n"
        "    if job.users is not None:\n"
        "        rows = rows.take(job.users.draw(releases.source.another_generator()).chosen)\n"
        "    found, report = evaluate(rows, releases), releases.report()\n",
        "    releases = Releases(job.plan, random_source(request.seed), job.delta)\n"
        "    rows = job.rows\n"
        "    if job.users is not None:\n"
        "        rows = rows.take(job.users.draw(releases.source.another_generator()).chosen)\n"
        "    found, report = evaluate(rows, releases), releases.report()\n"
        "    if job.account is not None and ledger is not None:\n"
        '        about["run"] = _reserve(job, job.account, ledger, job.plan)\n',
        (f"{_FITTING}test_an_evaluation_is_reserved_before_its_release_and_finished_after_it",),
    ),
    Mutant(
        "the training rows are scored without noise",
        "fitting/plan.py",
        "if files.has_content_of(test):",
        "if files.name == test.name:",
        (f"{_CLI}test_a_copy_of_the_rows_is_no_table_to_test_on",),
    ),
    Mutant(
        "rows with a budget are used by a run that it does not pay for",
        "fitting/budget.py",
        "if owners := ledger.owners(files.fingerprint()):",
        "if owners := [one for one in ledger.names() if one == files.name]:",
        (
            "tests/cli/test_mistakes.py::"
            "test_rows_with_a_budget_are_used_by_no_run_that_it_does_not_pay_for[fit]",
        ),
    ),
)

_SEARCHES = (
    Mutant(
        "a search is charged as one run",
        "estimators/search.py",
        "plan = PrivacyPlan((run.selection,), training=run.selection.purpose)",
        "once = replace(run.selection, mean=1.01)\n"
        "        plan = PrivacyPlan((once,), training=once.purpose)",
        (f"{_SEARCH}test_as_many_runs_are_made_as_are_charged",),
    ),
    Mutant(
        "the scores of a search are not charged",
        "estimators/search.py",
        "SelectEvent((*events, score), mean_runs)",
        "SelectEvent(events, mean_runs)",
        (f"{_SEARCH}test_one_epsilon_pays_for_all_runs",),
    ),
    Mutant(
        "the budget of a run of a search is rounded up",
        "estimators/search.py",
        "return planned_run(candidates, mean_runs, math.exp(low), delta)",
        "return planned_run(candidates, mean_runs, math.exp(high), delta)",
        (f"{_SEARCH}test_one_epsilon_pays_for_all_runs",),
    ),
    Mutant(
        "a search makes more runs than it is charged for",
        "estimators/search.py",
        "source.sampler.geometric(1 / self.mean_runs)",
        "source.sampler.geometric(1 / (2 * self.mean_runs))",
        (f"{_SEARCH}test_as_many_runs_are_made_as_are_charged",),
    ),
    Mutant(
        "the number of runs of a search is no secret",
        "estimators/search.py",
        "source.sampler.geometric(1 / self.mean_runs)",
        "self.mean_runs",
        (f"{_SEARCH}test_as_many_runs_are_made_as_are_charged",),
    ),
    Mutant(
        "warnings tell how many runs a search made",
        "estimators/search.py",
        'warnings.simplefilter("ignore")',
        'warnings.simplefilter("always")',
        (f"{_SEARCH}test_nothing_shows_how_many_runs_there_were",),
    ),
    Mutant(
        "the best model of a search states the cost of one fit",
        "estimators/search.py",
        "self.best_estimator_._charge(self.privacy_, n)",
        "self.best_estimator_._charge(self.best_estimator_.privacy_, n)",
        (f"{_SEARCH}test_the_best_model_states_the_cost_of_the_search_wherever_it_goes",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (*_BUDGETS, *_FITS, *_COMMANDS, *_SEARCHES)
