"""A process of the benchmark ``weights``: it takes a model's weights, from files or from a keeper, and answers prompts. It
says what it does as JSON lines on standard output, and ends with its standard input."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import sys
import time
from typing import Any

# The same kernels give the same bits then, in every process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

PROMPT = [11, 5, 77, 3, 42, 8, 91, 60, 23, 14, 2, 37, 65, 50, 19, 7]
# Tokens of one answer.
TOKENS = 4


class Phases:
    """Milliseconds of each part, one after the other."""

    def __init__(self, started_ns: int) -> None:
        self.ms: dict[str, float] = {}
        self._last = started_ns

    def end(self, name: str) -> None:
        now = time.monotonic_ns()
        self.ms[name] = (now - self._last) / 1e6
        self._last = now


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["pretrained", "attach"])
    parser.add_argument("folder")
    parser.add_argument("--name", default="")
    parser.add_argument("--domain")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--started", type=int, required=True, help="CLOCK_MONOTONIC, in ns, when this process was started")
    parser.add_argument("--forever", action="store_true", help="answer until standard input ends")
    asked = parser.parse_args()
    # PyTorch's name of the device.
    place = "cpu" if asked.device == "host" else asked.device
    phases = Phases(asked.started)
    import torch
    import transformers

    import warpipe  # noqa: F401

    transformers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    phases.end("import")
    # Both ways have a context before they take the weights.
    torch.zeros(1, device=place).add_(1).cpu()
    phases.end("context")
    take = from_files if asked.way == "pretrained" else from_keeper
    model, held, how = take(asked, place, phases)
    model.eval()
    first, hashed = answer(torch, model, place)
    # The first token of the first answer; the rest of it comes behind.
    phases.ms["first token"] = (first - phases._last) / 1e6
    total = (first - asked.started) / 1e6
    say("answer", sha=hashed, phases=phases.ms, total_ms=total, how=how, pid=os.getpid())
    while asked.forever and not input_has_ended():
        say("again", sha=answer(torch, model, place)[1])
    if not asked.forever:
        sys.stdin.read()
    del model, held
    return 0


def from_files(asked: argparse.Namespace, place: str, phases: Phases) -> tuple[Any, Any, str]:
    import torch
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        # Straight to the device: needs the package accelerate.
        model, how = load(asked.folder, dtype=torch.bfloat16, device_map={"": place}), "device_map"
    except (ImportError, ValueError):
        model, how = load(asked.folder, dtype=torch.bfloat16).to(place), "to(device)"
    synchronize(place)
    phases.end("weights")
    return model, None, how


def from_keeper(asked: argparse.Namespace, place: str, phases: Phases) -> tuple[Any, Any, str]:
    import torch
    import transformers

    import warpipe

    config = transformers.AutoConfig.from_pretrained(asked.folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # The one buffer that is not in the files: computed as from_pretrained does, on the host.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(place)
    phases.end("skeleton")
    device = warpipe.Device(asked.device)
    phases.end("device")
    weights = warpipe.weights.open(asked.name, device=device, domain=asked.domain, wait=60)
    phases.end("open")
    warpipe.weights.attach(model, weights)
    phases.end("attach")
    return model, weights, f"version {weights.version}"


def answer(torch: Any, model: Any, device: str) -> tuple[int, str]:
    """When the first token was there, and a hash over all logits of the answer."""
    tokens = torch.tensor([PROMPT], device=device)
    hashed, first = hashlib.sha256(), 0
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = model(input_ids=tokens, use_cache=False).logits
            bits = logits.contiguous().view(torch.int16).cpu()
            first = first or time.monotonic_ns()
            hashed.update(bits.numpy().tobytes())
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return first, hashed.hexdigest()


def input_has_ended() -> bool:
    # Nothing is ever written to it.
    return bool(select.select([sys.stdin], [], [], 0)[0])


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
