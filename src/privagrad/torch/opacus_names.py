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

HINTS: dict[str, str] = {
    "AbstractGradSampleModule": _GRADIENTS,
    "AbstractGradSampleHooks": _GRADIENTS,
    "GradSampleModule": "PrivateModule, which make_private returns: " + _GRADIENTS,
    "GradSampleHooks": "wrap_model=False in make_private: " + _GRADIENTS,
    "GradSampleModuleExpandedWeights": _GRADIENTS,
    "GradSampleModuleNoOp": _GRADIENTS,
    "GradSampleHooksNoOp": _GRADIENTS,
    "GradSampleModuleFastGradientClipping": _GHOST,
    "GradSampleHooksFastGradientClipping": _GHOST,
    "GradSampleModuleFastGradientClippingFSDP": _SHARDED,
    "GradSampleHooksFastGradientClippingFSDP": _SHARDED,
    "GradSampleModuleFastGradientClippingTP": _SHARDED,
    "GradSampleHooksFastGradientClippingTP": _SHARDED,
    "FSDP2Wrapper": _SHARDED,
    "register_grad_sampler": _NORM_SAMPLERS,
    "register_norm_sampler": _NORM_SAMPLERS,
    "create_or_accumulate_grad_sample": _GRADIENTS,
    "create_norm_sample": _GRADIENTS,
    "wrap_model": "PrivacyEngine.make_private",
    "get_gsm_class": _GRADIENTS,
    "get_hooks_class": _GRADIENTS,
    "DPOptimizer": f"PrivateOptimizer: {_OPTIMIZERS}",
    "DistributedDPOptimizer": _OPTIMIZERS,
    "DPOptimizerFastGradientClipping": _GHOST,
    "DistributedDPOptimizerFastGradientClipping": _GHOST,
    "FSDPOptimizerFastGradientClipping": _SHARDED,
    "DPPerLayerOptimizer": "make_private(clipping='per_layer', max_grad_norm=[...])",
    "DistributedPerLayerOptimizer": "make_private(clipping='per_layer', max_grad_norm=[...])",
    "SimpleDistributedPerLayerOptimizer": "make_private(clipping='per_layer', max_grad_norm=[...])",
    "AdaClipDPOptimizer": "make_private(clipping='adaptive', ...)",
    "PrivacyEngineAdaptiveClipping": "PrivacyEngine, and make_private(clipping='adaptive', ...)",
    "DPLossFastGradientAdaptiveClipping": "make_private(clipping='adaptive', ...)",
    "DPTensorFastGradientAdaptiveClipping": "make_private(clipping='adaptive', ...)",
    "get_optimizer_class": _OPTIMIZERS,
    "DPLossFastGradientClipping": "PerExampleLoss, or nothing: " + _GHOST,
    "DPTensorFastGradientClipping": _GHOST,
    "average_gradients": _OPTIMIZERS,
    "IAccountant": _ACCOUNTANTS,
    "RDPAccountant": _ACCOUNTANTS,
    "PRVAccountant": _ACCOUNTANTS,
    "GaussianAccountant": _ACCOUNTANTS,
    "create_accountant": _ACCOUNTANTS,
    "register_accountant": _ACCOUNTANTS,
    "compute_rdp": _ACCOUNTANTS,
    "get_privacy_spent": _ACCOUNTANTS,
    "UniformWithReplacementSampler": _SAMPLERS,
    "DistributedUniformWithReplacementSampler": _SAMPLERS,
    "BatchSplittingSampler": _PARTS,
    "wrap_data_loader": _PARTS,
    "CollateFnWithEmpty": "empty batches get tensors of length 0 without it",
    "wrap_collate_with_empty": "empty batches get tensors of length 0 without it",
    "switch_generator": "noise and samples are secure already, unless a seed is given",
    "DPLightningDataModule": "examples/lightning_example.py shows make_private in Lightning",
    "RNNLinear": "torch.nn.LSTM, GRU and RNN are private as they are",
    "SequenceBias": "torch.nn.MultiheadAttention is private as it is",
    "UnsupportedError": f"UnsupportedModuleError; {_VALIDATORS}",
    "UnsupportableModuleError": f"UnsupportedModuleError; {_VALIDATORS}",
    "NotYetSupportedModuleError": f"UnsupportedModuleError; {_VALIDATORS}",
    "ShouldReplaceModuleError": f"UnsupportedModuleError; {_VALIDATORS}",
    "IllegalModuleConfigurationError": f"UnsupportedModuleError; {_VALIDATORS}",
    "register_module_validator": _VALIDATORS,
    "register_module_fixer": _VALIDATORS,
    "check_per_sample_gradients_are_correct": (
        "the engine compares its gradients with those of examples alone during training, unless "
        "verify=False"
    ),
    "get_grad_sample_modes": "all modes give the same gradients: leave grad_sample_mode out",
}
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
