"""An engine of vLLM on a CPU, as far as its weights: `vllm_engine.py FOLDER FORMAT EXTRA [RANK RANKS PORT]`.

vLLM finds plugins by their entry points, builds its configuration, and loads the model; its factory makes the engine of weight
transfer, which is called as a worker calls it. vLLM's wheel has no kernels for a CPU, so no token is computed.
"""

import json
import os
import sys

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

from engine_process import serve  # noqa: E402


def main(folder, load_format, extra, rank, ranks, port):
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    import torch
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model_loader

    from warpipe.vllm._loader import loaded

    model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    transfer_config = WeightTransferConfig(backend="warpipe")
    config = VllmConfig(
        model_config=model_config, device_config=DeviceConfig("cpu"), weight_transfer_config=transfer_config,
        load_config=LoadConfig(load_format=load_format, model_loader_extra_config=json.loads(extra)),
        parallel_config=ParallelConfig(tensor_parallel_size=int(ranks), distributed_executor_backend="mp"),
    )  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(int(ranks), int(rank), f"tcp://127.0.0.1:{port}", int(rank), "gloo")
        initialize_model_parallel(int(ranks), 1)
        model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=model_config)
        engine = WeightTransferEngineFactory.create_engine(transfer_config, config, torch.device("cpu"), model)
        commands = {
            "init_weight_transfer_engine": lambda info: engine.init_transfer_engine(engine.parse_init_info(info)),
            "start_weight_update": engine.start_weight_update,
            # What its `update_weights` does before it waits for a GPU.
            "update_weights": lambda info: engine.receive_weights(engine.parse_update_info(info)),
            "finish_weight_update": engine.finish_weight_update,
        }
        serve(model, loaded(model), commands)


if __name__ == "__main__":
    main(*sys.argv[1:])
