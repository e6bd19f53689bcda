"""TRL 1.16 itself: its asynchronous trainer sends its weights, by its own client, to a server that takes them."""

import http.server
import json
import queue
import threading
import types
from collections import defaultdict

import pytest
from conftest import LIMIT_SECONDS
from needed import needed

from warpipe import weights
from warpipe.trl import WeightTransfer

trainers = needed("trl.experimental.async_grpo.async_grpo_trainer")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def server(domain):
    """The calls of vLLM's server that bring new weights, and the weights that it has then."""
    seen = queue.SimpleQueue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            found = None
            if self.path == "/update_weights":
                [(name, version)] = body["update_info"]["versions"].items()
                shared = weights.open(name, device="host", domain=domain, wait=LIMIT_SECONDS)
                assert shared.version == version
                found = {key: view.torch().clone() for key, view in shared.items()}
            seen.put((self.path.partition("?")[0], body, found))
            self.do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", seen
        running.shutdown()
        thread.join()


def test_a_trainer_of_trl_sends_each_policy_as_a_version(server, domain):
    url, seen = server
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    transfer = WeightTransfer("policy", trainers.VLLMClient(url), devices=["host"], domain=domain)
    trainer = object.__new__(trainers.AsyncGRPOTrainer)
    trainer.accelerator, trainer.model, trainer.weight_transfer = trainers.Accelerator(cpu=True), model, transfer
    trainer.rollout_worker, trainer._lora_sync, trainer.model_version = None, None, 0
    trainer._metrics = {"train": defaultdict(list)}
    with weights.keep("policy", domain=domain):
        begin = trainers._TrainBeginCallback(trainer)
        begin.on_train_begin(None, None, types.SimpleNamespace())
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        trainer._sync_weight()
        transfer.destroy()
    calls = [seen.get() for _ in range(seen.qsize())]
    update = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert [path for path, _, _ in calls] == ["/init_weight_transfer_engine", *update, *update]
    assert calls[0][1] == {"init_info": {"name": "policy", "domain": str(domain.path)}}
    first, second = (found for path, _, found in calls if path == "/update_weights")
    named = dict(model.named_parameters())
    assert trainer.model_version == 2 and second.keys() == named.keys() == first.keys()
    assert all(torch.equal(second[name], named[name]) for name in named)
    assert torch.equal(first["lm_head.weight"] + 1, second["lm_head.weight"])
