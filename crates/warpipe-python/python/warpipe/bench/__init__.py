"""``python -m warpipe.bench``: what a hand-over costs from Python, beside what else Python has for it, in one run.

A round trip between two processes: A's kernel, B's kernel on what A wrote, and A again on what B wrote. Every contestant
runs the same small kernel on the first 4 KiB of a tensor, so that its hand-over is measured and not its arithmetic, and
the values are checked.

On a GPU that kernel is warpipe's own ``add``, launched by the tensors' addresses on PyTorch's current stream: the program
``warpipe`` launches the like in the round trip that Python's is held against. What is wanted is asked of these. A PyTorch
user's kernel is PyTorch's. Its launch alone takes the CPU longer than a hand-over, so ``warpipe, loan`` and
``torch.multiprocessing`` are measured with ``torch.add`` as well. On the host all run ``numpy.add``. Between two GPUs a
rival's tensor is not PyTorch's to read with a kernel: there its head is fetched with ``copy_`` first, and that is said in
the report, which names the kernel of each.

``arrays`` is the kernels, in PyTorch or NumPy; ``rivals`` and ``ours`` are the contestants; ``pair`` runs one of them in two
processes, with an end to every wait; ``figures`` compares; ``rust`` asks the program for its own figure; ``plot`` draws.
"""
