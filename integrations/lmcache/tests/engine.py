"""A worker of an engine without the engine: LMCache's own adapter for vLLM, driven by lines of JSON on standard input.

``engine.py URL MODULE`` has its KV tensors from ``MODULE.kv_caches``. Each line is ``[function, arguments...]``; the reply is
one line, ``[true, result]`` or ``[false, error]``.
"""

import importlib
import json
import sys
import traceback
import types

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter, LoadStoreOp, ParallelStrategy
from lmcache.v1.multiprocess.custom_types import DeviceIPCWrapper  # noqa: F401  (before the transport)
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.platform.base.ipc_wire import VmmCudaIPCData

BLOCK, LIMIT = 16, 60


class Engine:
    def __init__(self, url, module):
        self.module = importlib.import_module(module)
        strategy = ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        options = {"heartbeat_interval": 1.0, "mq_timeout": LIMIT, "mp_transfer_mode": "lmcache_driven"}
        extra = {f"lmcache.mp.{name}": value for name, value in options.items()}
        self.adapter = LMCacheMPWorkerAdapter(url, zmq.Context.instance(), "model", BLOCK, strategy, extra_config=extra)
        self.tensors = self.kept = None

    def instance(self):
        return self.adapter.instance_id

    def register(self, layers, blocks):
        self.tensors, self.kept = self.module.kv_caches(layers, blocks)
        self.adapter.register_kv_caches(self.tensors, layout_hints={"kv_layout": "NHD"})
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def again(self):
        """As LMCache's heartbeat registers after a restart that it has seen."""
        return self.adapter._reregister_kv_caches_callback()

    def unregister(self):
        self.adapter.transfer_ctx.unregister().result(timeout=LIMIT)

    def fill(self, blocks, value):
        for number, tensor in enumerate(self.tensors.values()):
            tensor[:, blocks] = value + number

    def values(self, blocks):
        """Whether all elements of a block of a layer are equal, and the first."""
        found = [tensor[:, blocks].float() for tensor in self.tensors.values()]
        assert all(bool((part == part.flatten()[0]).all()) for part in found)
        return [part.flatten()[0].item() for part in found]

    def event(self, gone=False):
        self.recorded = self.adapter.create_recorded_event()
        if gone:
            self.recorded.timeline = types.SimpleNamespace(name="lmcache/gone")

    def submit(self, request, tokens, blocks, gone=False):
        self.event(gone)
        op = LoadStoreOp(token_ids=list(tokens), block_ids=[blocks], start=0, end=len(tokens))
        self.adapter.submit_store_request(request, op, self.recorded)

    def store(self, request, tokens, blocks, gone=False):
        """None if the adapter dropped it: its daemon is unhealthy. With an event that nobody can wait for if ``gone``."""
        self.submit(request, tokens, blocks, gone)
        future = self.adapter.store_futures.pop(request, None)
        return future and future.result(timeout=LIMIT)

    def replied(self, request):
        """Whether the daemon's answer to a store is here; its event has not been looked at."""
        return self.adapter.store_futures[request].raw_future_.query()

    def lookup(self, request, tokens):
        """The chunks that the daemon has."""
        client = self.adapter.req_client
        key = self.adapter._create_key(list(tokens), start=0, end=len(tokens), request_id=request).no_worker_id_version()
        client.lookup(key, 1).result(timeout=LIMIT)
        return client.wait_prefetch_status(request, LIMIT).result(timeout=LIMIT)

    def retrieve(self, request, tokens, blocks, gone=False):
        """None if the daemon has not all chunks, or the adapter dropped it."""
        if not self.lookup(request, tokens):
            return None
        self.event(gone)
        op = LoadStoreOp(token_ids=list(tokens), block_ids=[blocks], start=0, end=len(tokens))
        self.adapter.submit_retrieve_request(request, op, self.recorded)
        future, _ = self.adapter.retrieve_futures.pop(request, (None, None))
        return future and future.result(timeout=LIMIT)

    def finished(self):
        """What the engine sees of its pending requests: ended stores, ended retrieves."""
        stores, retrieves = self.adapter.get_finished(set(self.adapter.store_futures))
        return sorted(stores or ()), sorted(retrieves or ())

    def healthy(self):
        return self.adapter.is_healthy

    def status(self):
        request = ServerModuleCallRequest(method="tests.status", payload=b"")
        answer = self.adapter.req_client.server_module_call(request).result(timeout=LIMIT)
        assert answer.success, answer.error
        return json.loads(answer.payload)

    def ask(self, instance, fields, limit):
        """Registers one tensor as another peer of the port could: LMCache's descriptor with other fields."""
        from lmcache.utils import EngineType
        from lmcache.v1.platform.base.ipc_wire import TensorMetadata
        from lmcache.v1.platform.devices.cuda.ipc_wrapper import VmmCudaIPCWrapper

        shape = (2, 4, 16, 2, 8)
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        uuid = str(self.module.torch.standin.get_device_properties(0).uuid)
        metadata = TensorMetadata("bfloat16", shape, tuple(tensor.stride()), 0, uuid)
        named = {"version": 1, "metadata": metadata, "kind": "posix_fd", "fabric_blob": None, "alloc_offset": 0}
        sizes = {"alloc_size": 2 << 20, "nbytes": tensor.nbytes}
        data = VmmCudaIPCData(**{**named, **sizes, **fields, "export_id": bytes.fromhex(fields["export_id"])})
        wrapper = VmmCudaIPCWrapper.from_wire(data)
        client = self.adapter.req_client
        future = client.register_kv_cache(instance, [wrapper], "model", 1, EngineType.VLLM, {"kv_layout": "NHD"}, [])
        return future.wait(limit)

    def wrap(self):
        """The export id of one more tensor, which is served and not registered."""
        from lmcache.v1.platform.kv_wrap import wrap_kv_caches

        tensors, kept = self.module.kv_caches(1, 4)
        self.kept += [tensors, kept]
        return wrap_kv_caches(tensors)[0].handle.hex()

    def served(self):
        """The export ids of this process, and the worker's name."""
        from warpipe_lmcache import device

        server = device.server()
        return [export_id.hex() for export_id in server._descriptors], server.name


def main():
    engine = Engine(*sys.argv[1:])
    replies, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps([True, engine.instance()]), file=replies, flush=True)
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        try:
            reply = [True, getattr(engine, function)(*arguments)]
        except Exception as error:
            traceback.print_exc()
            reply = [False, f"{type(error).__name__}: {error}"]
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
