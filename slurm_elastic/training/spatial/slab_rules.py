# ruff: noqa: PLR0917 - arguments in the order of torch's functions
"""Rules by which functions of torch work on slabs, by the names of the functions.

Importing this module registers them, with those of `slab_layer_rules`. A function without a rule is
refused by `SlabTensor`.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.core.slab_grid import SpatialCutError
from slurm_elastic.training.spatial import slab_layer_rules, slab_layers  # noqa: F401 - registers its rules
from slurm_elastic.training.spatial.rule_registry import first_slab, input_slab, reduced, rule
from slurm_elastic.training.spatial.slab_tensor import SlabTensor, plain, wrapped

#: Functions that treat each voxel alone.
_ELEMENTWISE = (
    "abs add addcdiv addcmul and bernoulli bfloat16 bitwise_and bitwise_not bitwise_or bool ceil "
    "celu clamp clamp_max clamp_min clip clone contiguous cos cosh cpu cuda detach div divide "
    "double elu eq erf exp expm1 float floor floordiv full_like ge gelu gt half hardshrink "
    "hardsigmoid hardswish hardtanh iadd iand imul int invert ior isfinite isinf isnan isub "
    "itruediv ixor le leaky_relu lerp log log10 log1p log2 logical_and logical_not logical_or "
    "logical_xor logsigmoid long lt masked_fill maximum minimum mish mul multiply nan_to_num ne "
    "neg ones_like or pow radd rand rand_like rdiv reciprocal relu relu6 remainder requires_grad "
    "rmul ror round rpow rrelu rsqrt rsub rtruediv rxor selu sigmoid sign silu sin softplus "
    "softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to true_divide "
    "truediv type type_as where xor zeros_like"
)
#: Properties and methods whose result is no tensor of the volume.
_PLAIN = (
    "backward data_ptr dim element_size get_device hash is_complex is_contiguous "
    "is_floating_point is_pinned is_same_size is_signed ndimension numpy register_hook "
    "register_post_accumulate_grad_hook retain_grad tolist untyped_storage"
)


def _matched(value: Any, like: SlabTensor) -> Any:
    """Return an argument as this rank needs it: a slab of tensors of the whole volume."""
    if isinstance(value, SlabTensor):
        if value.extents != like.extents:
            shown = ("x".join(map(str, t.extents)) for t in (like, value))
            raise SpatialCutError(
                f"model: tensors of {' and '.join(shown)} that are cut in space do not fit each"
                " other: expected equal extents"
            )
        return plain(value)
    if isinstance(value, torch.Tensor) and tuple(value.shape[-len(like.extents) :]) == like.extents:
        return slab_layers.slab_of(value, like)
    if isinstance(value, list | tuple):
        return type(value)(_matched(v, like) for v in value)
    return value


def _rewrapped(result: Any, like: SlabTensor) -> Any:
    if isinstance(result, SlabTensor) or not isinstance(result, torch.Tensor):
        return result
    return wrapped(result, like.group, like.extents)


@rule(*_ELEMENTWISE.split())
def _elementwise(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    like = first_slab([*args, *kwargs.values()])
    written = args[0] if isinstance(args[0], SlabTensor) else None
    matched = [_matched(a, like) for a in args]
    result = func(*matched, **{k: _matched(v, like) for k, v in kwargs.items()})
    if written is not None and result is matched[0]:
        return written  # changed in place
    return _rewrapped(result, like)


@rule(*_PLAIN.split())
def _unchanged(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@rule("get")
def _property(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    of = getattr(getattr(func, "__self__", None), "__name__", "")
    if of == "shape":
        return args[0].volume_shape
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and of not in {"grad", "data"}:
        raise SpatialCutError(f"model: .{of} of a tensor that is cut in space is invalid")
    return _rewrapped(result, args[0]) if of == "data" else result


@rule("set", "delete")
def _set_property(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@rule("size")
def _size(_: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    shape = args[0].volume_shape
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@rule("numel", "nelement")
def _numel(_: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    del kwargs
    return int(args[0].volume_shape.numel())


@rule("len")
def _len(_: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    del kwargs
    return int(args[0].volume_shape[0])


@rule(
    "flatten",
    "reshape",
    "view",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "item",
)
def _of_whole(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute a function of the whole volume, equally on every rank."""
    return func(slab_layers.spatial_whole(args[0]), *args[1:], **kwargs)


@rule("cat", "concat", "concatenate")
def _cat(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensors = args[0] if args else kwargs.pop("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    like = first_slab(tensors)
    _check_dim(func, like, dim)
    result = func([_matched(t, like) for t in tensors], dim)
    return wrapped(result, like.group, like.extents)


@rule("softmax", "log_softmax", "argmax", "argmin")
def _over_channels(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = input_slab(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    _check_dim(func, tensor, dim)
    return wrapped(func(plain(tensor), *args[1:], **kwargs), tensor.group, tensor.extents)


@rule("unsqueeze", "squeeze", "chunk", "split", "select_channels")
def _reshaped_channels(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensor = input_slab(args[0])
    default = 0 if func.__name__ in {"chunk", "split"} else None
    position = 2 if func.__name__ in {"chunk", "split"} else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    if func.__name__ == "unsqueeze" and dim is not None and dim < 0:
        dim -= 1  # counted in the result
    _check_dim(func, tensor, dim)
    result = func(plain(tensor), *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return wrapped(result, tensor.group, tensor.extents)
    return tuple(wrapped(part, tensor.group, tensor.extents) for part in result)


@rule("sum", "mean")
def _reduction(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = input_slab(args[0])
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    rank = len(tensor.volume_shape)
    dims = list(range(rank)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    return reduced(tensor, dims, keep=keep, mean=func.__name__ == "mean")


@rule(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def _voxel_loss(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    if len(args) > 2:
        kwargs |= dict(zip(("weight",), args[2:3], strict=True))
    reduction = kwargs.pop("reduction", "mean")
    for name in ("size_average", "reduce"):
        kwargs.pop(name, None)
    like = first_slab(args[:2])
    each = wrapped(
        func(
            *[_matched(a, like) for a in args[:2]],
            **{k: _matched(v, like) for k, v in kwargs.items()},
            reduction="none",
        ),
        like.group,
        like.extents,
    )
    return _loss(each, reduction)


@rule("cross_entropy", "nll_loss")
def _class_loss(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        del size_average, reduce
        like = input_slab(input)
        further = {"label_smoothing": label_smoothing} if label_smoothing else {}
        own_target = _matched(target, like)
        each = func(
            plain(like), own_target, weight, ignore_index=ignore_index, reduction="none", **further
        )
        losses = wrapped(each, like.group, like.extents)
        if reduction != "mean" or own_target.is_floating_point():
            return _loss(losses, reduction)
        counts = (own_target != ignore_index).to(each.dtype)
        if weight is not None:
            counts = counts * weight[own_target.clamp(0, len(weight) - 1)]
        total = slab_layers.group_sum(counts.sum(), like)
        return slab_layers.group_sum(each.sum(), like) / total

    return arguments(*args, **kwargs)


def _loss(each: SlabTensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return each
    dims = list(range(len(each.volume_shape)))
    return reduced(each, dims, keep=False, mean=reduction == "mean")


def _check_dim(func: Any, tensor: SlabTensor, dim: Any) -> None:
    rank = len(tensor.volume_shape)
    limit = rank - len(tensor.extents)
    if not isinstance(dim, int) or not (0 <= dim < limit or -rank <= dim < limit - rank):
        raise SpatialCutError(
            f"model: {func.__name__} along dimension {dim} of a tensor that is cut in space is"
            " invalid: expected that of samples or channels"
        )
