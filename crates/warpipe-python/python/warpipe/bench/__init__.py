"""``python -m warpipe.bench``: what a hand-over costs from Python, beside what else Python has for it, in one run.

A round trip between two processes: A's kernel, B's kernel on what A wrote, and A again on what B wrote. Every contestant
runs the same small kernel on the first 4 KiB of a tensor, so that its hand-over is measured and not its arithmetic, and
the values are checked.

``arrays`` is the kernel, in PyTorch or NumPy; ``rivals`` and ``ours`` are the contestants; ``pair`` runs one of them in two
processes, with an end to every wait; ``figures`` compares; ``rust`` asks the program for its own figure; ``plot`` draws.
"""
