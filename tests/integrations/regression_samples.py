"""The data of these tests: each sample tells its number."""

import torch


class RegressionSamples(torch.utils.data.Dataset):
    """Points, the values of a smooth function there, and the number of each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x.sum(1).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict:
        return {"x": self.x[at], "y": self.y[at], "number": torch.tensor(at)}
