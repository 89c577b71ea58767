"""A module that becomes private and keeps its class: `make_private(wrap_model=False)`."""

from __future__ import annotations

import functools
from typing import Any

from privagrad.torch.module import PrivateForward, PrivateModule


class PrivateHooks:
    """What makes a module private that stays what it is.

    The module is trained as before: calls of it in training mode are those of the private module.
    `cleanup()` makes it a plain module again, which no private optimizer trains.

    Attributes
    ----------
    module : Module
        The user's module.
    """

    def __init__(self, private: PrivateModule) -> None:
        self.module = private._module
        self._private = private
        forward: Any = PrivateCall(private)
        self.module.forward = forward

    def cleanup(self) -> None:
        """Take the private forward passes off the module."""
        own = vars(self.module)
        if isinstance(own.get("forward"), PrivateCall):
            del own["forward"]
        for part in self.module.modules():
            if isinstance(vars(part).get("forward"), PrivateForward):
                del vars(part)["forward"]
        self._private.detach()


class PrivateCall:
    """The forward of the user's module: a private pass, within which it is the module's own."""

    def __init__(self, private: PrivateModule) -> None:
        module = private._module
        self.private, self.inside = private, False
        self.inner: Any = module.forward
        # The signature stays that of the module.
        functools.update_wrapper(self, type(module).forward.__get__(module), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            return self.inner(*args, **kwargs)
        module = self.private._module
        if module._forward_pre_hooks or module._forward_hooks:
            raise RuntimeError(
                "Expected a module without forward hooks with wrap_model=False, found some: they "
                "would be called twice. Put them on a layer inside of it, or leave out "
                "wrap_model=False."
            )
        self.private.training = module.training
        self.inside = True
        try:
            return self.private(*args, **kwargs)
        finally:
            self.inside = False

    def __reduce__(self) -> Any:
        """Copies of the module, also in files, are plain modules."""
        return getattr, (self.private._module, "forward")
