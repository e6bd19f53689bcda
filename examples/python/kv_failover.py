"""A KV cache that outlives its process: a decoder is killed in the middle of steps, a standby goes on at the next token.

    python kv_failover.py [--kills 20] [--model tiny] [--device host] [--domain DIR]

The cache lies in memory that the first process allocates. Of two workers that have it mapped one decodes, the other
waits, warmed up. The decoder's stream writes keys and values, then the next token, then the number of positions that are
complete: what that number says is complete, whatever dies. The process that decodes holds the one permit of a semaphore.
It comes back when the death of its holder is proven, so no dead process's kernel still writes; then the standby reads the
number and goes on there. A timeline tells the reader of each token.

The tokens must be those of a run without kills, and no step may run twice but one for each kill. ``tiny`` is a model of
two layers, in NumPy on the host, else in PyTorch. ``llama`` and ``llama-small`` are transformers' Llama with random
weights; the first has the layers of one of eight billion parameters, 7.6 GiB. Both workers have one copy of the weights.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import warpipe
from warpipe import weights
from warpipe.workers import Workers

LIMIT_SECONDS = 120.0
PROMPT = [11, 5, 77, 3, 42, 8, 91, 60]
# Tokens of the run without an order to wait for one: the reader measures a step with them.
FIRST_TOKENS = 16
TOKENS_PER_KILL = 2
# The next standby begins when the first tokens after a takeover are there.
START_DELAY_SECONDS = 0.1
# The least that a step of the tiny model takes, so that there is a middle to be killed in.
TINY_STEP_SECONDS = 0.004
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "num_hidden_layers": 14, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip


class Task(NamedTuple):
    """What all processes of a run know."""

    model: str
    device: str
    domain: str
    # Positions that are decoded. The cache has one more, in which standbys warm up.
    length: int


class Shape(NamedTuple):
    """Of the cache: two tensors for each layer, of the keys and the values."""

    layers: int
    heads: int
    head_size: int
    dtype: str


def place_of(task: Task) -> str:
    """PyTorch's name of the device."""
    return "cpu" if task.device == "host" else task.device


# The models. A step reads the token of its position and writes keys and values there; it gives the next token.


def framework(task: Task) -> Any:
    if task.model == "tiny" and task.device == "host":
        import numpy

        return numpy
    import torch

    return torch


class Tiny:
    """Attention over the cache, twice, in the same operations of NumPy and PyTorch."""

    shape = Shape(layers=2, heads=4, head_size=16, dtype="float32")
    vocabulary = 97

    @staticmethod
    def made(task: Task) -> dict[str, Any]:
        """The weights."""
        import numpy

        numbers = numpy.random.default_rng(1)
        width = Tiny.shape.heads * Tiny.shape.head_size
        sizes = {
            "embed": (Tiny.vocabulary, width),
            "places": (task.length + 1, width),
            "head": (width, Tiny.vocabulary),
        }
        sizes |= {
            f"{name}.{layer}": (width, width) for name in ("q", "k", "v", "o") for layer in range(Tiny.shape.layers)
        }
        return {name: numbers.standard_normal(size, dtype=numpy.float32) / 4 for name, size in sizes.items()}

    def __init__(self, task: Task, shared: Any, cache: Any) -> None:
        self.xp = framework(task)
        self.weights = {name: getattr(shared[name], self.xp.__name__)() for name in shared}
        self.cache = cache

    def step(self, tokens: Any, position: int) -> Any:
        found, xp, shape = self.weights, self.xp, self.shape
        x = found["embed"][tokens[position]] + found["places"][position]
        for layer in range(shape.layers):
            keys, values = self.cache[0, layer], self.cache[1, layer]
            keys[:, position] = (x @ found[f"k.{layer}"]).reshape(shape.heads, shape.head_size)
            values[:, position] = (x @ found[f"v.{layer}"]).reshape(shape.heads, shape.head_size)
            time.sleep(TINY_STEP_SECONDS / shape.layers)
            query = (x @ found[f"q.{layer}"]).reshape(shape.heads, 1, shape.head_size)
            scores = xp.exp((query * keys[:, : position + 1]).sum(-1) / shape.head_size)
            mixed = (scores[..., None] * values[:, : position + 1]).sum(1) / scores.sum(-1)[:, None]
            x = x + mixed.reshape(-1) @ found[f"o.{layer}"]
            x = x / (x * x).mean() ** 0.5
        return (x @ found["head"]).argmax()


class Llama:
    """transformers' model, with a static cache in the memory that it is given."""

    @staticmethod
    def config(task: Task) -> Any:
        import transformers

        return transformers.LlamaConfig(**(LLAMA_SMALL if task.model == "llama-small" else LLAMA))

    @staticmethod
    def shape_of(task: Task) -> Shape:
        config = Llama.config(task)
        size = config.hidden_size // config.num_attention_heads
        return Shape(config.num_hidden_layers, config.num_key_value_heads, size, "bfloat16")

    @staticmethod
    def made(task: Task) -> dict[str, Any]:
        """The weights."""
        import torch
        import transformers

        torch.manual_seed(1)
        with torch.device(place_of(task)):
            model = transformers.AutoModelForCausalLM.from_config(Llama.config(task), dtype=torch.bfloat16)
        state: dict[str, Any] = model.state_dict()
        return state

    def __init__(self, task: Task, shared: Any, cache: Any) -> None:
        import torch
        import transformers

        self.torch = torch
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        config = self.config(task)
        with weights.on_meta(place_of(task)):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        weights.attach(self.model, shared)
        self.model.eval()
        self.cache = transformers.StaticCache(config=config, max_cache_len=cache.shape[3])
        for number, layer in enumerate(self.cache.layers):
            keys, values = cache[0, number][None], cache[1, number][None]
            layer.lazy_initialization(keys[:, :, :1], values[:, :, :1])
            layer.keys, layer.values = keys, values

    def step(self, tokens: Any, position: int) -> Any:
        for layer in self.cache.layers:
            # Layers that a dead process had written in the step that died are written again.
            layer.cumulative_length.fill_(position)
        at = self.torch.tensor([[position]], device=tokens.device)
        given = tokens[position].view(1, 1)
        logits = self.model(input_ids=given, position_ids=at, past_key_values=self.cache, use_cache=True).logits
        return logits[0, -1].argmax()


def shape_of(task: Task) -> Shape:
    return Tiny.shape if task.model == "tiny" else Llama.shape_of(task)


# The memory: the cache, and the state that says how much of it counts.


class State:
    """``tokens``, how often each step ``begun``, and how many positions are ``complete``: written in the stream's order."""

    def __init__(self, task: Task, view: Any) -> None:
        array = getattr(view, framework(task).__name__)()
        self.tokens, self.begun = array[: task.length + 2], array[task.length + 2 : -1]
        self.complete = array[-1:]

    @staticmethod
    def numbers(task: Task) -> int:
        return 2 * task.length + 3


def cache_dimensions(task: Task) -> tuple[int, int, int, int, int]:
    shape = shape_of(task)
    return 2, shape.layers, shape.heads, task.length + 1, shape.head_size


def elements(dimensions: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, dimensions)


@contextlib.contextmanager
def memory(task: Task) -> Any:
    """Memory of the cache and of the state, published for the workers. It lives as long as any process has it."""
    item = 4 if shape_of(task).dtype == "float32" else 2
    sizes = {"kv/cache": elements(cache_dimensions(task)) * item, "kv/state": State.numbers(task) * 8}
    with contextlib.ExitStack() as stack:
        made = {name: warpipe.Memory.allocate(size, device=task.device) for name, size in sizes.items()}
        for name, allocated in made.items():
            stack.enter_context(allocated.publish(name, domain=task.domain, writable=True))
        yield State(task, made["kv/state"].view(State.numbers(task), "int64"))


# The workers.


class Warm(NamedTuple):
    """What a standby has ready."""

    model: Any
    state: State
    turn: warpipe.Semaphore
    asked: warpipe.Timeline


def warm(task: Task) -> Warm:
    """Maps the cache and the weights, and runs a step in the place that no token has."""

    def opened(name: str, dimensions: Any, dtype: str) -> Any:
        ticket = warpipe.Ticket.to(name, domain=task.domain)
        return ticket.open(device=task.device, wait=LIMIT_SECONDS).view(dimensions, dtype)

    state = State(task, opened("kv/state", State.numbers(task), "int64"))
    cache = getattr(opened("kv/cache", cache_dimensions(task), shape_of(task).dtype), framework(task).__name__)()
    shared = weights.open("kv/model", device=task.device, domain=task.domain, wait=LIMIT_SECONDS)
    model = Tiny(task, shared, cache) if task.model == "tiny" else Llama(task, shared, cache)
    int(model.step(state.tokens, task.length))
    turn = warpipe.Semaphore.open("kv/turn", domain=task.domain, device="host", wait=LIMIT_SECONDS)
    asked = warpipe.Timeline.open("kv/asked", domain=task.domain, device="host", wait=LIMIT_SECONDS)
    return Warm(model, state, turn, asked)


def decode(task: Task, ready: Warm) -> None:
    """Decodes what is left, when the last process that did is proven dead."""
    state = ready.state
    with (
        ready.turn.acquire(LIMIT_SECONDS),
        warpipe.Timeline.create("kv/steps", domain=task.domain, device=task.device) as steps,
    ):
        stream = None if task.device == "host" else framework(task).cuda.current_stream()
        for position in range(int(state.complete[0]), task.length):
            ready.asked.wait(position + 1, timeout=None)
            state.begun[position] += 1
            following = ready.model.step(state.tokens, position)
            if position + 1 >= len(PROMPT):
                state.tokens[position + 1] = following
            state.complete[0] = position + 1
            steps.signal(position + 1, stream=stream)
        # The reader has seen the last one before the timeline goes.
        ready.asked.wait(task.length + 1, timeout=LIMIT_SECONDS)


class Reader:
    """Sees the tokens as they come, whichever process decodes."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.steps: warpipe.Timeline | None = None
        self.position = 0

    def next(self) -> None:
        """Waits for a token more."""
        while True:
            try:
                if self.steps is None:
                    self.steps = warpipe.Timeline.open(
                        "kv/steps", domain=self.task.domain, device=self.task.device, wait=LIMIT_SECONDS
                    )
                self.steps.wait(self.position + 1, timeout=LIMIT_SECONDS)
            except warpipe.ConnectionError:
                # Its process has died: the next one makes a timeline.
                self.steps = None
                continue
            self.position = max(self.position + 1, self.steps.value)
            return

    def next_of_another(self) -> None:
        """Waits for the first token of another process than the last one's."""
        last = self.steps
        while self.steps is last:
            self.next()


class Run(NamedTuple):
    """What happened."""

    tokens: list[int]
    # How often each step has begun.
    begun: list[int]
    # Of the first steps, which nobody disturbs.
    step_seconds: list[float]
    # From each kill to the next token of the process that went on.
    next_token_seconds: list[float]


def run(task: Task, kills: int) -> Run:
    """Decodes everything."""
    modules = [framework(task).__name__]
    if task.model != "tiny":
        modules += ["transformers", "transformers.models.llama.modeling_llama"]
    numbers = random.Random(1)
    taken: list[float] = []
    with (
        memory(task) as state,
        warpipe.Semaphore.create("kv/turn", 1, domain=task.domain, device="host"),
        warpipe.Timeline.create("kv/asked", domain=task.domain, device="host") as asked,
        Workers(
            functools.partial(decode, task),
            warm=functools.partial(warm, task),
            count=1,
            standby=1,
            preload=modules,
            name="decoder",
            domain=task.domain,
            deaths_max=None,
            start_delay=START_DELAY_SECONDS,
        ) as workers,
    ):
        state.tokens[: len(PROMPT)] = framework(task).asarray(PROMPT)
        reader, step = Reader(task), []
        for _ in range(FIRST_TOKENS):
            begun = time.monotonic()
            asked.signal(reader.position + 1)
            reader.next()
            step.append(time.monotonic() - begun)
        for number in range(1, kills + 1):
            workers.wait_until_ready(LIMIT_SECONDS)
            (decoder,) = (process.pid for process in workers.processes if process.state == "working")
            asked.signal(reader.position + 1)
            time.sleep(numbers.random() * statistics.median(step))
            begun = time.monotonic()
            os.kill(decoder, signal.SIGKILL)
            # The process that goes on has one to give, also if the dead one had completed the last.
            asked.signal(reader.position + TOKENS_PER_KILL)
            reader.next_of_another()
            taken.append(time.monotonic() - begun)
            while reader.position < asked.value:
                reader.next()
            if number % 50 == 0:
                print(f"{number} kills, next tokens after {1e3 * statistics.median(taken):.1f} ms", flush=True)
        asked.signal(task.length)
        while reader.position < task.length:
            reader.next()
        asked.signal(task.length + 1)
        workers.wait(LIMIT_SECONDS)
        print(
            f"{len(workers.deaths)} deaths of workers, {task.length} positions, {statistics.median(step) * 1e3:.1f} ms a step"
        )
        tokens, begun_times = ([int(value) for value in values] for values in (state.tokens, state.begun))
        return Run(tokens, begun_times, step, taken)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", choices=["tiny", "llama-small", "llama"], default="tiny")
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    parser.add_argument("--out", type=pathlib.Path, help="write what was measured to this file, as JSON")
    options = parser.parse_args(arguments)
    device = warpipe.Device(options.device)
    print(f"device: {device} ({device.why})")
    # The same kernels give the same bits then, in every process.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with contextlib.ExitStack() as stack:
        domain = options.domain or stack.enter_context(tempfile.TemporaryDirectory())
        place = "host" if device.kind == "host" else f"cuda:{device.ordinal}"
        task = Task(options.model, place, domain, FIRST_TOKENS + TOKENS_PER_KILL * options.kills + 1)
        stack.enter_context(weights.keep("kv/model", domain=domain))
        made = Tiny.made(task) if task.model == "tiny" else Llama.made(task)
        stack.enter_context(weights.publish("kv/model", made, device=place, domain=domain, wait=LIMIT_SECONDS))
        del made
        if device.kind == "cuda":
            # What the model was made in.
            framework(task).cuda.empty_cache()
        expected = run(task, 0).tokens
        found = run(task, options.kills)
    begun, taken = found.begun, found.next_token_seconds
    assert found.tokens == expected, "all tokens are those of the run without kills"
    assert all(times >= 1 for times in begun), "every step ran"
    twice = sum(begun) - task.length
    assert twice <= options.kills, "nothing is computed again but the step that died"
    print(
        f"{options.kills} kills, {twice} of them in the middle of a step, which ran again; all {task.length} tokens are right"
    )
    if options.out:
        measured = {"step_ms": found.step_seconds, "next_token_ms": taken}
        milliseconds = {name: [1e3 * seconds for seconds in of] for name, of in measured.items()}
        options.out.write_text(json.dumps({"kills": options.kills, "ran_twice": twice, **milliseconds}) + "\n")
    if taken:
        ordered = sorted(1e3 * seconds for seconds in taken)
        print(
            f"from the kill to the next token: median {statistics.median(ordered):.1f} ms, "
            f"90 % {ordered[int(0.9 * (len(ordered) - 1))]:.1f} ms, most {ordered[-1]:.1f} ms"
        )


if __name__ == "__main__":
    main()
