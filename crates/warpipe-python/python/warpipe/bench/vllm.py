"""The command ``python -m warpipe.bench.vllm``: vLLM with its own loader and its own IPC transfer, beside ``warpipe.vllm``, in
one run on one GPU. It needs PyTorch, safetensors and vLLM 0.24, and makes its model: a Llama with random weights.

A part that fails is named in the report, and the next one begins. The report is written after each part.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import warpipe
from warpipe import _transfer

from .__main__ import heading, sharing, version_of

NAME = "bench/policy"
# hidden, inner, layers, heads, heads of keys and values
SIZES = {"7g": (4096, 11008, 20, 32, 8), "1g": (2048, 5632, 8, 16, 8)}
VOCABULARY, HEAD = 32000, 128
GIB = 1 << 30
# Seconds until an engine is there: the first on a machine compiles kernels.
START_PATIENCE, PATIENCE = 170.0, 60.0
# Bytes by which the memory in use may differ from what it was.
NOISE = 256 << 20


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.vllm", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("vllm.json"), help="the report, as JSON")
    parser.add_argument("--work", type=pathlib.Path, help="where the model and the logs lie; a new folder if left out")
    parser.add_argument("--size", choices=sorted(SIZES), default="7g", help="of the model")
    parser.add_argument("--kills", type=int, default=20, help="engines that are killed")
    parser.add_argument("--rounds", type=int, default=7, help="versions that are sent")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no part, and kill no more, after this time")
    parts = ", ".join(name for name, _ in PARTS)
    parser.add_argument("--parts", help=f"these alone, with commas between: {parts}. All but `model` and `fp8` need `plain`")
    parser.add_argument("--commit", default="unknown", help="of this package, for the report")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' moments")
    asked = parser.parse_args(given)
    names = [name for name, _ in PARTS] if asked.parts is None else [name.strip() for name in asked.parts.split(",")]
    if unknown := set(names).difference(name for name, _ in PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; the parts are {parts}")
    work = asked.work or pathlib.Path(tempfile.mkdtemp(prefix="warpipe-vllm-"))
    work.mkdir(parents=True, exist_ok=True)
    run = Run(asked, work)
    for name, part in PARTS:
        if name in names:
            run.part(name, part)
    run.write()
    print(verdicts(run.report), flush=True)
    return 1 if run.report["failed"] else 0


class Run:
    """The parts' common things: the model, the reference's tokens, the report."""

    def __init__(self, asked: argparse.Namespace, work: pathlib.Path) -> None:
        self.asked, self.work = asked, work
        self.began = time.monotonic()
        self.deadline = self.began + asked.seconds
        # Bytes of the GPU in use without an engine.
        self.idle = 0
        self.domain = work / "domain"
        self.random = random.Random(asked.seed)
        self.model = str(work / f"model-{asked.size}")
        self.new: dict[str, Any] = {}
        self.engines: list[Engine] = []
        device = warpipe.Device("cuda:0")
        options = argparse.Namespace(devices=1, quick=asked.size != "7g")
        self.report: dict[str, Any] = heading(device, sharing("cuda"), options)
        self.report["packages"] |= {name: version_of(name) for name in ("vllm", "transformers", "triton")}
        self.report |= {"commit": asked.commit, "model": asked.size, "gib": 0.0, "seed": asked.seed, "parts": {}, "failed": {}, "left_out": []}

    def part(self, name: str, part: Callable[[Run], dict[str, Any]]) -> None:
        if time.monotonic() > self.deadline:
            self.report["left_out"].append(name)
            return
        begun = time.monotonic()
        say(f"{begun - self.began:6.1f} s  {name}")
        try:
            found = part(self)
            found["seconds"] = round(time.monotonic() - begun, 1)
            self.report["parts"][name] = found
            say(f"          {json.dumps(found)}")
        except Exception as error:
            self.report["failed"][name] = f"{type(error).__name__}: {error}"[:4000]
            say(f"          failed: {self.report['failed'][name]}")
        self.write()

    def write(self) -> None:
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        self.report["figures"] = [dataclasses.asdict(figure) for figure in figures(self.report)]
        self.report["beside"] = beside(self.report)
        self.asked.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def start(self, load_format: str, **options: Any) -> Engine:
        extra = {"domain": str(self.domain)} if load_format == "warpipe" else {}
        extra |= options.pop("extra", {})
        given = {
            "model": self.model, "load_format": load_format, "model_loader_extra_config": extra,
            "kv_cache_memory_bytes": GIB, "gpu_memory_utilization": 0.2, **options,
        }  # fmt: skip
        engine = Engine(given, self.work / f"engine-{len(self.engines)}.log")
        self.engines.append(engine)
        return engine

    def end(self, engines: Iterable[Engine]) -> None:
        for engine in engines:
            engine.kill()

    def of(self, part: str, key: str) -> Any:
        found = self.report["parts"].get(part)
        if found is None:
            raise RuntimeError(f"the part {part} has no result")
        return found[key]


class Engine:
    """A process with vLLM."""

    def __init__(self, given: dict[str, Any], log: pathlib.Path, command: list[str] | None = None) -> None:
        self._log = log
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        program = command or [sys.executable, "-m", "warpipe.bench.vllm_engine"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*program, json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        self.began = time.monotonic()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def reply(self, patience: float = PATIENCE) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            raise RuntimeError(f"an engine did not answer in {patience:.0f} s: {self.tail()}") from None
        if not line:
            raise RuntimeError(f"an engine ended with {self.process.wait()}: {self.tail()}")
        told = json.loads(line)
        if "error" in told:
            raise RuntimeError(f"an engine says {told['error']}: {self.tail()}")
        return dict(told)

    def ready(self) -> dict[str, Any]:
        return self.reply(START_PATIENCE)

    def ask(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def do(self, **command: Any) -> dict[str, Any]:
        self.ask(**command)
        return self.reply()

    def tokens(self) -> str:
        return str(self.do(do="generate")["tokens"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "Error" in line] or lines
        return " | ".join(told[-6:])[-1500:]


def say(text: str) -> None:
    print(text, flush=True)


def used() -> int:
    """Bytes of the GPU in use, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def settled(wanted: int, patience: float = 30.0) -> int:
    """The bytes in use, once they are no more than wanted, or at the end of the patience: a dead process's go late."""
    end = time.monotonic() + patience
    while (now := used()) > wanted + NOISE and time.monotonic() < end:
        time.sleep(0.05)
    return now


def gib(count: float) -> float:
    return round(count / GIB, 3)


# The parts.


def make_model(run: Run) -> dict[str, Any]:
    """A Llama with random weights, and a version of it: the same tensors, upside down."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, heads, keys = SIZES[run.asked.size]
    folder = pathlib.Path(run.model)
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": HEAD,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)

    def drawn(*shape: int, spread: float = 0.03) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * spread

    def ones() -> Any:
        return torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    state = {"model.embed_tokens.weight": drawn(VOCABULARY, hidden, spread=1.0), "model.norm.weight": ones()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        state |= {
            f"{prefix}self_attn.q_proj.weight": drawn(heads * HEAD, hidden),
            f"{prefix}self_attn.k_proj.weight": drawn(keys * HEAD, hidden),
            f"{prefix}self_attn.v_proj.weight": drawn(keys * HEAD, hidden),
            f"{prefix}self_attn.o_proj.weight": drawn(hidden, heads * HEAD),
            f"{prefix}mlp.gate_proj.weight": drawn(inner, hidden),
            f"{prefix}mlp.up_proj.weight": drawn(inner, hidden),
            f"{prefix}mlp.down_proj.weight": drawn(hidden, inner),
            f"{prefix}input_layernorm.weight": ones(),
            f"{prefix}post_attention_layernorm.weight": ones(),
        }
    state["lm_head.weight"] = drawn(VOCABULARY, hidden, spread=0.05)
    save_file({name: tensor.cpu() for name, tensor in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    run.new = {name: tensor.flip(0) for name, tensor in state.items()}
    count = sum(tensor.nbytes for tensor in state.values())
    del state
    torch.cuda.empty_cache()
    run.idle = used()
    run.report["gib"] = gib(count)
    return {"gib": gib(count), "tensors": len(run.new)}


def floor(run: Run) -> dict[str, Any]:
    """What the driver and the device take for as many bytes, which other work on the machine makes longer."""
    import torch

    total = sum(tensor.nbytes for tensor in run.new.values())
    target = torch.empty(total, dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {"allocate_s": [], "copy_s": []}
    before = used()
    for _ in range(run.asked.rounds):
        clock = _transfer.Clock()
        memory = warpipe.Memory.allocate(total, device="cuda:0")
        clock.end("allocate_s")
        del memory
        settled(before)
        clock.end("free")
        at = 0
        for tensor in run.new.values():
            target[at : at + tensor.nbytes].copy_(tensor.view(torch.uint8).flatten(), non_blocking=True)
            at += tensor.nbytes
        torch.cuda.synchronize()
        clock.end("copy_s")
        for step, all_of_it in found.items():
            all_of_it.append(clock[step])
    del target
    torch.cuda.empty_cache()
    return found


def _grown(run: Run, load_format: str, options: dict[str, Any]) -> tuple[list[Engine], dict[str, Any]]:
    """One engine, a second, and two more at once, the last one with captured graphs: what each told, and the memory in use
    beside what was before."""
    before, memory = settled(run.idle), {}
    engines = [run.start(load_format, **options)]
    try:
        told = [engines[0].ready()]
        memory["1"] = gib(used() - before)
        engines.append(run.start(load_format, **options))
        told.append(engines[1].ready())
        memory["2"] = gib(used() - before)
        engines += [run.start(load_format, **options), run.start(load_format, graphs=True, **options)]
        told += [engine.ready() for engine in engines[2:]]
        memory["4"] = gib(used() - before)
    except BaseException:
        run.end(engines)
        raise
    return engines, {"engines": told, "memory_gib": memory}


def plain(run: Run) -> dict[str, Any]:
    """vLLM's own loader, and its own transfer by CUDA IPC to two engines."""
    engines, found = _grown(run, "auto", {"weight_transfer_config": {"backend": "ipc"}})
    try:
        found["tokens"] = engines[0].tokens()
        found["same_tokens"] = [engine.tokens() == found["tokens"] for engine in engines[1:]]
        run.end(engines[2:])
        found |= _sent_by_ipc(run, engines[:2])
    finally:
        run.end(engines)
    return found


def _sent_by_ipc(run: Run, engines: list[Engine]) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    for engine in engines:
        engine.do(do="initialise", info={})
    took: list[float] = []
    of_engines: list[list[float]] = []
    steps: list[Any] = []

    def tell(info: Any) -> None:
        fields = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
        packed = base64.b64encode(pickle.dumps(fields)).decode()
        for engine in engines:
            engine.ask(do="update", info=packed, checkpoint=True)
        _heard(engines, of_engines, steps)

    for _ in range(run.asked.rounds):
        begun = time.perf_counter()
        IPCWeightTransferEngine.trainer_send_weights(iter(run.new.items()), {"send_mode": tell})
        took.append(time.perf_counter() - begun)
    tokens = [engine.tokens() for engine in engines]
    return {
        "sync_s": took, "sync_engines_s": of_engines, "sync_engines_steps": steps, "new_tokens": tokens[0],
        "same_new_tokens": len(set(tokens)) == 1,
    }  # fmt: skip


def _heard(engines: list[Engine], of_engines: list[list[float]], steps: list[Any]) -> None:
    """Notes how long each engine's update took, and its steps."""
    replies = [engine.reply() for engine in engines]
    of_engines.append([reply["seconds"] for reply in replies])
    steps.append([reply["steps"] | reply["taken"] for reply in replies])


def ours(run: Run) -> dict[str, Any]:
    """One copy for four engines, and versions of a trainer; a captured graph reads them, too."""
    engines, found = _grown(run, "warpipe", {"weight_transfer_config": {"backend": "warpipe"}, "extra": {"name": NAME}})
    try:
        found |= engines[1].do(do="reopen", name=NAME, domain=str(run.domain))
        wanted = run.of("plain", "tokens")
        found["same_tokens"] = [engine.tokens() == wanted for engine in engines]
        run.end([engines[2]])
        found |= _sent(run, engines[:2], engines[3])
    finally:
        run.end(engines)
    return found


def _sent(run: Run, engines: list[Engine], captured: Engine) -> dict[str, Any]:
    trainer = _transfer.Trainer(NAME, devices=["cuda:0"], domain=str(run.domain))
    took: list[float] = []
    published: list[float] = []
    of_engines: list[list[float]] = []
    steps: list[Any] = []
    of_trainer: list[dict[str, float]] = []

    def send(to: list[Engine], tensors: dict[str, Any], **options: Any) -> None:
        begun = time.perf_counter()
        number = trainer.send(tensors, **options)[0]
        published.append(time.perf_counter() - begun)
        for engine in to:
            engine.ask(do="update", info={"versions": {NAME: number}}, checkpoint=False)
        _heard(to, of_engines, steps)
        took.append(time.perf_counter() - begun)
        of_trainer.append(trainer.took)

    def told(prefix: str) -> dict[str, Any]:
        lists: dict[str, list[Any]] = {
            "_s": took, "_publish_s": published, "_trainer_steps": of_trainer, "_engines_s": of_engines, "_engines_steps": steps,
        }  # fmt: skip
        noted = {prefix + key: list(values) for key, values in lists.items()}
        for values in lists.values():
            values.clear()
        return noted

    # Between two versions of a trainer lies a step of training: the driver has taken back what the engines left by then.
    with_two = used() + sum(tensor.nbytes for tensor in run.new.values())
    for _ in range(run.asked.rounds):
        send(engines, run.new)
        settled(with_two)
    found = told("sync")
    wanted = run.of("plain", "new_tokens")
    found["same_new_tokens"] = [engine.tokens() == wanted for engine in engines]
    send([captured], run.new)
    found["graphs_same_new_tokens"] = captured.tokens() == wanted
    told("graphs")
    changed = {name: run.new[name].flip(0) for name in ("lm_head.weight", "model.norm.weight")}
    for same_layout in (True, False):
        to = [*engines, captured] if same_layout else engines
        for _ in range(3):
            send(to, changed, changed=True, same_layout=same_layout)
            settled(with_two)
        found |= told("changed" if same_layout else "changed_shared")
    changed_tokens = {engine.tokens() for engine in engines}
    found["changed_gib"] = gib(sum(tensor.nbytes for tensor in changed.values()))
    found["changed_differs"] = len(changed_tokens) == 1 and wanted not in changed_tokens
    trainer.close()
    return found


def kills(run: Run) -> dict[str, Any]:
    """Engines are killed while they load and while they generate; the keeper once, a trainer once. One engine stays."""
    options = {"weight_transfer_config": {"backend": "warpipe"}, "extra": {"name": NAME}}
    survivor = run.start("warpipe", **options)
    survivor.ready()
    wanted, one = survivor.tokens(), used()
    found: dict[str, Any] = {"killed": 0, "while_loading": 0, "survivor_same": [], "started_s": [], "load_model_s": []}
    # So many engines import at once without much waiting, and so many of them are killed while they start.
    at_once, early = 10, 3
    try:
        while found["killed"] < run.asked.kills and time.monotonic() < run.deadline:
            victims = [run.start("warpipe", **options) for _ in range(min(at_once, run.asked.kills - found["killed"]))]
            begun = time.monotonic()
            for victim, after in zip(victims, sorted(run.random.uniform(8.0, 25.0) for _ in range(early)), strict=False):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    victim.process.wait(max(0.0, begun + after - time.monotonic()))
                victim.kill()
            for victim in victims[early:]:
                told = victim.ready()
                found["started_s"].append(round(told["first_token"], 2))
                found["load_model_s"].append(round(told["load_model"], 3))
                if victim.tokens() != wanted:
                    raise RuntimeError("an engine that was started after a kill gives other tokens")
                victim.ask(do="generate")
            if found["killed"] == 0:
                found["keeper_killed"] = _kill_keeper(run)
            time.sleep(run.random.uniform(0.0, 0.3))
            for victim in victims[early:]:
                victim.kill()
            found["killed"] += len(victims)
            found["while_loading"] += min(early, len(victims))
            found["survivor_same"].append(survivor.tokens() == wanted)
        found["memory_over_gib"] = gib(settled(one) - one)
        again = run.start("warpipe", **options)
        found["trainer_killed"] = _kill_trainer(run, survivor, wanted)
        told = again.ready()
        found["restarted"] = {"same_tokens": again.tokens() == wanted, "load_model": told["load_model"]}
    finally:
        run.end([survivor])
        run.end(run.engines)
    return found


def _kill_keeper(run: Run) -> bool:
    listed = subprocess.run(
        [sys.executable, "-m", "warpipe", "weights", "ls", "--domain", str(run.domain), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    pids = [row["keeper_pid"] for row in rows if row["name"] == NAME and row["keeper_pid"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return bool(pids)


_TRAINER = """
import sys, torch
from safetensors.torch import load_file
from warpipe import _transfer
tensors = load_file(sys.argv[1], device="cuda")

class Slow(dict):
    def items(self):
        for number, pair in enumerate(super().items()):
            if number == len(self) // 2:
                print("in the middle", flush=True)
                sys.stdin.read()
            yield pair

_transfer.Trainer(sys.argv[2], devices=["cuda:0"], domain=sys.argv[3]).send(Slow(tensors))
"""


def _kill_trainer(run: Run, engine: Engine, wanted: str) -> dict[str, Any]:
    """A trainer that dies in the middle of a version: the engine asks for the newest one."""
    arguments = [sys.executable, "-c", _TRAINER, f"{run.model}/model.safetensors", NAME, str(run.domain)]
    trainer = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    try:
        if trainer.stdout.readline() != "in the middle\n":
            raise RuntimeError("the trainer ended before its middle")
    finally:
        trainer.kill()
        trainer.wait()
    engine.do(do="update", info={"versions": {}}, checkpoint=False)
    return {"same_tokens": engine.tokens() == wanted}


def fp8(run: Run) -> dict[str, Any]:
    """Weights that vLLM quantizes as it loads them: published where they lie, and attached."""
    options = {"quantization": "fp8"}
    reference, first = run.start("auto", **options), run.start("warpipe", **options)
    engines = [reference, first]
    try:
        told = {"plain": reference.ready(), "first": first.ready()}
        before = used()
        further = run.start("warpipe", **options)
        engines.append(further)
        told["further"] = further.ready()
        tokens = [engine.tokens() for engine in engines]
        return {**told, "further_gib": gib(used() - before), "same_tokens": len(set(tokens)) == 1}
    finally:
        run.end(engines)


def in_place(run: Run) -> dict[str, Any]:
    """Without a transfer, two engines that start at once: one loads, and its own memory is published; nothing is copied."""
    engines = [run.start("warpipe") for _ in range(2)]
    try:
        told = [engine.ready() for engine in engines]
        both = used()
        same = [engine.tokens() == run.of("plain", "tokens") for engine in engines]
        [loads] = [at for at, one in enumerate(told) if "publish" in one["model"]["took"]]
        engines[1 - loads].kill()
        # A context and a KV cache at least.
        settled(both - GIB - NOISE)
        time.sleep(1.0)
        return {"first": told[loads], "further": told[1 - loads], "same_tokens": same, "further_gib": gib(both - used())}
    finally:
        run.end(engines)


PARTS: list[tuple[str, Callable[[Run], dict[str, Any]]]] = [
    ("model", make_model),
    ("floor", floor),
    ("plain", plain),
    ("ours", ours),
    ("in place", in_place),
    ("kills", kills),
    ("fp8", fp8),
]


@dataclasses.dataclass
class Figure:
    """A figure that was wanted."""

    name: str
    wanted: str
    found: Any
    met: bool


def figures(report: dict[str, Any]) -> list[Figure]:
    return list(_figures(report["parts"]))


def _figures(parts: dict[str, Any]) -> Iterator[Figure]:
    if (ours := parts.get("ours")) is not None:
        further = ours["engines"][1]
        took = further["model"]["took"]
        weights = (took["open"] + took["weights"]) * 1e3
        yield Figure("weights of a further engine, ms", "<= 10", round(weights, 2), weights <= 10)
        yield Figure("load_model of a further engine, s", "<= 0.35", round(further["load_model"], 3), further["load_model"] <= 0.35)
        worker = round(further["load_steps"]["worker"], 3), round(further["collections_s"], 3)
        yield Figure("the same with what vLLM does around it, s, and of that collections of garbage", "", worker, True)
        sync = statistics.median(ours["sync_s"]) * 1e3
        yield Figure("a version from the trainer's call to two engines, median, ms", "<= 20", round(sync, 2), sync <= 20)
        if (plain := parts.get("plain")) is not None:
            theirs = statistics.median(plain["sync_s"]) * 1e3
            yield Figure("the same by vLLM's IPC transfer, ms", "", round(theirs, 2), True)
            ratio = sync / theirs
            yield Figure("ours / vLLM's", "<= 1/3", round(ratio, 3), ratio <= 1 / 3)
            mine, other = ours["memory_gib"], plain["memory_gib"]
            each = (other["1"] - further["model"]["bytes"] / GIB) - (mine["2"] - mine["1"])
            yield Figure("weights of a further engine, GiB", "0", round(max(0.0, -each), 2), each > -0.25)
            yield Figure("memory of 4 engines, GiB: ours, vLLM's", "", [mine["4"], other["4"]], mine["4"] < other["4"])
        same = all(ours["same_tokens"]) and all(ours["same_new_tokens"])
        yield Figure("tokens as vLLM's own, before and after a version", "equal", same, same)
        graphs = ours["graphs_same_new_tokens"]
        yield Figure("a captured graph reads the new version", "equal", graphs, graphs)
    if (fp8 := parts.get("fp8")) is not None:
        copied = fp8["first"]["model"]["copied"]
        yield Figure("fp8: bytes copied", "0", copied, copied == 0)
        yield Figure("fp8: tokens as vLLM's own", "equal", fp8["same_tokens"], fp8["same_tokens"])
    if (kills := parts.get("kills")) is not None:
        well = all(kills["survivor_same"]) and kills["restarted"]["same_tokens"] and kills["trainer_killed"]["same_tokens"]
        yield Figure("engines killed, the others and the restarted as before", "20", kills["killed"], bool(well))


def beside(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that stand beside vLLM's own, of this run."""
    parts = report["parts"]
    if not {"plain", "ours"} <= parts.keys():
        return []
    plain, ours = parts["plain"], parts["ours"]

    def row(question: str, unit: str, theirs: float, mine: float) -> dict[str, Any]:
        return {"question": question, "unit": unit, "theirs": theirs, "ours": mine}

    rows = [
        row("`load_model` of a further engine", "ms", *(one["engines"][1]["load_model"] * 1e3 for one in (plain, ours))),
        row("a version from the trainer's call to two engines", "ms", *(statistics.median(one["sync_s"]) * 1e3 for one in (plain, ours))),
    ]
    for count in ("1", "2", "4"):
        what = f"memory of {count} engine{'s' if count != '1' else ''}"
        rows.append(row(what, "GiB", plain["memory_gib"][count], ours["memory_gib"][count]))
    return rows


def verdicts(report: dict[str, Any]) -> str:
    lines = [
        f"{'ok  ' if figure.met else 'MISS'}  {figure.name}: {figure.found} (wanted {figure.wanted or 'nothing'})"
        for figure in figures(report)
    ]
    lines += [f"FAIL  {name}: {why}" for name, why in report["failed"].items()]
    lines += [f"left out for its time: {name}" for name in report["left_out"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
