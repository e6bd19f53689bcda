"""What it costs to hand a tensor from one actor to another, beyond a call of Ray's.

    PYTHONPATH=src python bench.py [--device cuda] [--gpus 2] [--mib 64] [--rounds 200]

One round is a call of the source and one of the receiver with its result, which reads its first and last element and
answers the driver. The ways take turns: an empty tensor by WARPIPE, beside which the receiver reads a tensor of its own: that
is Ray's overhead, with the receiver's work; a tensor that WARPIPE copies, and one that `empty` made; the object store; and on
a GPU Ray's CUDA_IPC. Prints the medians, and what each is beyond the empty tensor, as a line of JSON.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray  # noqa: E402

import warpipe_ray  # noqa: E402

FIRST_ROUNDS = 10


def actors(library, with_ipc):
    """The classes of the source and of the receiver."""

    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Source:
        def __init__(self, nbytes, device):
            self.here, self.empty = library.full(nbytes, device), library.full(0, device)
            self.in_place = warpipe_ray.empty(nbytes, self.here.dtype, device)
            self.in_place[:] = 1

        @ray.method(tensor_transport="WARPIPE")
        def nothing(self):
            return self.empty

        @ray.method(tensor_transport="WARPIPE")
        def copied(self):
            return self.here

        @ray.method(tensor_transport="WARPIPE")
        def lent(self):
            return self.in_place

        def stored(self):
            return self.here

        def bare_copy_us(self, times):
            """What copying the tensor alone takes here, on the host."""
            into, took = library.full(len(self.here), "host"), []
            for _ in range(times):
                began = time.perf_counter()
                into[:] = self.here
                took.append(time.perf_counter() - began)
            return statistics.median(took) * 1e6

        if with_ipc:

            @ray.method(tensor_transport="CUDA_IPC")
            def by_ipc(self):
                return self.here

    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Receiver:
        def __init__(self, nbytes, device):
            self.own = library.full(nbytes, device)

        def look(self, given):
            given = given if len(given) else self.own
            return float(given[0]) + float(given[-1])

    return Source, Receiver


class Numpy:
    @staticmethod
    def full(nbytes, device):
        import numpy

        return numpy.ones(nbytes, "uint8")


class Torch:
    @staticmethod
    def full(nbytes, device):
        import torch

        return torch.ones(nbytes, dtype=torch.uint8, device="cpu" if device == "host" else device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--library", choices=("torch", "numpy"), default="torch")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="one GPU for both actors, or one for each")
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if options.library == "torch":
        warpipe_ray.register()
    else:
        import numpy

        warpipe_ray.register(numpy.ndarray)
    nbytes = int(options.mib * (1 << 20))
    with tempfile.TemporaryDirectory(prefix="warpipe-ray-") as folder:
        os.environ["WARPIPE_DOMAIN"] = os.path.join(folder, "domain")
        ray.init(include_dashboard=False, logging_level="ERROR", object_store_memory=max(8 * nbytes, 128 << 20))
        with_ipc = on_gpu and options.gpus == 1
        share = {"num_gpus": 0.5 if options.gpus == 1 else 1} if on_gpu else {}
        source, receiver = actors(Torch if options.library == "torch" else Numpy, with_ipc)
        source = source.options(**share).remote(nbytes, "cuda:0" if on_gpu else "host")
        receiver = receiver.options(**share).remote(nbytes, "cuda:0" if on_gpu else "host")
        ways = {"empty": source.nothing, "copied": source.copied, "in place": source.lent, "object store": source.stored}
        if with_ipc:
            ways["CUDA_IPC"] = source.by_ipc
        took = {way: [] for way in ways}
        for number in range(FIRST_ROUNDS + options.rounds):
            # In another order each time: Ray collects the last way's object while the next one runs.
            for way, call in random.sample(list(ways.items()), len(ways)):
                began = time.perf_counter()
                assert ray.get(receiver.look.remote(call.remote()), timeout=60) == 2
                if number >= FIRST_ROUNDS:
                    took[way].append(time.perf_counter() - began)
        floor = None if on_gpu else round(ray.get(source.bare_copy_us.remote(20)), 1)
        ray.shutdown()
    medians = {way: statistics.median(times) * 1e6 for way, times in took.items()}
    beyond = {way: round(median - medians["empty"], 1) for way, median in medians.items() if way != "empty"}
    # Of the same rounds, so that a slow moment of the machine counts for both.
    paired = {way: [one - empty for one, empty in zip(times, took["empty"], strict=True)] for way, times in took.items()}
    said = {
        "device": options.device,
        "gpus": options.gpus if on_gpu else 0,
        "library": options.library,
        "mib": options.mib,
        "rounds": options.rounds,
        "median_us": {way: round(median, 1) for way, median in medians.items()},
        "beyond_empty_us": beyond,
        "beyond_empty_paired_us": {way: round(statistics.median(times) * 1e6, 1) for way, times in paired.items()},
        "bare_copy_us": floor,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
