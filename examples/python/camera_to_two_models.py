"""A camera and two models, each in a process of its own; no frame is copied on its way.

    python camera_to_two_models.py [--frames 100] [--device host] [--domain DIR]

The camera publishes images where they were made: on the GPU if there is one. A detector sees every frame, and makes the
camera wait if it is slow. A viewer subscribes to a second name, under a policy that drops what it is too slow for. Each
computes on its own stream, which waits on the GPU for the image; no CPU does. PyTorch is used if it is there, else NumPy.
"""

import argparse
import multiprocessing
import tempfile
from typing import Any

import warpipe

HEIGHT, WIDTH = 120, 160
LIMIT_SECONDS = 60.0


def array_of(frame: warpipe.Sample) -> Any:
    """The frame as an array of the framework at hand, where it lies."""
    try:
        return frame.torch()
    except ImportError:
        return frame.numpy()


def detector(domain: str, device: str | None, results: Any) -> None:
    """Sees every frame: its brightness, which the camera wrote into it."""
    brightness = []
    with warpipe.Subscriber("camera/every", domain=domain, device=device, wait=LIMIT_SECONDS) as camera:
        for frame in camera:
            with frame:
                brightness.append(int(array_of(frame)[0, 0, 0]))
    results.put(("detector", brightness))


def viewer(domain: str, device: str | None, results: Any) -> None:
    """Sees what it has time for, and knows from the sequence numbers what it has missed."""
    seen = missed = 0
    last = 0
    with warpipe.Subscriber("camera/newest", domain=domain, device=device, wait=LIMIT_SECONDS) as camera:
        for frame in camera:
            with frame:
                assert frame.metadata["height"] == frame.shape[0]
                missed += frame.sequence - last - 1
                last = frame.sequence
                seen += 1
    results.put(("viewer", (seen, missed, last)))


def camera(domain: str, device: str | None, frames: int) -> None:
    """Publishes images of growing brightness, to those who want all and to those who want the newest."""
    size = {"height": HEIGHT, "width": WIDTH}
    with (
        warpipe.Publisher("camera/every", domain=domain, device=device, policy="block", timeout=LIMIT_SECONDS) as every,
        warpipe.Publisher("camera/newest", domain=domain, device=device, policy="drop_oldest", depth=2) as newest,
    ):
        every.wait_for_subscribers(1, LIMIT_SECONDS)
        newest.wait_for_subscribers(1, LIMIT_SECONDS)
        for number in range(frames):
            for publisher in (every, newest):
                with publisher.loan((HEIGHT, WIDTH, 3), "uint8", metadata=size) as image:
                    image[...] = number % 256


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    print(f"device: {warpipe.Device(options.device)} ({warpipe.Device(options.device).why})")
    with tempfile.TemporaryDirectory() as folder:
        domain = options.domain or folder
        # CUDA does not survive a fork: processes are spawned.
        spawn = multiprocessing.get_context("spawn")
        results = spawn.Queue()
        models = [spawn.Process(target=model, args=(domain, options.device, results)) for model in (detector, viewer)]
        for model in models:
            model.start()
        camera(domain, options.device, options.frames)
        found = dict(results.get(timeout=LIMIT_SECONDS) for _ in models)
        for model in models:
            model.join(LIMIT_SECONDS)
    seen, missed, last = found["viewer"]
    assert found["detector"] == [number % 256 for number in range(options.frames)], "the detector sees every frame"
    # The last ones it misses if it still holds as many as the publisher's depth.
    assert 0 < seen + missed == last <= options.frames, "the viewer knows which it has missed"
    print(f"detector: {len(found['detector'])} frames, viewer: {seen} seen, {options.frames - seen} missed")


if __name__ == "__main__":
    main()
