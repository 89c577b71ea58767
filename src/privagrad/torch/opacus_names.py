"""What to use in place of names that Opacus has and privagrad.torch does not."""

from __future__ import annotations

_PAGE = "See docs/coming-from-opacus.md for all names."

_GRADIENTS = (
    "layers of the private module compute what is needed of per-example gradients themselves: "
    "call make_private, and loss.backward()"
)
_ACCOUNTANTS = (
    "an engine counts its own releases: engine.get_epsilon(delta); to compose releases without a "
    "training use privagrad.PrivacyPlan, to find the noise get_noise_multiplier"
)
_OPTIMIZERS = "make_private makes the optimizer private, under DistributedDataParallel too"
_SAMPLERS = (
    "make_private draws Poisson batches from the rows of your data loader; to choose the sampling "
    "rate give it DPDataLoader(dataset, sample_rate=...)"
)
_NORM_SAMPLERS = (
    "layers without code of their own run through torch.func, example by example; to add a faster "
    "one see CONTRIBUTING.md, A layer for PyTorch"
)
_GHOST = (
    "norms are taken without a second backward pass in every mode: leave grad_sample_mode out, or "
    "give make_private criterion= and grad_sample_mode='ghost', which returns the criterion too"
)
_SHARDED = (
    "sharded parameters are not supported: use DistributedDataParallel, or torch.nn modules that "
    "fit into one process"
)
_PARTS = "give make_private max_physical_batch_size, or use BatchMemoryManager"
_VALIDATORS = "ModuleValidator.validate and ModuleValidator.fix have all checks"

_CLIPPING = "make_private(clipping='per_layer', max_grad_norm=[...])"
_ADAPTIVE = "make_private(clipping='adaptive', ...)"
_EMPTY = "batches without rows have tensors of length 0 without it"
_MODULES_OF_TORCH = "methods of torch.nn.Module; make_private checks the rest"
_LAYERS = "torch.nn.LSTM, GRU, RNN and MultiheadAttention are private as they are"

_NAMES: tuple[tuple[str, str], ...] = (
    (
        _GRADIENTS,
        """AbstractGradSampleModule AbstractGradSampleHooks GradSampleModule
        GradSampleModuleExpandedWeights GradSampleModuleNoOp GradSampleHooksNoOp
        create_or_accumulate_grad_sample promote_current_grad_sample create_norm_sample
        get_gsm_class get_hooks_class wrap_model prepare_module make_functional prepare_layer
        ft_compute_per_sample_gradient compute_conv_grad_sample
        convolution2d_backward_as_a_convolution compute_sequence_bias_grad_sample
        compute_rnn_linear_grad_sample compute_embedding_grad_sample
        compute_embeddingbag_gradsampler compute_embedding_norm_sample
        compute_group_norm_grad_sample compute_instance_norm_grad_sample
        compute_layer_norm_grad_sample compute_linear_grad_sample compute_linear_norm_sample
        compute_rms_norm_grad_sample calc_sample_norms calc_sample_norms_one_layer
        sum_over_all_but_batch_and_last_n unfold2d unfold3d filter_dilated_rows""",
    ),
    (f"wrap_model=False in make_private: {_GRADIENTS}", "GradSampleHooks"),
    (
        _GHOST,
        """GradSampleModuleFastGradientClipping GradSampleHooksFastGradientClipping
        DPOptimizerFastGradientClipping DistributedDPOptimizerFastGradientClipping
        DPLossFastGradientClipping DPTensorFastGradientClipping""",
    ),
    (
        _SHARDED,
        """GradSampleModuleFastGradientClippingFSDP GradSampleHooksFastGradientClippingFSDP
        GradSampleModuleFastGradientClippingTP GradSampleHooksFastGradientClippingTP
        FSDPOptimizerFastGradientClipping FSDP2Wrapper has_params iterate_submodules""",
    ),
    (_NORM_SAMPLERS, "register_grad_sampler register_norm_sampler"),
    (
        _OPTIMIZERS,
        "DPOptimizer DistributedDPOptimizer get_optimizer_class average_gradients params",
    ),
    (
        _CLIPPING,
        "DPPerLayerOptimizer DistributedPerLayerOptimizer SimpleDistributedPerLayerOptimizer",
    ),
    (
        _ADAPTIVE,
        """AdaClipDPOptimizer PrivacyEngineAdaptiveClipping DPLossFastGradientAdaptiveClipping
        DPTensorFastGradientAdaptiveClipping""",
    ),
    (
        _ACCOUNTANTS,
        """IAccountant RDPAccountant PRVAccountant GaussianAccountant create_accountant
        register_accountant compute_rdp get_privacy_spent compute_mu_uniform compute_mu_poisson
        delta_eps_mu eps_from_mu compute_eps_uniform compute_eps_poisson compose_heterogeneous
        Domain compute_safe_domain_size PoissonSubsampledGaussianPRV
        TruncatedPrivacyRandomVariable DiscretePRV discretize""",
    ),
    (_SAMPLERS, "UniformWithReplacementSampler DistributedUniformWithReplacementSampler"),
    (_PARTS, "BatchSplittingSampler wrap_data_loader"),
    (_EMPTY, "CollateFnWithEmpty wrap_collate_with_empty shape_safe dtype_safe is_batch_empty"),
    (
        "noise and samples are secure already, unless a seed is given to make_private",
        "switch_generator",
    ),
    (
        "a LightningModule that calls make_private: examples/lightning_example.py",
        "DPLightningDataModule",
    ),
    (
        _LAYERS,
        """RNNLinear SequenceBias DPRNNBase DPRNNCellBase RenameParamsMixin apply_permutation
        filter_out_old_keys compute_seq_lengths unpack_packedsequences""",
    ),
    (
        f"UnsupportedModuleError: {_VALIDATORS}",
        """UnsupportedError UnsupportableModuleError NotYetSupportedModuleError
        ShouldReplaceModuleError IllegalModuleConfigurationError""",
    ),
    (_VALIDATORS, "register_module_validator register_module_fixer validate fix"),
    (
        _MODULES_OF_TORCH,
        """has_trainable_params parametrized_modules trainable_modules trainable_parameters
        requires_grad clone_module get_submodule are_state_dict_equal""",
    ),
    (
        "the engine compares its gradients with those of examples alone during training",
        """check_per_sample_gradients_are_correct get_grad_sample_modes ModelWithLoss
        compute_microbatch_grad_sample compute_opacus_grad_sample
        check_torch_version_for_ew_sample compute_microbatch_grad_sample_tensor_or_seq
        compute_grad_samples_microbatch_and_opacus""",
    ),
)

HINTS = {name: hint for hint, names in _NAMES for name in names.split()}
"""By the name that Opacus has."""

_OF_OPTIMIZERS: dict[str, str] = {
    "grad_samples": f"per-example gradients are not kept: {_GRADIENTS}",
    "accumulated_iterations": _PARTS,
    "signal_skip_step": _PARTS,
    "virtual_step": _PARTS,
    "clip_and_accumulate": "step() bounds, adds noise and steps",
    "add_noise": "step() bounds, adds noise and steps",
    "scale_grad": "step() bounds, adds noise and steps",
    "pre_step": "step() bounds, adds noise and steps; attach_step_hook sees private gradients",
    "max_grad_norms": "clipping.shares are the bounds of tensors as parts of max_grad_norm",
    "step_hook": "attach_step_hook",
    "generator": "noise is secure, unless a seed is given to make_private",
    "secure_mode": "noise is secure, unless a seed is given to make_private",
}

_MODULES = (
    "add_hooks", "remove_hooks", "disable_hooks", "enable_hooks", "set_grad_sample_to_none",
    "del_grad_sample", "forbid_grad_accumulation", "allow_grad_accumulation",
    "capture_activations_hook", "capture_backprops_hook", "get_norm_sample", "get_clipping_coef",
    "trainable_parameters", "GRAD_SAMPLERS", "NORM_SAMPLERS",
)  # fmt: skip
_OF_MODULES = dict.fromkeys(_MODULES, _GRADIENTS)

_OF_ACCOUNTANTS: dict[str, str] = {
    "step": "the engine charges every batch and every release itself",
    "get_optimizer_hook_fn": "the engine charges every batch and every release itself",
    "get_privacy_spent": "get_epsilon(delta): privacy loss distributions have no order alpha",
    "mechanism": "privacy loss distributions are always used",
    "load_state_dict": "engine.load_checkpoint, which counts what other runs have released since",
}


def hint_for_import(name: str) -> str | None:
    """What a failed import of an Opacus name says; None: no such name."""
    if name not in HINTS:
        return None
    return (
        f"Expected a name of privagrad.torch, found {name!r}, which Opacus has. Use instead: "
        f"{HINTS[name]}. {_PAGE}"
    )


def hint_for_optimizer(name: str) -> str:
    """What the private optimizer says of an attribute that it does not have."""
    return _hint("PrivateOptimizer", name, _OF_OPTIMIZERS)


def hint_for_module(name: str, error: AttributeError) -> AttributeError:
    """What the private module says of an attribute that neither it nor the user's module has."""
    if name not in _OF_MODULES:
        return error
    return AttributeError(_hint("PrivateModule", name, _OF_MODULES), name=name)


def hint_for_accountant(name: str) -> str:
    """What the accountant says of an attribute that it does not have."""
    return _hint("Accountant", name, _OF_ACCOUNTANTS)


def _hint(kind: str, name: str, table: dict[str, str]) -> str:
    plain = f"{kind!r} object has no attribute {name!r}"
    return f"{plain}, which Opacus has: {table[name]}. {_PAGE}" if name in table else plain
