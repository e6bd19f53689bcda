"""One engine of vLLM for ``warpipe.bench.vllm``: ``python -m warpipe.bench.vllm_engine OPTIONS``, where OPTIONS is JSON. Each
line of standard input is a command as JSON, and each answer is a line of JSON on the output that it had at its start."""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import os
import pickle
import sys
import time
from typing import Any

from warpipe._transfer import Clock

_STARTED = time.time()
_PROMPTS = 3
_TOKENS = 48


def main() -> None:
    given = json.loads(sys.argv[1])
    # What vLLM prints is not for the reader of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    try:
        engine = _Engine(given)
    except BaseException as error:
        say(error=repr(error)[:2000])
        raise
    say(**engine.told)
    for line in sys.stdin:
        begun = time.perf_counter()
        try:
            command = json.loads(line)
            told = getattr(engine, command.pop("do"))(**command)
            say(seconds=time.perf_counter() - begun, **(told or {}))
        except Exception as error:
            say(error=repr(error)[:2000])


class _Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.model_executor.model_loader import base_loader
        from vllm.v1.worker import gpu_model_runner, gpu_worker
        from vllm.v1.worker.gpu import model_runner

        imported = time.time() - _STARTED
        load = _Timed()
        load.time(gpu_worker.Worker, "load_model", "worker")
        # vLLM has two runners of models, and chooses by the model.
        for runner in (gpu_model_runner, model_runner):
            load.time(runner, "get_model_loader", "loader", of_result="load_model")
        load.time(base_loader, "initialize_model", "build")
        load.time(base_loader, "process_weights_after_loading", "processing")
        load.time(gpu_worker.WeightTransferEngineFactory, "create_engine", "transfer")
        gc.callbacks.append(load.collection)
        graphs = given.pop("graphs", False)
        if graphs:
            given["compilation_config"] = {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4],
            }  # fmt: skip
        self._llm = LLM(
            skip_tokenizer_init=True, enforce_eager=not graphs, max_model_len=1024, max_num_seqs=8,
            enable_prefix_caching=False, disable_log_stats=True, **given,
        )  # fmt: skip
        built = time.time() - _STARTED
        gc.callbacks.remove(load.collection)
        self.generate(tokens=1, prompts=1)
        self.told: dict[str, Any] = {
            "imported": imported, "built": built, "first_token": time.time() - _STARTED, "load_model": load.took["loader"], "load_steps": load.took,
            "collections_s": load.collections_s, "pid": os.getpid(), "model": self._llm.collective_rpc(_about_model)[0],
        }  # fmt: skip

    def generate(self, tokens: int = _TOKENS, prompts: int = _PROMPTS) -> dict[str, Any]:
        """Greedy tokens, a prompt at a time: the same kernels in every run."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = []
        for number in range(prompts):
            prompt = {"prompt_token_ids": [(7 * at * at + 13 * number) % 31000 + 5 for at in range(20)]}
            made.append(list(self._llm.generate([prompt], how, use_tqdm=False)[0].outputs[0].token_ids))
        return {"tokens": hashlib.sha256(str(made).encode()).hexdigest()[:16], "head": made[0][:6]}

    def initialise(self, info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": info})

    def update(self, info: dict[str, Any] | str, checkpoint: bool) -> dict[str, Any]:
        """Brings a version in; ``info`` as text is a pickle of this benchmark's own process."""
        found = pickle.loads(base64.b64decode(info)) if isinstance(info, str) else info
        clock = Clock()
        self._llm.start_weight_update(is_checkpoint_format=checkpoint)
        clock.end("start")
        self._llm.update_weights({"update_info": found})
        clock.end("update")
        self._llm.finish_weight_update()
        clock.end("finish")
        taken = self._llm.collective_rpc(_about_update)[0]
        return {"steps": clock, "taken": taken}

    def reopen(self, name: str, domain: str) -> dict[str, Any]:
        """Opens the weights, which are mapped here, once more: what is left is the keeper's part."""
        from warpipe import weights

        took = []
        for _ in range(5):
            clock = Clock()
            shared = weights.open(name, device="cuda:0", domain=domain)
            clock.end("open")
            shared.close()
            took.append(clock["open"])
        return {"reopen_s": took}


class _Timed:
    """Seconds of functions of vLLM while it loads a model, and of the collections of garbage meanwhile."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.collections_s = 0.0
        self._inside = 0
        self._begun = 0.0

    def time(self, owner: Any, name: str, step: str, of_result: str | None = None) -> None:
        """Replaces a function by itself with a clock; with ``of_result`` a method of what it returns."""
        original = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            self._inside += 1
            try:
                done = original(*arguments, **named)
            finally:
                self._inside -= 1
            if of_result is not None:
                self.time(done, of_result, step)
            else:
                # A draft model's is another one.
                self.took.setdefault(step, time.perf_counter() - begun)
            return done

        setattr(owner, name, timed)

    def collection(self, phase: str, _info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        elif self._inside:
            self.collections_s += now - self._begun


def _about_update(worker: Any) -> dict[str, float]:
    from warpipe.vllm._loader import loaded

    found = loaded(worker.model_runner.get_model())
    return {} if found is None else dict(found.receiver.took)


def _about_model(worker: Any) -> dict[str, Any]:
    from warpipe.vllm._loader import loaded

    model = worker.model_runner.get_model()
    parameters = dict(model.named_parameters())
    told: dict[str, Any] = {
        "bytes": sum(parameter.nbytes for parameter in parameters.values()),
        "types": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}),
    }
    found = loaded(model)
    if found is not None:
        shared = found.receiver.weights
        told |= {"name": found.name, "version": shared.version, "shared_bytes": shared.nbytes, "took": found.took}
        told["copied"] = found.copied
    return told


if __name__ == "__main__":
    main()
