"""Bugs of the PyTorch engine."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ENGINE = "tests/torch/test_engine.py::"
_CHARGING = "tests/torch/test_charging.py::"
_CHECKPOINTS = "tests/torch/test_checkpoints.py::"
_CLIPPING = "tests/torch/test_clipping.py::"
_DISTRIBUTED = "tests/torch/test_distributed.py::"
_AUTOCAST = "tests/torch/test_autocast.py::"
_SOUNDNESS = "tests/torch/guards/test_soundness.py::"
_ATTACKS = "tests/torch/guards/test_attacks.py::"
_BATCHES = "tests/torch/guards/test_batches.py::"
_REFUSALS = "tests/torch/guards/test_refusals.py::"
_LOOK_UPS = "tests/torch/per_example/test_row_lookups.py::"
_LAYERS = "tests/torch/per_example/test_layers.py::"

_RELEASES = (
    Mutant(
        "noise of a training two thirds of what is charged",
        "torch/release.py",
        "terms.noise_multiplier,",
        "terms.noise_multiplier * 2 / 3,",
        (f"{_ENGINE}TestNoise::test_is_of_the_sum_where_losses_are_sums",),
    ),
    Mutant(
        "rounding in float32 is not counted as sensitivity",
        "torch/release.py",
        "slack=self._slack,",
        "slack=0.0,",
        (f"{_CLIPPING}test_rounding_in_float32_counts_as_sensitivity",),
    ),
    Mutant(
        "noise has the shape of an ellipsoid that was learned before",
        "torch/release.py",
        "if known is None or known.scale is not scales[name]:",
        "if known is None:",
        (
            "tests/torch/test_learned_scales.py::"
            "test_noise_has_the_shape_of_the_ellipsoid_that_was_learned_last",
        ),
    ),
    Mutant(
        "each of several processes adds a part of the noise to its share",
        "torch/release.py",
        "terms.noise_multiplier,",
        "terms.noise_multiplier / processes.count**0.5,",
        (f"{_DISTRIBUTED}test_each_process_adds_the_noise_of_its_share",),
    ),
    Mutant(
        "processes may number rows in other ways",
        "torch/samplers.py",
        "            return numbering_of(self.loader.dataset, np.asarray(self.rows))",
        "            return None",
        (f"{_DISTRIBUTED}test_processes_that_differ_are_refused_in_all",),
    ),
    Mutant(
        "processes may take rows in other orders",
        "torch/optimizer.py",
        'rows (a hash of it)": self.order_of_rows,',
        'rows (a hash of it)": 0.0,',
        (f"{_DISTRIBUTED}test_processes_that_differ_are_refused_in_all",),
    ),
    Mutant(
        "a backward pass of an earlier batch is released as the next one's",
        "torch/per_example/tape.py",
        "if of.batch != self._batch:",
        "if of.batch > self._batch:",
        (f"{_CHARGING}TestEarlierBatches::test_a_backward_pass_of_an_earlier_batch_is_refused",),
    ),
    Mutant(
        "gradients of a batch wait for the next one's step",
        "torch/charging.py",
        "self._optimizer.tape.begin_batch()",
        "pass",
        (f"{_CHARGING}TestEarlierBatches::test_a_backward_pass_is_none_of_the_next_batch",),
    ),
    Mutant(
        "a batch of another training passes for one's own",
        "torch/guards/batch_tracer.py",
        "self._number = number = next(_NUMBERS)",
        "self._number = number = self._number + 1",
        (
            f"{_CHARGING}TestEarlierBatches::"
            "test_a_batch_of_another_training_is_charged_for_all_rows",
        ),
    ),
    Mutant(
        "whoever looks at the batch sampler gives rows another number",
        "torch/loaders.py",
        "deque(maxlen=0)",
        "self._notes",
        ("tests/torch/test_correlation.py::test_whoever_looks_at_the_batch_sampler_moves_no_row",),
    ),
    Mutant(
        "the last row is another one under the number -1",
        "torch/loaders.py",
        "isinstance(row, numbers.Integral) and row < 0",
        "False and row < 0",
        (f"{_CHARGING}TestSamplers::test_rows_counted_from_the_end_are_refused",),
    ),
    Mutant(
        "releases are noted in the folder that was entered last",
        "torch/checkpoints.py",
        "Path(os.path.realpath(path))",
        "Path(path)",
        (f"{_CHECKPOINTS}test_releases_are_noted_beside_the_file_itself",),
    ),
    Mutant(
        "the last coordinates are in no process's share",
        "torch/shares.py",
        "self._each = -(-self.size // processes.count)",
        "self._each = self.size // processes.count",
        (f"{_DISTRIBUTED}test_every_coordinate_is_in_one_share",),
    ),
    Mutant(
        "processes with the same random numbers are accepted",
        "torch/agreement.py",
        "if len(set(words)) < len(words):",
        "if not words:",
        (f"{_DISTRIBUTED}test_processes_with_the_same_streams_are_refused",),
    ),
    Mutant(
        "a seed in another process is not reported",
        "torch/agreement.py",
        "any(flag for (flag,) in processes.gathered([source.seeded]))",
        "source.seeded",
        (f"{_ENGINE}TestSeveralProcesses::test_seeded_noise_of_another_process_is_reported",),
    ),
    Mutant(
        "noise is seeded unless a seed is given",
        "torch/arguments.py",
        "return random_source(random_state, noise,",
        "return random_source(random_state or 0, noise,",
        (f"{_ENGINE}TestNoise::test_sources_are_secure_unless_seeded",),
    ),
    Mutant(
        "a seeded training is reported as private",
        "torch/engine.py",
        "self.seeded |= agreed_seed(processes, source)",
        "agreed_seed(processes, source)",
        (f"{_ENGINE}TestNoise::test_sources_are_secure_unless_seeded",),
    ),
    Mutant(
        "a checkpoint forgets that its noise was seeded",
        "torch/engine.py",
        '        self.seeded |= bool(flags["seeded"])\n',
        "",
        (f"{_CHECKPOINTS}test_seeds_stay_seeds",),
    ),
    Mutant(
        "an empty batch is no release",
        "torch/optimizer.py",
        "if not self.last_chunk:",
        "if not (self.last_chunk and self._sums):",
        ("tests/torch/test_empty_batches.py::test_the_step_is_noise[linear]",),
    ),
    Mutant(
        "the count of adaptive clipping costs nothing",
        "torch/release.py",
        "radius /= math.sqrt(1 - count.share**2)",
        "radius /= 1.0",
        (f"{_CLIPPING}test_noise_has_the_shape_of_the_ellipsoid[adaptive-ball]",),
    ),
    Mutant(
        "the count of adaptive clipping has no noise",
        "torch/release.py",
        "parts = [Part([np.array(own) for own in counts], root, counted)]",
        "counted[:] = sum(own for (own,) in counts) / self.batch_size",
        (f"{_CLIPPING}TestAdaptive::test_both_releases_together_cost_what_is_charged",),
    ),
)

_CHARGES = (
    Mutant(
        "what was paid before a checkpoint was loaded pays for what is released from it",
        "torch/charging.py",
        "if self._paid_run != self.accountant.run:",
        "if False:",
        (
            f"{_CHARGING}TestDraws::"
            "test_what_was_paid_before_a_checkpoint_is_loaded_is_paid_again[options1]",
        ),
    ),
    Mutant(
        "a release is charged with the noise of the draw, not its own",
        "torch/charging.py",
        ("self._fresh = False\n            self._pay(noise)\n            return True"),
        ("self._fresh = False\n            return True"),
        (f"{_CHARGING}TestNoise::test_noise_that_changes_between_the_draw_and_the_step",),
    ),
    Mutant(
        "a batch is charged with the noise of its last part, not of its first",
        "torch/optimizer.py",
        "self._charge(terms.noise_multiplier))",
        "self._charge(self.noise_multiplier))",
        (f"{_CHARGING}TestNoise::test_noise_that_changes_amid_a_batch_counts_from_the_next",),
    ),
    Mutant(
        "a pass is charged with its largest noise",
        "torch/charging.py",
        "noise < self._paid_noise or",
        "noise > self._paid_noise or",
        (f"{_CHARGING}TestNoise::test_a_pass_costs_its_least_noise",),
    ),
    Mutant(
        "steps without noise cost nothing beside others with noise",
        "torch/accountant.py",
        "unprotected=self.unprotected > 0)",
        "unprotected=not self.counts)",
        (f"{_CHARGING}TestNoise::test_none_at_all_is_unprotected",),
    ),
    Mutant(
        "a batch pays for any number of steps on it",
        "torch/charging.py",
        ("if self._fresh:\n            self._fresh = False"),
        "if self._fresh:",
        (f"{_ENGINE}TestBatchesFromElsewhere::test_twice_on_a_poisson_batch",),
    ),
    Mutant(
        "rows from elsewhere cost what sampled rows cost",
        "torch/charging.py",
        (
            "1.0, purpose=self.event.purpose, under=self.event.relation, "
            "unit=self.event.unit\n"
            "        )"
        ),
        (
            "1.0, purpose=self.event.purpose, under=self.event.relation, "
            "unit=self.event.unit\n"
            "        ) if self.once else self.event"
        ),
        (f"{_ENGINE}TestBatchesFromElsewhere::test_rows_of_ones_own",),
    ),
    Mutant(
        "an earlier batch is paid for by the last one",
        "torch/guards/loss.py",
        "if numbers - {self._number} or foreign:",
        "if foreign:",
        (
            f"{_BATCHES}TestContainers::test_a_batch_that_is_used_again_is_charged_again"
            "[named tuple]",
        ),
    ),
    Mutant(
        "batches that the loop skips are not charged",
        "torch/charging.py",
        ("self._pay(self._optimizer.noise_multiplier)\n            self._fresh = True"),
        "self._fresh = True",
        (f"{_CHARGING}TestDraws::test_batches_that_the_loop_skips_are_charged",),
    ),
    Mutant(
        "batches without rows are not charged",
        "torch/charging.py",
        ("if part.first:\n            if self._begins"),
        ("if part.first and part.size:\n            if self._begins"),
        (f"{_CHARGING}TestDraws::test_batches_that_the_loop_skips_are_charged",),
    ),
    Mutant(
        "only the first pass in the loader's order is charged",
        "torch/charging.py",
        "return not self.once or iterator != self._paid_iterator",
        "return not self.once",
        (f"{_CHARGING}TestDraws::test_every_pass_that_is_begun_is_charged",),
    ),
    Mutant(
        "a pass that holds rows twice is charged once",
        "torch/samplers.py",
        ("return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)"),
        "return not sampler.replacement",
        (f"{_ENGINE}TestAccounts::test_other_samplers_are_paid_step_by_step",),
    ),
    Mutant(
        "a checkpoint forgets what was charged",
        "torch/accountant.py",
        "self._count(state)",
        'self.protect(state["unit"])',
        (f"{_CHECKPOINTS}test_a_resumed_run_is_on_the_same_curve",),
    ),
    Mutant(
        "what was released after a checkpoint was saved is forgotten",
        "torch/accountant.py",
        "journal.records(self.follow(checkpoint))",
        "journal.records(self.follow(checkpoint))[:0]",
        (f"{_CHECKPOINTS}test_what_a_run_releases_after_saving_is_paid_by_all",),
    ),
    Mutant(
        "a forked process goes on with the account of its parent",
        "torch/accountant.py",
        "if os.getpid() != self._process:",
        "if not self._process:",
        (f"{_CHARGING}TestProcesses::test_a_forked_process_releases_nothing",),
    ),
    Mutant(
        "a training without verification is reported as verified",
        "torch/engine.py",
        "        self.verified &= verify\n",
        "",
        (f"{_SOUNDNESS}TestVerification::test_can_be_left_to_the_user_who_then_vouches",),
    ),
)

_DRAWS = (
    Mutant(
        "rows that the sampler leaves out are drawn",
        "torch/samplers.py",
        "return chosen",
        "return range(rows)",
        (f"{_CHARGING}TestSamplers::test_a_subset_stays_the_subset",),
    ),
    Mutant(
        "the rate charged is that of all rows, the rate drawn that of a subset",
        "torch/samplers.py",
        '1.0, 1, "poisson", self.n_examples,',
        '1.0, 1, "poisson", rows_of(self.loader),',
        (f"{_CHARGING}TestSamplers::test_a_subset_stays_the_subset",),
    ),
    Mutant(
        "a sampler of an unknown kind is silently replaced",
        "torch/samplers.py",
        ('raise ValueError(\n        "Expected a data loader that chooses'),
        (
            "if rows:\n"
            "        return range(rows)\n"
            "    raise ValueError(\n"
            '        "Expected a data loader that chooses'
        ),
        (f"{_CHARGING}TestSamplers::test_of_which_the_rows_are_not_known_are_refused[own]",),
    ),
    Mutant(
        "a batch holds a row twice",
        "torch/loaders.py",
        "batch = list(own.values())",
        "batch = list(own.values()) and drawn",
        (f"{_ENGINE}TestAccounts::test_a_row_counts_once_in_a_batch",),
    ),
    Mutant(
        "a data set that holds rows twice is accepted",
        "torch/samplers.py",
        "if repeats_rows(data):",
        "if not len(data):",
        (f"{_BATCHES}TestRepeats::test_repeated_rows_are_refused",),
    ),
    Mutant(
        "two processes take the same row",
        "torch/samplers.py",
        "if processes.count > 1 and not (",
        "if processes.count > 2 and not (",
        (f"{_CHARGING}TestSamplers::test_processes_that_could_take_the_same_row_are_refused",),
    ),
    Mutant(
        "two iterators over one loader at a time are accepted",
        "torch/charging.py",
        "if iterator != self._iterator:",
        "if iterator > self._iterator:",
        (f"{_CHARGING}TestDraws::test_two_iterators_at_a_time_are_refused[False]",),
    ),
    Mutant(
        "other rows than those drawn are accepted",
        "torch/per_example/tape.py",
        "if self.drawn is not None and count != self.drawn:",
        "if self.drawn is not None and count < 0:",
        (f"{_REFUSALS}TestSteps::test_on_other_rows_than_were_drawn",),
    ),
)

_BOUNDS = (
    Mutant(
        "a second step on a part of a batch adds its rows again",
        "torch/optimizer.py",
        "if not (self.last_chunk or self._waits):",
        "if False:",
        (f"{_REFUSALS}TestSteps::test_twice_on_a_part_of_a_batch",),
    ),
    Mutant(
        "parts of a batch that was left are in the next sum",
        "torch/optimizer.py",
        ("if first:\n            self._drop_batch()\n            self._batches += 1"),
        ("if first:\n            self._batches += 1"),
        (f"{_CHARGING}TestSplitBatches::test_that_are_left_are_in_no_later_step",),
    ),
    Mutant(
        "rows of a step that failed are added again",
        "torch/optimizer.py",
        (
            "# A second try must not add the same rows once more.\n"
            "                self._drop_batch()\n"
            "                raise"
        ),
        "raise",
        (f"{_CHARGING}TestSplitBatches::test_a_step_that_fails_leaves_nothing_behind",),
    ),
    Mutant(
        "the noise is that of a bound that was lowered amid the batch",
        "torch/optimizer.py",
        "if self._agreed is None:",
        "if self._agreed is None or self._sums:",
        (f"{_CHARGING}TestNoise::test_the_bound_of_a_batch_is_one_for_all_its_parts",),
    ),
    Mutant(
        "uses of tied weights are bounded as if they were apart",
        "torch/per_example/gradients.py",
        ("if len(gradients) == 1:\n        return list(gradients)\n    parts"),
        ("if gradients:\n        return list(gradients)\n    parts"),
        (f"{_SOUNDNESS}test_sums_are_exact_where_the_user_vouches[tied weights]",),
    ),
    Mutant(
        "repeated tokens are not summed before the norm",
        "torch/per_example/row_lookups.py",
        "while last < rows.size and rows[last] == rows[first]:",
        "while last < first:",
        (f"{_LOOK_UPS}test_norms_and_sums_equal_the_loop[0-True]",),
    ),
    Mutant(
        "the padding of an embedding is added, but not in the norm",
        "torch/per_example/row_lookups.py",
        ("if row != ignored:\n                sums ="),
        ("if row >= 0:\n                sums ="),
        (f"{_LOOK_UPS}test_norms_and_sums_equal_the_loop[0-True]",),
    ),
    Mutant(
        "biases are left out of the norm",
        "torch/per_example/chunked.py",
        (
            "squares = squares + gradient.squared_norms(scales[name].part(gradient.part))\n"
            "    totals"
        ),
        (
            "if gradient.parameter.dim() > 1:\n"
            "            squares = squares + "
            "gradient.squared_norms(scales[name].part(gradient.part))\n"
            "    totals"
        ),
        (f"{_LAYERS}test_bounded_sum_equals_the_loop[linear-sequence-ball]",),
    ),
    Mutant(
        "norms by products of rows lose their digits",
        "torch/per_example/gradients.py",
        (
            "for i in (squares < _DOUBTFUL * largest).nonzero()[:, 0].tolist():\n"
            "            squares[i] = "
            "scale.double().squared_norms(self.exact_example(i))[0]\n"
            "        return torch.maximum(squares, _CANCELLED**2 * largest)"
        ),
        "return squares.clamp_min(0.0)",
        (f"{_SOUNDNESS}test_norms_of_inputs_with_a_common_offset[64-6-False]",),
    ),
    Mutant(
        "gradients that are not finite keep their weight",
        "torch/per_example/chunked.py",
        "weights = torch.where(finite, self.factor * shrunk, 0.0)",
        "weights = self.factor * shrunk",
        (f"{_ENGINE}TestBounds::test_examples_that_are_not_finite_count_as_zero[nan]",),
    ),
    Mutant(
        "gradients of outputs are taken by hooks, which views lose",
        "torch/per_example/tape.py",
        (
            "tapped: Tensor = _Tap.apply(root, output, self, self.current, per_example, call)\n"
            "        if call is not None:\n"
            "            call.tapped(tapped)\n"
            "        return tapped"
        ),
        (
            "of, tapped = self.current, (output + 0 * root).view(output.shape)\n"
            "        tapped.register_hook(lambda g: self.receive(of, per_example, "
            "g.detach()))\n"
            "        return tapped"
        ),
        (f"{_SOUNDNESS}test_sums_are_exact_where_the_user_vouches[in place]",),
    ),
    Mutant(
        "inputs of layers may change until the step",
        "torch/per_example/tape.py",
        "return self._tensor._version == self._version",
        "return True",
        (f"{_SOUNDNESS}test_inputs_changed_between_backward_and_step_are_refused[linear]",),
    ),
    Mutant(
        "each of several tensors is bounded to the whole bound",
        "torch/clipping.py",
        "bound = Bound(radius * self.shares[name], factor, shares=shares)",
        "bound = Bound(radius, factor, shares=shares)",
        (
            f"{_CLIPPING}test_one_example_moves_what_is_released_by_at_most_the_sensitivity"
            "[1000000.0-per_layer-ball]",
        ),
    ),
    Mutant(
        "gradients whose squares underflow are made longer than the bound",
        "torch/per_example/chunked.py",
        ("shrunk = torch.where(squares > _UNDERFLOW, self.radius / (norms + self.gamma), 0.0)"),
        "shrunk = self.radius / (norms + self.gamma)",
        (f"{_CLIPPING}test_gradients_whose_squares_underflow_are_not_made_longer_than_the_bound",),
    ),
    Mutant(
        "the rows of a user are added, not averaged",
        "torch/users.py",
        "np.repeat(_shares(users.counts), users.counts)",
        "1.0",
        (
            "tests/torch/test_users.py::"
            "test_a_user_with_very_many_rows_moves_the_sum_by_the_bound_at_most[flat-None]",
        ),
    ),
)

_VERIFICATION = (
    Mutant(
        "modules are not verified at the first step",
        "torch/guards/verification.py",
        ("if self.verify:\n            refuse_memory([several, *alone])"),
        ("if self.verify and self.passes:\n            refuse_memory([several, *alone])"),
        (f"{_SOUNDNESS}TestVerification::test_holds_norms_too",),
    ),
    Mutant(
        "modules that cannot be verified are accepted",
        "torch/guards/verification.py",
        ("if not self.verify:\n            return LearnedLayouts()"),
        (
            "if not self.verify or isinstance(problem, UntriedError):\n"
            "            return LearnedLayouts()"
        ),
        (f"{_SOUNDNESS}test_modules_that_mix_in_training_mode_are_refused[graph convolution]",),
    ),
    Mutant(
        "losses are not verified at the first step",
        "torch/guards/loss.py",
        "if not seen & (seen - 1):",
        "if seen > 1 and not seen & (seen - 1):",
        (f"{_SOUNDNESS}TestNormalisers::test_of_weights_are_refused",),
    ),
    Mutant(
        "modules are verified once",
        "torch/guards/verification.py",
        "due = not (self.passes + 1) & self.passes or recorder.reads",
        "due = not self.passes or recorder.reads",
        (f"{_SOUNDNESS}TestVerification::test_is_made_at_powers_of_two",),
    ),
    Mutant(
        "losses are verified once",
        "torch/guards/loss.py",
        "if not seen & (seen - 1):",
        "if seen == 1:",
        (f"{_SOUNDNESS}TestVerification::test_is_made_at_powers_of_two",),
    ),
    Mutant(
        "gradients of a loss may be off by a fifth",
        "torch/per_example/layout.py",
        "CLOSE = 1e-3",
        "CLOSE = 0.2",
        (f"{_AUTOCAST}test_so_is_a_loss_that_mixes_as_little",),
    ),
    Mutant(
        "gradients and norms of a module may be off by a third",
        "torch/guards/module_runs.py",
        "_RELATIVE, _OF_ALL = 1e-3, 1e-5",
        "_RELATIVE, _OF_ALL = 0.3, 0.1",
        (f"{_SOUNDNESS}TestVerification::test_holds_norms_too",),
    ),
    Mutant(
        "what is too little to show in bfloat16 is not verified",
        "torch/guards/verification.py",
        "if autocasts():",
        "if not autocasts():",
        (f"{_AUTOCAST}test_a_mixture_below_the_precision_of_bfloat16_is_refused",),
    ),
    Mutant(
        "modules are verified in eval mode",
        "torch/guards/module_runs.py",
        ("attributes_kept(self.module):\n            yield"),
        ("attributes_kept(self.module):\n            self.module.eval()\n            yield"),
        (f"{_ATTACKS}test_mixtures_behind_a_random_branch[Python-0.5]",),
    ),
    Mutant(
        "statistics of examples may be kept in buffers",
        "torch/guards/observed.py",
        "if a is None or b is None or not torch.equal(a, b):",
        "if a is None and b is None:",
        (f"{_SOUNDNESS}test_modules_that_mix_in_training_mode_are_refused[statistics in buffers]",),
    ),
    Mutant(
        "layouts are learned from one batch",
        "torch/guards/verification.py",
        "known = self.latest if prepared else self._known.get(recorder.signature)",
        "known = self.latest or self._known.get(recorder.signature)",
        (f"{_ATTACKS}test_capacity_that_begins_later",),
    ),
    Mutant(
        "examples may be moved to other rows",
        "torch/guards/observed.py",
        "if not call.in_place:",
        "if call.in_place is None:",
        (f"{_ATTACKS}test_an_example_that_is_not_looked_at_is_out_of_order[index]",),
    ),
    Mutant(
        "a parameter that no layer accounts for is accepted",
        "torch/guards/module_runs.py",
        ("for name, g in expected.items():\n        half"),
        (
            "for name, g in expected.items():\n"
            "        if name not in gradients:\n"
            "            continue\n"
            "        half"
        ),
        (f"{_SOUNDNESS}TestParametersThatNoLayerAccountsFor::test_pruned",),
    ),
    Mutant(
        "a second loss is taken for the first",
        "torch/guards/loss.py",
        "key = signature(trace, count, rows=self._batch_is_known)",
        "key = 0",
        (f"{_SOUNDNESS}test_a_second_loss_is_looked_at_too",),
    ),
    Mutant(
        "a loss that was seen lets later ones pass unseen",
        "torch/guards/loss.py",
        "self.tape.loss_seen = self.tape.whole_backward = False",
        "self.tape.whole_backward = False",
        (f"{_SOUNDNESS}TestUnseenLosses::test_through_autograd_after_another_loss",),
    ),
    Mutant(
        "losses that were not seen are accepted",
        "torch/per_example/tape.py",
        "if self.guarded and not self.loss_seen:",
        "if self.guarded and self.plain:",
        (f"{_SOUNDNESS}TestUnseenLosses::test_scripted",),
    ),
    Mutant(
        "a loss kept as an attribute of the module is accepted",
        "torch/guards/constants.py",
        "if constant.grad_fn is not None:",
        "if constant.grad_fn is constant:",
        (f"{_SOUNDNESS}TestUnseenLosses::test_kept_as_an_attribute",),
    ),
    Mutant(
        "a loss divided by a count over the batch is accepted",
        "torch/guards/loss_check.py",
        ("if mixed:\n            raise"),
        ("if False:\n            raise"),
        (f"{_SOUNDNESS}TestNormalisers::test_that_python_has_are_refused[read]",),
    ),
    Mutant(
        "padded tokens may count in a cross-entropy",
        "torch/guards/loss_check.py",
        "                        refuse_padding(trace, view, mean_of_rows=True)\n",
        "",
        (f"{_ATTACKS}test_padded_tokens_count_in_no_cross_entropy[False]",),
    ),
    Mutant(
        "losses may change with the length of the padding",
        "torch/guards/loss_check.py",
        "                        refuse_padding(trace, view)\n",
        "",
        (f"{_ATTACKS}test_padding_changes_nothing_or_is_refused[padding as a class-at once]",),
    ),
    Mutant(
        "gradients of a loss may be changed on their way back",
        "torch/guards/loss.py",
        ("        self._refuse_other_gradients()\n\n"),
        "",
        (f"{_ATTACKS}test_programs[loader-hook on the outputs]",),
    ),
    Mutant(
        "a collate function may mix rows",
        "torch/loaders.py",
        "self.verify = verify and collate is not default_collate",
        "self.verify = verify and collate is default_collate",
        (f"{_BATCHES}TestContainers::test_mixing_by_collate_is_refused[named tuple]",),
    ),
    Mutant(
        "inputs of the module may mix rows",
        "torch/guards/loss.py",
        "                self._if_due(steps[place], self._check_input)\n",
        "",
        (f"{_SOUNDNESS}TestLoops::test_mixup_before_the_module_is_refused",),
    ),
    Mutant(
        "a module may hold something of a batch",
        "torch/guards/loss.py",
        ("if isinstance(leaf, _OF_BATCH):\n                return True"),
        ("if isinstance(leaf, BatchFloat):\n                return True"),
        (f"{_SOUNDNESS}test_modules_that_hold_something_of_a_batch_are_refused[bank-kept]",),
    ),
    Mutant(
        "BatchNorm is accepted",
        "torch/validator.py",
        ("if isinstance(module, _BatchNorm) and not is_frozen_norm(module):\n        groups"),
        ("if isinstance(module, _BatchNorm) and module.momentum == 2:\n        groups"),
        (
            "tests/torch/test_validator.py::"
            "test_batch_norm_is_refused_unless_it_is_frozen[True-True-True-True]",
        ),
    ),
)

MUTANTS: tuple[Mutant, ...] = (*_RELEASES, *_CHARGES, *_DRAWS, *_BOUNDS, *_VERIFICATION)
