"""KV tensors on a GPU: in a pool of warpipe, or in PyTorch's own memory."""

import os

import torch


def kv_caches(layers, blocks, *, block_size=16, heads=8, head_size=128):
    """1 MiB a layer for each 16 blocks, in two parts."""
    shape, kept = (2, blocks, block_size, heads, head_size), None
    if os.environ["LMCACHE_DEVICE_BACKEND"] != "warpipe":
        return {f"layer.{layer}": torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for layer in range(layers)}, kept
    import warpipe.torch

    pool = warpipe.torch.pool()
    with torch.cuda.use_mem_pool(pool):
        tensors = {f"layer.{layer}": torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for layer in range(layers)}
    torch.cuda.synchronize()
    return tensors, [pool]
