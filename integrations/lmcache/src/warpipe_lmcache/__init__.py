"""KV memory of LMCache's workers for its daemon by descriptor: see the README.

LMCache finds ``device`` by its entry point, in workers and in the daemon, and ``daemon`` by ``--server-module``.
"""
