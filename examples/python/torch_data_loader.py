"""PyTorch's DataLoader, whose workers put the batches on the GPU and hand them to the trainer where they lie.

    python torch_data_loader.py [--batches 100] [--device cpu]

Only ``warpipe.torch.install()`` is warpipe's: the loader, its queues and the training loop are as without it. The workers
are spawned, as CUDA does not survive a fork. The model is a linear one; its loss must fall to the noise in the data. On the
host the batches are host tensors, which PyTorch carries as it always does.
"""

import argparse
from typing import Any

import torch

import warpipe

FEATURES, ROWS, WORKERS = 16, 256, 2
NOISE = 0.1


def truth() -> torch.Tensor:
    """The weights that the trainer is to find."""
    return torch.linspace(-1, 1, FEATURES)


class Batches:
    """Batches of features and what is to be predicted, made on the device by the process that asks."""

    def __init__(self, count: int, device: str) -> None:
        self.count, self.device = count, device

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(index)
        features = torch.randn(ROWS, FEATURES, device=self.device, generator=generator)
        noise = torch.randn(ROWS, device=self.device, generator=generator)
        return features, features @ truth().to(self.device) + NOISE * noise


def train(batches: int, device: str) -> list[float]:
    """One step for each batch; gives the losses."""
    dataset: Any = Batches(batches, device)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=WORKERS, multiprocessing_context="spawn"
    )
    model = torch.nn.Linear(FEATURES, 1, bias=False, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for features, targets in loader:
        assert features.device.type == device.split(":")[0], "the batch lies where its worker put it"
        loss: Any = torch.nn.functional.mse_loss(model(features)[:, 0], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    warpipe.torch.install()
    losses = train(options.batches, options.device)
    assert len(losses) == options.batches, "every batch arrives"
    assert losses[-1] < 4 * NOISE**2 < losses[0], f"the loss falls to the noise: {losses[0]} ... {losses[-1]}"
    print(f"trainer: {len(losses)} batches of {WORKERS} workers, loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
