"""Bugs of the mechanism, of sampling and accounting, of linear models and of queries."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_MECHANISM = "tests/privacy/test_mechanism.py::"
_NOISE = "tests/privacy/test_noise.py::"
_SAMPLING = "tests/privacy/test_sampling.py::"
_ACCOUNTING = "tests/privacy/test_accounting.py::"
_COMPOSITION = "tests/privacy/test_composition.py::"
_ALLOCATION = "tests/privacy/test_allocation.py::"
_GRADIENTS = "tests/glm/test_gradients.py::"
_MINIMIZERS = "tests/glm/test_minimizers.py::"
_MINIMIZE = "tests/methods/test_minimize.py::"
_OBJECTIVE = "tests/methods/test_objective.py::"
_MOMENTS = "tests/queries/test_moments.py::"
_CATEGORIES = "tests/queries/test_categories.py::"

_NOISE_AND_BOUNDS = (
    Mutant(
        "noise two thirds of what is charged",
        "privacy/grid.py",
        "exact = self.noise_multiplier * self.sensitivity / self.grid",
        "exact = self.noise_multiplier * self.sensitivity / self.grid * 2 / 3",
        (f"{_MECHANISM}test_noise_has_the_shape_and_scale_of_the_ellipsoid[None-0.7]",),
    ),
    Mutant(
        "the grid is left out of the sensitivity",
        "privacy/grid.py",
        "once = 1.0 + self.slack + math.sqrt(self.dim) * self.grid",
        "once = 1.0 + self.slack",
        (f"{_MECHANISM}test_one_vector_moves_the_rounded_sum_by_at_most_the_sensitivity",),
    ),
    Mutant(
        "the slack is left out of the sensitivity",
        "privacy/grid.py",
        "once = 1.0 + self.slack + math.sqrt(self.dim) * self.grid",
        "once = 1.0 + math.sqrt(self.dim) * self.grid",
        (f"{_MECHANISM}test_the_noise_covers_the_slack",),
    ),
    Mutant(
        "the error of computed normals is not counted",
        "privacy/grid.py",
        "return exact / (1 - self.noise_multiplier * error)",
        "return exact",
        (f"{_MECHANISM}test_the_error_of_normals_is_counted",),
    ),
    Mutant(
        "norms may be 1 as computed, without room for rounding",
        "privacy/grid.py",
        "return 1.0 - (self.dim + 8) * ULP",
        "return 1.0",
        (f"{_MECHANISM}test_a_norm_as_computed_within_the_limit_is_at_most_one",),
    ),
    Mutant(
        "noise of the mean is added to the sum",
        "privacy/mechanism.py",
        "add(units, stream, self.deviation)",
        "add(units, stream, self.deviation / self.batch_size)",
        (f"{_MECHANISM}test_noise_has_the_shape_and_scale_of_the_ellipsoid[None-0.7]",),
    ),
    Mutant(
        "noise is multiplied by the radius twice",
        "privacy/mechanism.py",
        "add(units, stream, self.deviation)",
        "add(units, stream, self.deviation * (e.radius if (e := total.ellipsoid) else 1.0))",
        (f"{_MINIMIZE}test_the_noise_of_a_run_is_what_its_report_says[linear-1-poisson]",),
    ),
    Mutant(
        "a sum is released twice",
        "privacy/bounded.py",
        "        self._require_open()\n        self.open = False",
        "        self._require_open()",
        (f"{_MECHANISM}test_only_what_a_mechanism_bounded_is_released_and_only_once",),
    ),
    Mutant(
        "infinite vectors are not left out of the sum",
        "privacy/bounded.py",
        "if not math.isfinite(norm):",
        "if math.isnan(norm):",
        (f"{_MECHANISM}test_bounded_vectors_move_the_sum_by_at_most_the_sensitivity",),
    ),
    Mutant(
        "two coordinates share their noise",
        "privacy/normals.py",
        "second[i] = np.rint(second[i]) + np.rint(b * deviation)",
        "second[i] = np.rint(second[i]) + np.rint(a * deviation)",
        ("tests/privacy/test_normals.py::test_every_unit_gets_a_normal_of_its_own",),
    ),
    Mutant(
        "discrete noise is rounded down",
        "privacy/discrete.py",
        "return math.isqrt(least - 1) + 1",
        "return math.floor(deviation)",
        (
            "tests/privacy/test_discrete.py::"
            "test_it_protects_at_least_as_well_as_the_gaussian_it_is_charged_as",
        ),
    ),
    Mutant(
        "projections exceed the radius by an ulp",
        "geometry/ellipsoid.py",
        "while not _weighted_norm(row, roots, weighted) <= radius:",
        "while not _weighted_norm(row, roots, weighted) <= radius * (1.0 + 4 * ulps):",
        ("tests/geometry/test_ellipsoid.py::test_projections_are_inside_to_the_last_bit[radial]",),
    ),
)

_RANDOMNESS = (
    Mutant(
        "noise is used again in the next step",
        "privacy/noise.py",
        "self._used = min(last, BUFFER)",
        "self._used = first",
        (f"{_NOISE}test_no_word_is_given_twice",),
    ),
    Mutant(
        "threads share one stream of noise",
        "privacy/noise.py",
        "streams = (KeyStream() for _ in range(STREAMS))",
        "streams = map(KeyStream, [secrets.token_bytes(16)] * STREAMS)",
        (f"{_NOISE}test_secure_keys_are_fresh_each_time",),
    ),
    Mutant(
        "a forked process goes on with the noise of its parent",
        "privacy/noise.py",
        "os.register_at_fork(after_in_child=restart)",
        "os.register_at_fork(before=restart)",
        (f"{_NOISE}test_forked_processes_share_no_secure_stream[None]",),
    ),
    Mutant(
        "a forked process goes on with the samples of its parent",
        "privacy/noise.py",
        "os.register_at_fork(after_in_child=new_keys)",
        "os.register_at_fork(before=new_keys)",
        (f"{_NOISE}test_forked_processes_share_no_secure_stream[None]",),
    ),
    Mutant(
        "a seed by default",
        "privacy/noise.py",
        "return RandomSource(tuple(streams), secure_generator(), seeded=False, noise=noise)",
        "default = _seeded(np.random.default_rng(0), noise, process)\n"
        "        return RandomSource(default.streams, default.sampler, False, noise)",
        (f"{_NOISE}test_secure_keys_are_fresh_each_time",),
    ),
    Mutant(
        "a seeded run says that it is private",
        "privacy/releases.py",
        "seeded=source.seeded",
        "seeded=False",
        (f"{_MINIMIZE}test_secure_runs_differ_and_are_not_seeded",),
    ),
)

_SAMPLES = (
    Mutant(
        "rows are drawn more often than the rate that is charged",
        "privacy/sampling.py",
        "return generator.binomial(widths, batches.rate, size=shape)",
        "rate = batches.batch_size / max(batches.n_examples - batches.batch_size, 1)\n"
        "            return generator.binomial(widths, min(rate, 1.0), size=shape)",
        (f"{_SAMPLING}test_a_row_is_in_a_batch_at_the_rate_the_accountant_assumes[poisson-7-3]",),
    ),
    Mutant(
        "the rate of another number of rows is charged",
        "privacy/events.py",
        "return self.bands * self.batch_size / self.n_examples",
        "return self.bands * self.batch_size / (self.n_examples + self.batch_size)",
        (f"{_ACCOUNTING}test_poisson_agrees_with_dp_accounting",),
    ),
    Mutant(
        "a Poisson batch is never empty",
        "privacy/sampling.py",
        "return generator.binomial(widths, batches.rate, size=shape)",
        "return np.maximum(generator.binomial(widths, batches.rate, size=shape), 1)",
        (f"{_SAMPLING}test_poisson_sizes_are_binomial_and_rows_independent",),
    ),
    Mutant(
        "the same rows are drawn in every chunk of steps",
        "privacy/sampling.py",
        "keyed_generator(self.key, (chunk << 72) | (slot << 48))",
        "keyed_generator(self.key, slot << 48)",
        (f"{_SAMPLING}test_chunks_of_steps_are_independent",),
    ),
    Mutant(
        "every epoch allocates rows as the first one",
        "privacy/sampling.py",
        "self._generator(epoch, 1 + block)",
        "self._generator(0, 1 + block)",
        (f"{_SAMPLING}test_an_epoch_of_an_allocation_holds_every_row_once",),
    ),
    Mutant(
        "a forked process goes on with a run",
        "privacy/sampling.py",
        "if os.getpid() != process:",
        "if process is None:",
        (f"{_SAMPLING}test_a_forked_process_does_not_go_on_with_the_samples",),
    ),
    Mutant(
        "empty batches are skipped",
        "methods/loop.py",
        "    for batch in drawn:\n",
        "    for batch in (one for one in drawn if one.size):\n",
        (f"{_MINIMIZE}test_an_empty_batch_is_a_step_of_noise",),
    ),
    Mutant(
        "workers of a cluster share their samples",
        "distributed/worker.py",
        "return own.of_step(step, place.first, place.first + place.size)",
        "return own.of_step(step, 0, place.size) + place.first",
        ("tests/distributed/test_partitions.py::test_minimize_with_sparse_rows[poisson]",),
    ),
    Mutant(
        "a partition on a cluster counts twice",
        "distributed/partitions.py",
        "if len(set(numbers)) < len(numbers) or not missing.issuperset(numbers):",
        "if not missing.issuperset(numbers):",
        (
            "tests/distributed/test_failures.py::"
            "test_a_part_that_is_counted_twice_is_no_total[twice1]",
        ),
    ),
    Mutant(
        "a partition that is answered for late is lost",
        "distributed/partitions.py",
        "missing.difference_update(numbers)",
        "missing.clear()",
        ("tests/distributed/test_failures.py::test_lost_answers_are_asked_for_again[1-before]",),
    ),
    Mutant(
        "partitions share their samples",
        "glm/examples.py",
        "samples.of_step(step, first, first + size) - first",
        "samples.of_step(step, 0, size)",
        (
            "tests/distributed/test_protocol.py::test_partitions_draw_their_own_part_of_a_sample[poisson]",
        ),
    ),
)

_COSTS = (
    Mutant(
        "whole noise multipliers stay whole, which dp-accounting under-counts",
        "privacy/events.py",
        'noise = validate.positive("noise_multiplier", self.noise_multiplier)\n'
        '        object.__setattr__(self, "noise_multiplier", noise)\n'
        '        validate.choice("unit", self.unit, UNITS)\n'
        "        if self.bands",
        'validate.positive("noise_multiplier", self.noise_multiplier)\n'
        '        validate.choice("unit", self.unit, UNITS)\n'
        "        if self.bands",
        (f"{_ACCOUNTING}test_whole_numbers_are_not_under_accounted",),
    ),
    Mutant(
        "calibration ends on the unsafe side",
        "privacy/roots.py",
        "    return below\n",
        "    return above\n",
        (f"{_ACCOUNTING}test_calibration_ends_on_the_safe_side_and_close",),
    ),
    Mutant(
        "merged releases count once",
        "privacy/events.py",
        "counts[one] = counts.get(one, 0) + event.count",
        "counts[one] = event.count",
        (f"{_COMPOSITION}test_merged_events_cost_as_much_as_separate_ones",),
    ),
    Mutant(
        "several searches cost one",
        "privacy/accounting.py",
        "return dp_event.SelfComposedDpEvent(one, event.count)\n        plain",
        "return one\n        plain",
        (f"{_COMPOSITION}test_fifty_searches_cost_fifty_searches",),
    ),
    Mutant(
        "several releases over all rows cost one",
        "privacy/totals.py",
        "square += draws * (sensitivity / one.noise_multiplier) ** 2",
        "square += (sensitivity / one.noise_multiplier) ** 2",
        (f"{_ACCOUNTING}test_releases_over_all_rows_compose_exactly[30]",),
    ),
    Mutant(
        "several releases cost one leak",
        "privacy/totals.py",
        "log_kept += event.count * math.log1p(-one.leak)",
        "log_kept += math.log1p(-one.leak)",
        (f"{_CATEGORIES}test_the_leak_is_paid_from_delta",),
    ),
    Mutant(
        "only the direction that adds a row is accounted",
        "privacy/totals.py",
        'directions = (True, False) if relation == "zero-out" else (True,)',
        'directions = (False,) if relation == "zero-out" else (True,)',
        (f"{_ALLOCATION}test_the_direction_with_the_row_costs_more",),
    ),
    Mutant(
        "replacing a row counts as removing it",
        "privacy/totals.py",
        'return 2.0 if relation == "replace-one" else 1.0',
        "return 1.0",
        (f"{_ACCOUNTING}test_under_replace_one_the_sensitivity_doubles",),
    ),
    Mutant(
        "samples without replacement are counted with sensitivity 1",
        "privacy/privacy_loss.py",
        "mu = 2.0 * count / event.noise_multiplier",
        "mu = 1.0 * count / event.noise_multiplier",
        (
            f"{_ACCOUNTING}test_fixed_size_bounds_lie_above_a_concrete_worst_case"
            "[1-0.2-without_replacement]",
        ),
    ),
    Mutant(
        "samples with replacement are accounted as Poisson samples",
        "privacy/privacy_loss.py",
        'if event.sampling in (None, "poisson", "cyclic_poisson"):',
        'if event.sampling in (None, "poisson", "cyclic_poisson", "with_replacement"):',
        (
            f"{_ACCOUNTING}test_fixed_size_bounds_lie_above_a_concrete_worst_case"
            "[1-0.8-with_replacement]",
        ),
    ),
    Mutant(
        "rows that are drawn twice count once",
        "privacy/privacy_loss.py",
        "counts, weights, rest = _repeats(event.n_examples, event.batch_size, tail)",
        "counts, weights, rest = np.array([1.0]), np.array([rate]), 0.0",
        (
            f"{_ACCOUNTING}test_fixed_size_bounds_lie_above_a_concrete_worst_case"
            "[20-2.5-with_replacement]",
        ),
    ),
    Mutant(
        "samples of a fixed size are said to be private under zero-out",
        "privacy/events.py",
        'fixed_size = sampling in ("with_replacement", "without_replacement")',
        'fixed_size = sampling == "with_replacement"',
        (f"{_MINIMIZE}test_rows_are_seen_as_often_as_the_report_says[without_replacement]",),
    ),
    Mutant(
        "an epoch of random allocation costs one Poisson sample",
        "privacy/privacy_loss.py",
        'if event.sampling in (None, "poisson", "cyclic_poisson"):',
        'if event.sampling in (None, "poisson", "cyclic_poisson", "random_allocation"):',
        (f"{_ALLOCATION}test_the_direction_with_the_row_costs_more[1.0-100-0.3]",),
    ),
    Mutant(
        "random allocation is accounted with too many steps",
        "privacy/privacy_loss.py",
        "allocation_atoms(mu, releases_per_draw(event), removed, tail)",
        "allocation_atoms(mu, 2 * releases_per_draw(event), removed, tail)",
        (f"{_ALLOCATION}test_the_direction_with_the_row_costs_more[1.0-100-0.3]",),
    ),
    Mutant(
        "an epoch that is not ended is not charged",
        "privacy/events.py",
        "steps = -(-batches.steps // together) * together",
        "steps = max(1, batches.steps // together) * together",
        (f"{_ALLOCATION}test_an_epoch_that_is_begun_is_charged",),
    ),
    Mutant(
        "the rounding of Fourier transforms is ignored",
        "privacy/composition.py",
        "logs = np.log(np.maximum(composed, 0.0) + error) + cumulant - tilt * losses",
        "logs = np.log(np.maximum(composed, _TINY)) + cumulant - tilt * losses",
        (f"{_COMPOSITION}test_errors_within_the_bound_do_not_lower_epsilon",),
    ),
    Mutant(
        "losses beyond the transform's window are forgotten",
        "privacy/composition.py",
        "left = delta - self.certain - window.above",
        "left = delta - self.certain",
        (f"{_COMPOSITION}test_what_lies_above_the_window_is_bounded_and_paid_from_delta",),
    ),
    Mutant(
        "losses that are left out cost nothing",
        "privacy/privacy_loss.py",
        "return LossGrid(first, masses, float(above[-1]) + tails.certain, rounding)",
        "return LossGrid(first, masses, 0.0, rounding)",
        (f"{_COMPOSITION}test_losses_that_are_left_out_count_as_infinite",),
    ),
    Mutant(
        "losses are rounded down",
        "privacy/privacy_loss.py",
        "upper = np.clip((mass - scaled) / -math.expm1(-interval), 0.0, mass)",
        "upper = np.zeros_like(mass)",
        (f"{_COMPOSITION}test_sampled_releases_cost_at_least_losses_rounded_down",),
    ),
    Mutant(
        "a release that the plan counts once is made twice",
        "privacy/releases.py",
        "self._left[purpose] = left - 1",
        "self._left[purpose] = left",
        (
            "tests/privacy/test_releases.py::test_every_release_is_counted_and_none_is_made_beyond_the_plan",
        ),
    ),
    Mutant(
        "a run that is stopped is charged for the steps done",
        "privacy/releases.py",
        "return self.plan.report(self.delta, seeded=source.seeded, noise=source.noise)",
        "from dataclasses import replace\n\n"
        "        made = ((e, self.made[e.purpose]) for e in self.plan.events)\n"
        "        done = tuple(replace(event, count=n) for event, n in made if n)\n"
        "        plan = replace(self.plan, events=done)\n"
        "        return plan.report(self.delta, seeded=source.seeded, noise=source.noise)",
        (f"{_MINIMIZE}test_a_run_stopped_by_its_callback_costs_its_whole_plan",),
    ),
    Mutant(
        "the report leaves out all but the gradients",
        "privacy/accounting.py",
        "        return PrivacyReport(\n            self.epsilon(delta),",
        "        return PrivacyReport(\n            PrivacyPlan(self.events[-1:]).epsilon(delta),",
        (f"{_MOMENTS}test_the_queries_have_the_noise_that_the_report_names[poisson]",),
    ),
    Mutant(
        "moments are not charged to the budget",
        "methods/minimize.py",
        "return PrivacyPlan.calibrate_event(training, epsilon, delta, others)",
        "alone = PrivacyPlan.calibrate_event(training, epsilon, delta)\n"
        "    return PrivacyPlan((*others, *alone.events), alone.training)",
        (f"{_MOMENTS}test_the_queries_have_the_noise_that_the_report_names[poisson]",),
    ),
)

_GRADIENT_SUMS = (
    Mutant(
        "gradients are bounded before they are whitened",
        "glm/kernels.py",
        "margin += value * x[j]\n                squares += whitened * whitened",
        "margin += value * x[j]\n                squares += value * value",
        (f"{_MINIMIZE}test_each_example_is_bounded_before_it_is_summed",),
    ),
    Mutant(
        "a sparse row is bounded before it is whitened",
        "glm/kernels.py",
        "margin += value * x[indices[k]]\n            squares += whitened * whitened",
        "margin += value * x[indices[k]]\n            squares += value * value",
        (f"{_GRADIENTS}test_the_bound_is_attained[linear-csr]",),
    ),
    Mutant(
        "norms that are not numbers count as within the bound",
        "glm/kernels.py",
        "elif not size <= limit:\n            shrink",
        "elif size > limit:\n            shrink",
        (
            f"{_GRADIENTS}test_rows_that_are_not_finite_count_and_contribute_nothing"
            "[linear-dense-radial]",
        ),
    ),
    Mutant(
        "rows are bounded by the smaller slope of a quantile",
        "glm/losses.py",
        "return max(parameter, 1.0 - parameter)",
        "return min(parameter, 1.0 - parameter)",
        (
            "tests/glm/test_losses.py::test_no_slope_is_beyond_the_lipschitz_constant_and_one_attains_it",
        ),
    ),
    Mutant(
        "sums are divided by the realised batch size",
        "methods/oracle.py",
        "gradient = self._release(batch, self.mechanism, bounded, self.history)",
        "gradient = self._release(batch, self.mechanism, bounded, self.history)\n"
        "        gradient *= self.setting.batches.expected_size / max(batch.size, 1)",
        (f"{_MINIMIZE}test_sums_are_divided_by_the_expected_batch_size",),
    ),
    Mutant(
        "the ellipsoid is chosen by the batch's own gradients",
        "methods/oracle.py",
        "ellipsoid(tuple(self.seen))",
        "ellipsoid((*self.seen, self.gradients.per_example(x, batch).mean(axis=0)))",
        (
            f"{_OBJECTIVE}test_a_function_chooses_the_ellipsoid_of_every_step_from_released_"
            "gradients_alone",
        ),
    ),
    Mutant(
        "the ellipsoid is chosen by gradients before their noise",
        "methods/oracle.py",
        "        gradient = self._release(batch, self.mechanism, bounded, self.history)\n"
        "        if learns:\n            self.seen.append(gradient.copy())",
        "        if learns:\n            self.seen.append(bounded.memory * self.mechanism.grid)\n"
        "        gradient = self._release(batch, self.mechanism, bounded, self.history)",
        (f"{_OBJECTIVE}test_the_gradients_that_choose_an_ellipsoid_are_those_released",),
    ),
    Mutant(
        "gradients are not counted",
        "methods/oracle.py",
        "        self.releases.take(self.training)\n",
        "",
        ("tests/methods/test_methods.py::test_a_method_cannot_release_more_than_the_plan",),
    ),
    Mutant(
        "an objective's infinite gradients stay in the sum",
        "methods/objective.py",
        "if not math.isfinite(norm):",
        "if math.isnan(norm):",
        (f"{_OBJECTIVE}test_gradients_that_are_not_finite_contribute_nothing_and_are_counted",),
    ),
    Mutant(
        "every row of a user counts in full",
        "privacy/bounded.py",
        "per_unit = mechanism.fineness / (count * mechanism.grid)",
        "per_unit = mechanism.fineness / mechanism.grid",
        (
            "tests/privacy/test_users.py::test_rows_of_a_user_that_all_pull_one_way_move_a_sum_by_"
            "one_and_no_more[30-1.0-2]",
        ),
    ),
    Mutant(
        "rows of a user are bounded one by one",
        "methods/users.py",
        "self.rows.add_bounded(averages.of(count), x, rows, projection, pool)",
        "self.rows.add_bounded(averages.of(1), x, rows, projection, pool)",
        ("tests/methods/test_users.py::test_a_user_of_many_rows_moves_a_sum_by_one_and_no_more",),
    ),
    Mutant(
        "second moments count every row of a user in full",
        "queries/second_moments.py",
        "some.add_to(averages.of(count), _add_moments",
        "some.add_to(averages.of(1), _add_moments",
        (
            "tests/queries/test_second_moments.py::"
            "test_a_user_at_the_bound_moves_it_by_one_with_all_rows_together[2]",
        ),
    ),
    Mutant(
        "an ellipsoid is learned from all rows of users",
        "methods/minimize.py",
        "rows = gradients.rows if users is None else gradients.rows.take(users.chosen)",
        "rows = gradients.rows",
        ("tests/methods/test_users.py::test_an_ellipsoid_is_learned_from_one_row_of_each_user",),
    ),
    Mutant(
        "queries of a fit see all rows of users",
        "linear/fit.py",
        "seen_gradients = gradients.take(problem.users.chosen)",
        "seen_gradients = gradients",
        ("tests/estimators/test_users.py::test_every_query_counts_users[two classes]",),
    ),
    Mutant(
        "the covariance sees all rows of users",
        "linear/fit.py",
        'seen = in_memory(examples, "users").take(problem.users.chosen)',
        "seen = examples",
        ("tests/estimators/test_users.py::test_every_query_counts_users[two classes]",),
    ),
    Mutant(
        "the covariance has less noise than the plan pays for",
        "linear/plan.py",
        "shares += [COVARIANCE] * recipe.shaped(",
        "shares += [COVARIANCE._replace(part=0.6)] * recipe.shaped(",
        ("tests/linear/test_whitening.py::test_epsilon_pays_for_it",),
    ),
    Mutant(
        "rows are whitened by a product of matrices",
        "glm/rows.py",
        "combine_dense(self.array, columns, np.ascontiguousarray(matrix))",
        "self.array[:, columns] = self.array[:, columns] @ matrix",
        ("tests/linear/test_whitening.py::test_a_row_is_whitened_by_itself[float64]",),
    ),
    Mutant(
        "geoclip turns gradients by a product of matrices",
        "methods/geoclip.py",
        "_turn(gradients, mean, np.ascontiguousarray(matrix.T), vectors)",
        "vectors[:] = (gradients - mean) @ matrix.T",
        ("tests/methods/test_geoclip.py::test_a_vector_depends_on_its_gradient_alone",),
    ),
    Mutant(
        "what rounding moves in the rows of other users is ignored",
        "methods/users.py",
        "return self.rows.slack(most * (batch_size + 32)) / most",
        "return 0.0",
        ("tests/methods/test_users.py::test_the_slack_counts_the_rounding_of_every_other_user",),
    ),
    Mutant(
        "a bound on minimisers counts the radius twice",
        "glm/minimizers.py",
        "limit = self._longest * (1 - 1e-9)",
        "limit = self._longest * self.bound * (1 - 1e-9)",
        (
            f"{_MINIMIZERS}test_one_example_moves_the_minimiser_by_at_most_bound_over_n_ridge"
            "[linear]",
        ),
    ),
    Mutant(
        "rows that cannot be shrunk exactly stay beyond the bound",
        "glm/minimizers.py",
        "shrinks[i] = shrink if shrink > _LEAST_SHRINK else 0.0",
        "shrinks[i] = shrink",
        (f"{_MINIMIZERS}test_rows_of_the_largest_doubles_stay_within_the_bound",),
    ),
    Mutant(
        "the grid of noise in the objective is not covered",
        "methods/oracle.py",
        "near = tolerance + tilted.rounding(tolerance, longest) + rounded",
        "near = tolerance + tilted.rounding(tolerance, longest)",
        (f"{_MINIMIZERS}test_the_cover_hides_the_grid_of_the_noise_in_the_objective",),
    ),
    Mutant(
        "a solver's tolerance is not counted in what a row moves",
        "methods/oracle.py",
        "moves = (risk.bound / self.gradients.n_examples + 2 * near) / ridge",
        "moves = risk.bound / self.gradients.n_examples / ridge",
        (f"{_MINIMIZERS}test_the_tolerance_of_a_solver_is_counted_in_what_a_row_moves",),
    ),
    Mutant(
        "noise in the objective comes with too small a ridge",
        "methods/objective_perturbation.py",
        "volume = bend * row**2 / math.expm1(event.log_volume)",
        "volume = bend * row / math.expm1(event.log_volume)",
        (f"{_MINIMIZERS}test_the_change_of_volume_is_at_most_what_is_charged[logistic]",),
    ),
    Mutant(
        "the change of volume by an objective is free",
        "privacy/privacy_loss.py",
        "least = event.log_volume + mu * mu / 2",
        "least = mu * mu / 2",
        (f"{_MINIMIZERS}test_the_objective_event_counts_the_change_of_volume",),
    ),
)

_QUERIES = (
    Mutant(
        "moments are released without noise",
        "queries/columns.py",
        "powers = mechanism.release(total, releases.source) * bound",
        "powers = total.memory * mechanism.grid / n * bound",
        (f"{_MOMENTS}test_the_floor_is_the_noise_of_the_moments",),
    ),
    Mutant(
        "a row votes in full for each of its columns",
        "queries/columns.py",
        "vote = limit * per_unit / math.sqrt(squares)",
        "vote = limit * per_unit",
        (
            "tests/queries/test_columns.py::"
            "test_votes_of_any_mix_of_ones_and_others_have_norm_one[asarray]",
        ),
    ),
    Mutant(
        "rows that are not finite stay in the moments",
        "queries/columns.py",
        "        if not math.isfinite(norm):\n            nonfinite += 1",
        "        if math.isnan(norm):\n            nonfinite += 1",
        (f"{_MOMENTS}test_one_row_moves_every_query_by_at_most_the_sensitivity[dense-powers]",),
    ),
    Mutant(
        "second moments shrink rows by too little",
        "queries/second_moments.py",
        "shrink = per_unit if squares <= limit else per_unit * limit / squares",
        "shrink = per_unit if squares <= limit else per_unit * math.sqrt(limit / squares)",
        (
            "tests/queries/test_second_moments.py::"
            "test_a_row_moves_the_matrix_by_at_most_the_sensitivity[1.0-asarray]",
        ),
    ),
    Mutant(
        "a row counts in full in each histogram of an evaluation",
        "queries/histograms.py",
        "cells, weight, first = cells_of(rows), 1 / math.sqrt(len(histograms)), 0",
        "cells, weight, first = cells_of(rows), 1.0, 0",
        ("tests/queries/test_evaluation.py::test_one_row_is_a_vector_of_norm_at_most_one[huber]",),
    ),
    Mutant(
        "a row counts in full for each of its categories",
        "queries/categories.py",
        "np.rint(limit * per_unit / math.sqrt(columns))",
        "np.rint(limit * per_unit)",
        (f"{_CATEGORIES}test_one_row_is_a_vector_of_norm_at_most_one",),
    ),
    Mutant(
        "the threshold of categories forgets the number of columns",
        "queries/categories.py",
        "return (1.0 + root * mechanism.grid * units) * (1 + 1e-9)",
        "return (1.0 + mechanism.grid * units) * (1 + 1e-9)",
        (f"{_CATEGORIES}test_the_threshold_is_the_normal_quantile",),
    ),
    Mutant(
        "the threshold of categories forgets the grid",
        "queries/categories.py",
        "units = 2 + (mechanism.deviation + 3) * quantile",
        "units = event.noise_multiplier / mechanism.grid * quantile",
        (f"{_CATEGORIES}test_the_threshold_counts_the_grid",),
    ),
    Mutant(
        "the leak of all columns is that of one",
        "queries/categories.py",
        "quantile = float(-ndtri(event.leak / columns))",
        "quantile = float(-ndtri(event.leak))",
        (f"{_CATEGORIES}test_a_category_of_one_row_shows_as_rarely_as_the_leak_says",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *_NOISE_AND_BOUNDS, *_RANDOMNESS, *_SAMPLES, *_COSTS, *_GRADIENT_SUMS, *_QUERIES
)  # fmt: skip
