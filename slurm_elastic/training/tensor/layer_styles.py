"""Which layers of a model a tensor-parallel group divides, and how. Pure.

Without styles of the script, divided are

- `nn.MultiheadAttention`, by heads;
- pairs of linear layers between which there are only element-wise modules, in an `nn.Sequential` or
  in torch's transformer layers: the first by columns, the second by rows;
- other large linear layers: by columns, and all output features are collected.

Styles of the script are for pairs that torch does not show, such as those in a `forward` of its
own. Layers whose weights occur twice, or whose class is not torch's own, stay whole.

>>> pair = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
>>> {name: style.value for name, style in layer_styles(pair, 2).items()}
{'0': 'colwise', '2': 'rowwise'}
>>> layer_styles(pair, 4)
{}
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.training.tied_parameters import ties

#: Weights of a linear layer that is not one of a pair: smaller ones are not worth a message.
LEAST_WEIGHTS = 1 << 16


class LayerStyle(enum.Enum):
    """Ways in which the ranks of a group share a layer, as torch and Hugging Face name them."""

    #: Some of the output features on each rank.
    COLUMNS = "colwise"
    #: Some of the input features on each rank; the outputs are sums over the group.
    ROWS = "rowwise"
    #: Like `COLUMNS`, but all features are collected.
    COLLECTED = "colwise_gather_output"
    #: Some of the heads on each rank.
    HEADS = "heads"
    #: Everything on every rank.
    WHOLE = "whole"


#: Styles that a script may give to linear layers.
_OF_SCRIPTS = {
    style.value: style
    for style in (LayerStyle.COLUMNS, LayerStyle.ROWS, LayerStyle.COLLECTED, LayerStyle.WHOLE)
}
#: Modules that treat each feature by itself, and keep no state of it.
_ELEMENTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = (nn.functional.relu, nn.functional.gelu)
_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def layer_styles(
    model: nn.Module,
    size: int,
    given: Mapping[str, str] | None = None,
    *,
    tied: Iterable[str] = (),
) -> dict[str, LayerStyle]:
    """Return the layers to divide, by name; the same on all ranks.

    Args:
        model: whole, or a stage of it.
        size: ranks of a group.
        given: styles of the script, by name or pattern (`blocks.*.fc1`); the first that matches
            counts, before all rules. `check_styles` has passed.
        tied: names of parameters that another stage has, too.
    """
    given = given or {}
    modules = dict(model.named_modules())
    whole = _with_shared_weights(model, tied)
    asked = {name: style for name in modules if (style := _asked(name, given)) is not None}
    pairs = dict(_pairs(model, size, whole))
    styles: dict[str, LayerStyle] = {}
    within: set[nn.Module] = set()  # modules that a divided one uses itself
    for name, module in modules.items():
        if name in asked:
            style = asked[name]
        elif module in within or module in whole:
            style = LayerStyle.WHOLE
        elif _divisible_attention(module, size):
            style = LayerStyle.HEADS
        elif _plain_linear(module):
            style = pairs.get(name) or _alone(module, size)
        else:
            style = LayerStyle.WHOLE
        if isinstance(module, nn.MultiheadAttention):
            within.update(module.children())
        if style is not LayerStyle.WHOLE:
            styles[name] = style
    return styles


def random_between(model: nn.Module, styles: Mapping[str, LayerStyle]) -> list[nn.Dropout]:
    """Return the dropouts that see features of one rank only.

    Args:
        model: whole.
        styles: as of `layer_styles`.
    """
    between = (
        module
        for first, inner, _ in _chains(model)
        if styles.get(first) is LayerStyle.COLUMNS
        for module in inner
    )
    return [module for module in between if isinstance(module, nn.Dropout)]


def _asked(name: str, given: Mapping[str, str]) -> LayerStyle | None:
    return next(
        (_OF_SCRIPTS.get(value) for pattern, value in given.items() if fnmatchcase(name, pattern)),
        None,
    )


def check_styles(stages: Iterable[nn.Module], size: int, given: Mapping[str, str]) -> None:
    """Check the styles of a script.

    Args:
        stages: of the whole model, in order; without stages the model.
        size: ranks of a group.
        given: styles, by name or pattern.

    Raises:
        InvalidInputError: a style or pattern is wrong.
    """
    modules = {name: module for stage in stages for name, module in stage.named_modules()}
    for pattern, value in given.items():
        if value not in _OF_SCRIPTS:
            raise InvalidInputError(
                f"tensor_styles: {value!r} of {pattern!r} is invalid: expected"
                f" {', '.join(_OF_SCRIPTS)}"
            )
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise InvalidInputError(
                f"tensor_styles: {pattern!r} is invalid: expected the name of a module of the"
                " model, or a pattern of names such as blocks.*.fc1"
            )
    for name, module in modules.items():
        style = _asked(name, given)
        if style is None or style is LayerStyle.WHOLE:
            continue
        if not _plain_linear(module):
            raise InvalidInputError(
                f"tensor_styles: {name!r}, a {type(module).__name__}, is invalid: expected an"
                " nn.Linear; narrow the pattern"
            )
        count = module.in_features if style is LayerStyle.ROWS else module.out_features
        if count % size:
            raise InvalidInputError(
                f"tensor_styles: {name!r} with {count} features is invalid for groups of {size}"
                f" ranks: expected a multiple; use {LayerStyle.WHOLE.value!r}"
            )


def _chains(model: nn.Module) -> Iterator[tuple[str, list[nn.Module], str]]:
    """Yield name of a linear layer, the modules after it, and the next linear layer's name."""
    for prefix, parent in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if type(parent) in _TRANSFORMER_LAYERS and _elementwise(parent.activation):
            yield f"{dot}linear1", [parent.dropout], f"{dot}linear2"
        if type(parent) is not nn.Sequential:
            continue
        first = ""
        between: list[nn.Module] = []
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                if first:
                    yield first, between, f"{dot}{child_name}"
                first, between = f"{dot}{child_name}", []
            elif type(child) in _ELEMENTWISE:
                between.append(child)
            else:
                first = ""


def _pairs(
    model: nn.Module, size: int, whole: Collection[nn.Module]
) -> Iterator[tuple[str, LayerStyle]]:
    """Yield the layers of pairs that can be divided; no layer belongs to two."""
    modules = dict(model.named_modules())
    taken: set[str] = set()
    for first, _, second in _chains(model):
        layers = [modules.get(name) for name in (first, second)]
        usable = all(_plain_linear(layer) and layer not in whole for layer in layers)
        if not usable or taken.intersection((first, second)):
            continue
        if layers[0].out_features % size == 0:  # type: ignore[union-attr]
            taken.update((first, second))
            yield first, LayerStyle.COLUMNS
            yield second, LayerStyle.ROWS


def _alone(layer: nn.Linear, size: int) -> LayerStyle:
    large = layer.in_features * layer.out_features >= LEAST_WEIGHTS
    return LayerStyle.COLLECTED if large and layer.out_features % size == 0 else LayerStyle.WHOLE


def _plain_linear(module: object) -> bool:
    return type(module) is nn.Linear and _own_forward(module)


def _divisible_attention(module: nn.Module, size: int) -> bool:
    return (
        type(module) is nn.MultiheadAttention
        and _own_forward(module)
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and module.num_heads % size == 0
    )


def _own_forward(module: nn.Module) -> bool:
    """Return whether a module computes what its class does: nothing has replaced its forward."""
    return "forward" not in vars(module) and not nn.utils.parametrize.is_parametrized(module)


def _elementwise(activation: object) -> bool:
    return activation in _ELEMENTWISE_FUNCTIONS or type(activation) in _ELEMENTWISE


def _with_shared_weights(model: nn.Module, tied: Iterable[str]) -> set[nn.Module]:
    """Return the modules with a parameter that others have, too."""
    names = [*tied, *(name for names in ties(model) for name in names)]
    shared = {name.rpartition(".")[0] for name in names}
    return {module for name, module in model.named_modules() if name in shared}
