"""Layers that run again in the backward pass."""

import torch

from slurm_elastic.training.parallel.recomputation import keep_activations, recompute


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def gradients(model, inputs):
    torch.manual_seed(7)
    model(inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_results_and_random_numbers_are_those_of_one_run():
    inputs = torch.randn(16, 4)
    plain, again = net(), net()
    runs = []
    again[0].register_forward_hook(lambda *_: runs.append("called"))
    inner = again[0].forward
    again[0].forward = lambda x: (runs.append("run"), inner(x))[1]
    assert recompute(again.named_children()) == (4, 0)
    for mine, theirs in zip(gradients(again, inputs), gradients(plain, inputs), strict=True):
        assert torch.equal(mine, theirs)
    assert runs.count("run") == 2
    assert again.state_dict().keys() == plain.state_dict().keys()


def test_without_gradients_a_layer_runs_once():
    model, runs = net(), []
    inner = model[0].forward
    model[0].forward = lambda x: (runs.append("run"), inner(x))[1]
    recompute(model.named_children())
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert runs == ["run"]


def test_layers_whose_buffers_would_change_twice_keep_their_activations():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    assert recompute(model.named_children()) == (1, 1)
    model(torch.randn(8, 4)).sum().backward()
    assert model[1].num_batches_tracked == 1


def test_a_layer_runs_again_once_however_often_it_is_asked_to_and_no_more_when_undone():
    model, runs = net(), []
    inner = model[0].forward
    model[0].forward = lambda x: (runs.append("run"), inner(x))[1]
    assert recompute(model.named_children()) == recompute(model.named_children()) == (4, 0)
    gradients(model, torch.randn(2, 4))
    assert runs == ["run"] * 2
    keep_activations(model.named_children())
    keep_activations(model.named_children())
    gradients(model, torch.randn(2, 4))
    assert runs == ["run"] * 3
