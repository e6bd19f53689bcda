"""One engine of vLLM for ``warpipe.bench.vllm``: ``python -m warpipe.bench.vllm_engine OPTIONS``, where OPTIONS is JSON. Each
line of standard input is a command as JSON, and each answer is a line of JSON on the output that it had at its start."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import sys
import time
from typing import Any

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
        from vllm.v1.worker import gpu_worker

        imported = time.time() - _STARTED
        load, took = gpu_worker.Worker.load_model, []

        def timed(worker: Any, *arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            done = load(worker, *arguments, **named)
            took.append(time.perf_counter() - begun)
            return done

        gpu_worker.Worker.load_model = timed
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
        self.generate(tokens=1, prompts=1)
        self.told: dict[str, Any] = {
            "imported": imported, "built": built, "first_token": time.time() - _STARTED, "load_model": took[0],
            "pid": os.getpid(), "model": self._llm.collective_rpc(_about_model)[0],
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

    def update(self, info: dict[str, Any] | str, checkpoint: bool) -> None:
        """Brings a version in; ``info`` as text is a pickle of this benchmark's own process."""
        found = pickle.loads(base64.b64decode(info)) if isinstance(info, str) else info
        self._llm.start_weight_update(is_checkpoint_format=checkpoint)
        self._llm.update_weights({"update_info": found})
        self._llm.finish_weight_update()


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
