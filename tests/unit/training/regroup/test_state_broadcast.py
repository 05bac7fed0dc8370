"""Transfer of a state between ranks."""

import pytest
import torch

from slurm_elastic.training.checkpoint.training_state import pack
from slurm_elastic.training.regroup.state_broadcast import receive_state, send_state

CPU = torch.device("cpu")


def transfer(
    flat: dict[str, torch.Tensor], values: object, live: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], object]:
    """Send a state and receive it, one broadcast after the other."""
    sent: list[torch.Tensor] = []
    send_state(lambda t: sent.append(t.clone()), flat, values, CPU)

    def receive(tensor: torch.Tensor) -> None:
        source = sent.pop(0)
        assert source.shape == tensor.reshape(source.shape).shape
        tensor.copy_(source.reshape(tensor.shape))

    received = receive_state(receive, live, CPU)
    assert not sent
    return received


@pytest.mark.parametrize("padding", [10, 100_000])
def test_every_tensor_and_value_arrives(padding: int) -> None:
    large = torch.randn(1100, 1000)
    flat = {
        "model.large": large,
        "model.turned": large.T,
        "model.small": torch.randn(3, 2),
        "model.empty": torch.zeros(0, 4),
        "model.scalar": torch.tensor(7),
        "model.half": torch.randn(5).half(),
        "optim.step.large": torch.tensor(3.0),
        "blob.optim": pack("options", {"lr": 0.1, "padding": "x" * padding}),
    }
    own = torch.zeros_like(large)
    received, values = transfer(flat, {"cursor": [3, 1, 2]}, {"model.large": own})
    assert values == {"cursor": [3, 1, 2]}
    assert received.keys() == flat.keys()
    for name, tensor in flat.items():
        assert received[name].dtype == tensor.dtype, name
        assert torch.equal(received[name], tensor), name
    assert received["model.large"].data_ptr() == own.data_ptr(), "without a copy"


def test_many_small_tensors_travel_together() -> None:
    flat = {f"model.{i}": torch.full((10,), float(i)) for i in range(500)}
    count = 0

    def broadcast(_tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1

    send_state(broadcast, flat, None, CPU)
    assert count == 2
