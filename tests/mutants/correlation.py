"""Bugs of correlated noise: its mechanism, its samples, its cost."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_CORRELATION = "tests/privacy/test_correlation.py::"
_CYCLIC = "tests/privacy/test_cyclic.py::"
_RUNS = "tests/methods/test_correlation.py::"
_ENGINE = "tests/torch/test_correlation.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "correlated noise is not multiplied by the norm of a column",
        "privacy/grid.py",
        "return math.hypot(*self.coefficients) * once + rounding",
        "return once + rounding",
        (
            f"{_CORRELATION}test_a_row_is_as_visible_as_the_noise_multiplier_says",
            f"{_CORRELATION}test_a_row_moves_the_sums_of_a_block_by_at_most_the_sensitivity",
        ),
    ),
    Mutant(
        "the rounding of what is taken away is left out of the sensitivity",
        "privacy/grid.py",
        "return math.hypot(*self.coefficients) * once + rounding",
        "return math.hypot(*self.coefficients) * once",
        (f"{_CORRELATION}test_the_sensitivity_covers_the_rounding_of_what_is_taken_away",),
    ),
    Mutant(
        "a step is forgotten in the history of the noise",
        "privacy/correlation.py",
        "self._past = np.zeros((len(coefficients) - 1, size), kind)",
        "self._past = np.zeros((max(1, len(coefficients) - 2), size), kind)\n"
        "        self._coefficients = self._coefficients[: len(self._past)]",
        (f"{_CORRELATION}test_the_covariance_of_the_noise_is_the_inverse_of_c_squared",),
    ),
    Mutant(
        "coefficients belong to other steps than their own",
        "privacy/correlation.py",
        "np.roll(self._coefficients[::-1], self._next)",
        "self._coefficients[::-1]",
        (f"{_CORRELATION}test_the_covariance_of_the_noise_is_the_inverse_of_c_squared",),
    ),
    Mutant(
        "the history keeps the sum with the noise",
        "privacy/correlation.py",
        "start : start + units.size] = units - before",
        "start : start + units.size] = units",
        (f"{_CYCLIC}test_the_block_of_a_row_is_the_pair_that_is_charged",),
    ),
    Mutant(
        "a forked process goes on with the history of its parent",
        "privacy/correlation.py",
        "if os.getpid() != self._process:",
        "if False:",
        (f"{_CORRELATION}test_a_forked_process_does_not_go_on_with_the_history",),
    ),
    Mutant(
        "a history goes on after a release that was broken off",
        "privacy/correlation.py",
        "if self.is_open:",
        "if False:",
        (f"{_CORRELATION}test_a_release_that_was_broken_off_ends_the_history",),
    ),
    Mutant(
        "correlated releases are charged at the rate of all rows",
        "privacy/events.py",
        "return self.bands * self.batch_size / self.n_examples",
        "return self.batch_size / self.n_examples",
        (f"{_CYCLIC}test_blocks_cost_what_poisson_samples_at_their_rate_cost",),
    ),
    Mutant(
        "a block of correlated releases that is not ended is not charged",
        "privacy/events.py",
        "steps = -(-batches.steps // together) * together",
        "steps = max(1, batches.steps // together) * together",
        (f"{_CYCLIC}test_a_block_that_is_begun_is_charged",),
    ),
    Mutant(
        "the groups of rows do not take turns",
        "privacy/sampling.py",
        "return (self._first + np.arange(self._count)) % self.batches.bands",
        "return self._generator(self._chunk, 0).integers(self.batches.bands, size=self._count)",
        (f"{_CYCLIC}test_a_row_is_drawn_in_its_turn_at_the_rate_that_is_charged",),
    ),
    Mutant(
        "chunks of steps begin with the first group again",
        "privacy/sampling.py",
        "return (self._first + np.arange(self._count)) % self.batches.bands",
        "return np.arange(self._count) % self.batches.bands",
        (f"{_CYCLIC}test_a_row_is_drawn_in_its_turn_at_the_rate_that_is_charged[61-7-3]",),
    ),
    Mutant(
        "users may have rows in several turns",
        "methods/correlation.py",
        "if groups is not None:",
        "if False:",
        (f"{_RUNS}test_what_is_not_known_to_be_sound_is_refused",),
    ),
    Mutant(
        "samples of other kinds get correlated noise",
        "methods/correlation.py",
        'if batches.sampling != "poisson":',
        "if False:",
        (f"{_RUNS}test_what_is_not_known_to_be_sound_is_refused",),
    ),
    Mutant(
        "the engine charges one block for all",
        "torch/charging.py",
        "return self._block != before",
        "return before < 0",
        (f"{_ENGINE}test_blocks_are_charged_when_they_are_begun",),
    ),
    Mutant(
        "skipped batches bring rows closer together",
        "torch/release.py",
        "run.history.skip(place - run.number - 1)",
        "run.history.skip(0)",
        (f"{_ENGINE}test_skipped_batches_keep_rows_apart",),
    ),
    Mutant(
        "every pass begins with the first group of rows",
        "torch/turns.py",
        "self._samples.of_step(self.number)",
        "self._samples.of_step(self.number % self.steps)",
        (f"{_ENGINE}test_a_row_is_in_one_of_any_bands_batches_in_a_row",),
    ),
    Mutant(
        "a second step on a batch has correlated noise too",
        "torch/charging.py",
        "if self.event.bands > 1 and not self._fresh:",
        "if False:",
        (f"{_ENGINE}test_only_steps_on_the_loaders_own_batches_are_made",),
    ),
)
