"""An engine of SGLang on a CPU, as far as its weights: `sglang_engine.py FOLDER FORMAT EXTRA`.

SGLang parses its own command line, finds plugins by their entry points, and loads the model. Its layers have no kernels for a
CPU here, so no token is computed.
"""

import sys

from engine_process import serve


def main(folder, load_format, extra):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    options = ["--model-path", folder, "--load-format", load_format, "--model-loader-extra-config", extra]
    loaders = ["--custom-weight-loader", "warpipe.sglang.load_published"]
    args = prepare_server_args([*options, *loaders, "--device", "cpu", "--skip-tokenizer-init"])

    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.utils import dynamic_import
    from sglang.test.layer_ut_utils import init_single_process_dist
    from sglang.test.test_utils import find_available_port

    from warpipe.sglang import announced

    init_single_process_dist(master_port=find_available_port(21000))
    config = ModelConfig.from_server_args(args)
    load_config = LoadConfig(load_format=args.load_format, model_loader_extra_config=args.model_loader_extra_config)
    model = get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu", 0))
    [path] = args.custom_weight_loader
    # As its update_weights_from_tensor does with that path as the load format.
    commands = {"take": lambda name, version: dynamic_import(path)(model, announced(name, version))}
    serve(model, getattr(model, "_warpipe_weights", None), commands)


if __name__ == "__main__":
    main(*sys.argv[1:])
