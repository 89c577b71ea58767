"""The PyTorch engine: noise that follows the gradients, at the price of a plain step."""

from typing import TYPE_CHECKING, NoReturn

try:
    from torch.nn import GRU as DPGRU
    from torch.nn import LSTM as DPLSTM
    from torch.nn import RNN as DPRNN
    from torch.nn import GRUCell as DPGRUCell
    from torch.nn import LSTMCell as DPLSTMCell
    from torch.nn import MultiheadAttention as DPMultiheadAttention
    from torch.nn import RNNCell as DPRNNCell
    from torch.nn.parallel import (
        DistributedDataParallel as DifferentiallyPrivateDistributedDataParallel,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Expected PyTorch for privagrad.torch, found none: pip install 'privagrad[torch]'."
    ) from error

from privagrad.torch.adam_bc import AdamBC
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.calibration import get_noise_multiplier
from privagrad.torch.damping import damp_steps, start_from_counts, start_from_noise, word_shares
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.filters import KalmanFilter, LowPassFilter
from privagrad.torch.guards.constants import public
from privagrad.torch.kronecker import dp_kfc_steps, fold, precondition
from privagrad.torch.loaders import BatchMemoryManager
from privagrad.torch.module import PrivateModule
from privagrad.torch.moments import second_moments
from privagrad.torch.opacus_names import hint_for_import
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy
from privagrad.torch.per_example_loss import PerExampleLoss
from privagrad.torch.poisson_loader import DPDataLoader
from privagrad.torch.probes import pink_noise, zipf_tokens
from privagrad.torch.schedules import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from privagrad.torch.unwrapped import PrivateHooks
from privagrad.torch.validator import ModuleValidator, UnsupportedModuleError

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "AdamBC",
    "AdaptiveSGD",
    "BatchMemoryManager",
    "DPDataLoader",
    "DPGRUCell",
    "DPLSTMCell",
    "DPMultiheadAttention",
    "DPRNNCell",
    "DifferentiallyPrivateDistributedDataParallel",
    "ExponentialGradClip",
    "ExponentialNoise",
    "KalmanFilter",
    "LambdaGradClip",
    "LambdaNoise",
    "LinearCrossEntropy",
    "LowPassFilter",
    "ModuleValidator",
    "PerExampleLoss",
    "PrivacyEngine",
    "PrivateHooks",
    "PrivateModule",
    "PrivateOptimizer",
    "StepGradClip",
    "StepNoise",
    "UnsupportedModuleError",
    "damp_steps",
    "dp_kfc_steps",
    "fold",
    "get_noise_multiplier",
    "pink_noise",
    "precondition",
    "public",
    "second_moments",
    "start_from_counts",
    "start_from_noise",
    "word_shares",
    "zipf_tokens",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        hint = hint_for_import(name)
        if hint is not None:
            # An AttributeError would lose its message in `from privagrad.torch import ...`.
            raise ImportError(hint)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
