"""A process that has loaded a model as an engine does: started by a test, which asks it what it has."""

import hashlib
import json
import subprocess
import sys

import pytest

SAID = "said "


def serve(model, given, commands):
    """The engine's side: says what the model has, at first and after each command, a JSON list on a line."""

    def said():
        what = {"name": getattr(given, "name", None), "how": type(given).__name__, "digest": digest(model)}
        print(SAID + json.dumps(what), flush=True)

    said()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command != "again":
            commands[command](*arguments)
        said()


def digest(model):
    """The names and the values of a model's parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


class Engine:
    """The test's side."""

    def __init__(self, stack, program, *arguments):
        pipe = subprocess.PIPE
        command = [sys.executable, str(program), *map(str, arguments)]
        self.process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(self.process.kill)

    def said(self):
        for line in self.process.stdout:
            if line.startswith(SAID):
                return json.loads(line.removeprefix(SAID))
        raise AssertionError(f"the engine ended with {self.process.wait()}")

    def asked(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.said()


def drop(name, domain):
    """Ends the keeper of a name."""
    command = [sys.executable, "-m", "warpipe", "weights", "drop", name, "--domain", str(domain.path)]
    subprocess.run(command, check=True, capture_output=True)


def llama(folder, factor):
    """Writes a checkpoint with values times a factor, and returns the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    model.save_pretrained(folder)
    return model
