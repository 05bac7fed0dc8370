# ruff: noqa: PLR0917 - arguments in the order of torch's functions
"""Rules of layers: convolution, pooling, normalisation, enlargement, dropout."""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.core.slab_grid import SpatialCutError
from slurm_elastic.training.spatial import slab_layers
from slurm_elastic.training.spatial.rule_registry import input_slab, reduced, rule
from slurm_elastic.training.spatial.slab_tensor import plain, wrapped

#: Arguments of torch's functions, in order.
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    *("input", "weight", "bias", "stride", "padding"),
    *("output_padding", "groups", "dilation"),
)
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@rule("conv1d", "conv2d", "conv3d")
def _convolution(_: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    given = _DEFAULTS | dict(zip(_CONVOLUTION, args, strict=False)) | kwargs
    return slab_layers.convolve(
        input_slab(given.pop("input")), given.pop("weight"), given.pop("bias"), **given
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(_: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    given = _DEFAULTS | dict(zip(_TRANSPOSED, args, strict=False)) | kwargs
    return slab_layers.convolve(
        input_slab(given.pop("input")),
        given.pop("weight"),
        given.pop("bias"),
        transposed=True,
        **given,
    )


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> torch.Tensor:
        if return_indices:
            raise SpatialCutError(
                f"model: {func.__name__} with return_indices is invalid for a tensor that is cut in"
                " space: expected values only"
            )
        return slab_layers.pool_largest(
            input_slab(input), kernel_size, stride, padding, dilation, ceil_mode=ceil_mode
        )

    return arguments(*args, **kwargs)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    del func

    def arguments(
        input: Any,  # noqa: A002
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> torch.Tensor:
        return slab_layers.pool_mean(
            input_slab(input),
            kernel_size,
            stride,
            padding,
            ceil_mode=ceil_mode,
            count_padding=count_include_pad,
            divisor=divisor_override,
        )

    return arguments(*args, **kwargs)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = input_slab(args[0])
    sizes = args[1] if len(args) > 1 else kwargs["output_size"]
    spatial = range(-len(tensor.extents), 0)
    if set(sizes if isinstance(sizes, list | tuple) else [sizes]) == {1}:
        return reduced(tensor, list(spatial), keep=True, mean=True)
    result: torch.Tensor = func(slab_layers.spatial_whole(tensor), *args[1:], **kwargs)
    return result


@rule("batch_norm")
def _batch_norm(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *_: Any,
    ) -> torch.Tensor:
        tensor = input_slab(input)
        if not training:
            output = func(plain(tensor), running_mean, running_var, weight, bias, False, 0.0, eps)
            return wrapped(output, tensor.group, tensor.extents)
        return slab_layers.normalize(
            tensor,
            weight,
            bias,
            parts=tensor.volume_shape[1],
            over_batch=True,
            epsilon=eps,
            running=(running_mean, running_var),
            momentum=momentum,
        )

    return arguments(*args, **kwargs)


@rule("instance_norm")
def _instance_norm(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *_: Any,
    ) -> torch.Tensor:
        tensor = input_slab(input)
        if not use_input_stats:
            output = func(
                plain(tensor), running_mean, running_var, weight, bias, False, momentum, eps
            )
            return wrapped(output, tensor.group, tensor.extents)
        if running_mean is not None:
            raise SpatialCutError(
                "model: instance_norm with running statistics is invalid for a tensor that is cut"
                " in space: expected track_running_stats=False"
            )
        return slab_layers.normalize(
            tensor, weight, bias, parts=tensor.volume_shape[1], over_batch=False, epsilon=eps
        )

    return arguments(*args, **kwargs)


@rule("group_norm")
def _group_norm(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    del func

    def arguments(
        input: Any,  # noqa: A002
        num_groups: int,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> torch.Tensor:
        return slab_layers.normalize(
            input_slab(input), weight, bias, parts=num_groups, over_batch=False, epsilon=eps
        )

    return arguments(*args, **kwargs)


@rule("interpolate", "upsample", "upsample_nearest")
def _interpolate(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        tensor = input_slab(input)
        count = len(tensor.extents)
        scales = scale_factor if isinstance(scale_factor, list | tuple) else [scale_factor] * count
        if size is not None:
            sizes = size if isinstance(size, list | tuple) else [size] * count
            scales = [s / n for s, n in zip(sizes, tensor.extents, strict=True)]
        if mode != "nearest" or any(s is None or s < 1 or s != int(s) for s in scales):
            raise SpatialCutError(
                f"model: {func.__name__} with mode {mode!r} and factors {scales} is invalid for a"
                " tensor that is cut in space: expected 'nearest' and whole factors; a transposed"
                " convolution works, too"
            )
        return slab_layers.enlarge(tensor, [int(s) for s in scales])

    return arguments(*args, **kwargs)


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def _dropout(func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    def arguments(
        input: Any,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        **further: Any,
    ) -> torch.Tensor:
        del inplace
        tensor = input_slab(input)
        if not further.get("train", training):
            return tensor
        return slab_layers.drop(tensor, p, channels=func.__name__ != "dropout")

    return arguments(*args, **kwargs)
