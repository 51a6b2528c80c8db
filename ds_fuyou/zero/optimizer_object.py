# SPDX-License-Identifier: Apache-2.0
"""The optimizer object that the script or DeepSpeed made: its groups hold the hyperparameters, and it updates nothing.

What others hang on it goes on working: hooks around its ``step()``, among them those by which PyTorch's schedulers see
that it was called. What would change its states is refused, since they are elsewhere.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ds_fuyou.ds_json import activation_of
from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from ds_fuyou.log import log_once

__all__ = [
    "StatesElsewhere",
    "give_back",
    "hide_states",
    "keeping_empty_groups",
    "refuse_change",
    "require_hidden",
    "require_type",
    "run_hooks",
]

_INSTEAD = (
    "moments are out of core: read and set them with safe_get_full_optimizer_state and safe_set_full_optimizer_state "
    "of deepspeed.utils, parameter by parameter"
)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_GIVEN = "fuyou_given"  # of an optimizer object that stands for the script's
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def keeping_empty_groups(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine._configure_optimizer``: DeepSpeed takes groups without parameters (biases of a model whose
    adapters have none, say) out of the list that it was given, behind the back of a scheduler that counts them. Under
    Accelerate with an offload section that is a list of DeepSpeed's own, as here: of an object that has all else of the
    script's. Not where that owns something (DeepSpeed's own optimizers destroy what C++ keeps for them): two would.
    """

    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        given = client_optimizer
        is_active = activation_of(self._config) is not None
        is_plain = not any(hasattr(type(given), name) for name in ("__del__", "__slots__"))
        if is_active and isinstance(given, torch.optim.Optimizer) and is_plain:
            groups = list(given.param_groups)
            if not all(group["params"] for group in groups):
                client_optimizer = object.__new__(type(given))
                vars(client_optimizer).update(vars(given), param_groups=groups)
                setattr(client_optimizer, _GIVEN, given)
        original(self, client_optimizer, model_parameters)

    return _configure_optimizer


def _faces(optimizer: Any) -> tuple[Any, ...]:
    """It, and the script's own where that is another; the last one is the script's."""
    given = getattr(optimizer, _GIVEN, None)
    return (optimizer,) if given is None else (optimizer, given)


def refuse_change() -> NoReturn:
    raise FuyouStateError(f"optimizer.state must stay as it is, which is empty, and the script changes it; {_INSTEAD}")


class StatesElsewhere(dict[Any, Any]):
    """``optimizer.state``: empty. A script that resets the optimizer would be believed, and would reset nothing."""

    def __missing__(self, key: Any) -> Mapping[str, Any]:
        return _NOTHING

    def _tell(self) -> None:
        log_once(logging.INFO, f"optimizer.state was read, and is empty; {_INSTEAD}")

    def __iter__(self) -> Iterator[Any]:
        self._tell()
        return super().__iter__()

    def values(self) -> Any:
        self._tell()
        return super().values()

    def items(self) -> Any:
        self._tell()
        return super().items()

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse_change()

    def __delitem__(self, key: Any) -> None:
        refuse_change()

    def __ior__(self, other: Any) -> NoReturn:  # type: ignore[misc]
        refuse_change()

    def clear(self) -> None:
        refuse_change()

    def pop(self, *args: Any) -> NoReturn:
        refuse_change()

    def popitem(self) -> NoReturn:
        refuse_change()

    def setdefault(self, *args: Any) -> NoReturn:
        refuse_change()

    def update(self, *args: Any, **kwargs: Any) -> None:
        refuse_change()


def require_type(dtype: torch.dtype) -> None:
    """
    Raises:
        FuyouConfigError: the core has no such parameters.
    """
    if dtype not in _TYPES:
        raise FuyouConfigError(
            f"parameters that are trained must be of {', '.join(map(str, _TYPES))}; the first of the optimizer's first "
            f"group, whose type DeepSpeed takes for that of all, is of {dtype}. Convert the model, or give the "
            "optimizer trainable parameters alone"
        )


def hide_states(optimizer: Any) -> None:
    """From here on the states of ``optimizer``, which were never made, cannot be changed through it."""
    for face in _faces(optimizer):
        face.state = StatesElsewhere()


def give_back(optimizer: Any) -> None:
    """The engine has ended: nothing stands in the place of states any more."""
    for face in _faces(optimizer):
        face.state = defaultdict(dict)


def require_hidden(optimizer: Any) -> None:
    """
    Raises:
        FuyouStateError: the script has put other states in their place, or added parameters.
    """
    groups = {id(group): group for face in _faces(optimizer) for group in face.param_groups}
    added = [tuple(param.shape) for group in groups.values() for param in group["params"]]
    if added:
        raise FuyouStateError(
            f"{len(added)} parameters were added to the optimizer after deepspeed.initialize(), the first of shape "
            f"{added[0]}; they would never be trained. What is to be trained later has to be trainable, and in the "
            f"optimizer, until initialize() returns, and may be frozen then; or build the engine anew"
        )
    if not all(isinstance(face.state, StatesElsewhere) for face in _faces(optimizer)):
        hide_states(optimizer)  # a script that goes on after this exception has been told
        refuse_change()


def run_hooks(optimizer: Any) -> None:
    """``optimizer.step()``, once a step, before the update (stock calls it for every sub-group). Its groups hold no
    parameters, so nothing is updated: hooks of the script's run, and may still change hyperparameters.
    """
    _faces(optimizer)[-1].step()
