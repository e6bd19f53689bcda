"""Tries the wheel for aarch64 under qemu-user: it is imported, its command runs, and two processes have a channel.

Arguments: the expected version, and the command that starts this interpreter (qemu-user and its options included)."""

import os
import signal
import subprocess
import sys
import tempfile

import warpipe

WORDS = 65536
FRAMES = 200
SECONDS = 120.0


def content(sequence):
    return (sequence * 7919).to_bytes(4, "little") * WORDS


def publish(domain, dies):
    """Publishes frames that each lie in shared memory; then closes, or kills itself."""
    publisher = warpipe.Publisher("a", device="host", domain=domain)
    publisher.wait_for_subscribers(1, SECONDS)
    for sequence in range(1, FRAMES + 1):
        with publisher.loan((WORDS,), "uint32") as out:
            memoryview(out).cast("B")[:] = content(sequence)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    publisher.close()


def subscribe(domain, publisher):
    """Receives them in this process, and checks every word. Returns what ended the channel."""
    subscriber = warpipe.Subscriber("a", device="host", domain=domain, wait=SECONDS, timeout=SECONDS)
    received = 0
    try:
        while True:
            with subscriber.receive() as frame:
                received += 1
                assert frame.sequence == received and frame.dtype == "uint32" and frame.shape == (WORDS,)
                assert bytes(memoryview(frame).cast("B")) == content(received)
    except warpipe.PeerGoneError as error:
        assert received == FRAMES
        publisher.wait(SECONDS)
        return str(error)


def channel(interpreter, dies):
    with tempfile.TemporaryDirectory() as folder:
        domain = os.path.join(folder, "domain")
        publisher = subprocess.Popen([*interpreter, __file__, "publish", domain, "dies" if dies else "closes"])
        ending = subscribe(domain, publisher)
        assert publisher.returncode == (-signal.SIGKILL if dies else 0)
        assert ("has died" if dies else "has closed") in ending, ending


def main():
    version, interpreter = sys.argv[1], sys.argv[2:]
    assert warpipe.__version__ == version and os.uname().machine == "aarch64"
    print("ok: the wheel is imported")
    said = subprocess.run([*interpreter, "-m", "warpipe", "--version"], capture_output=True, text=True, timeout=SECONDS)
    assert (said.returncode, said.stdout) == (0, f"warpipe {version}\n"), said
    print("ok: the command says its version")
    channel(interpreter, dies=False)
    print("ok: two processes have a channel")
    channel(interpreter, dies=True)
    print("ok: the death of the publisher is seen, and every frame was received before")
    print("skipped: the package's other tests: no NumPy and no pytest here, and an emulator's time")
    print("4 passed, 0 failed, 1 skipped")


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish(sys.argv[2], sys.argv[3] == "dies")
    else:
        main()
