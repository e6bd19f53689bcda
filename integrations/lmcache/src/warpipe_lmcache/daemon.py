"""What LMCache's daemon has beside its own modules: ``lmcache server --server-module '{"module_path":
"warpipe_lmcache.daemon"}'``.

* Descriptors of workers' KV memory, for the resolver that LMCache leaves open.
* A worker's death, proven by warpipe: its registrations end by LMCache's own call, and its memory is free.
* Registrations outlive the daemon: each worker keeps its own, and the next daemon at the same address takes them up before it
  serves anybody.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import warpipe
from lmcache import torch_dev
from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.rpc import get_rpc_spec
from lmcache.v1.multiprocess.transport.zmq_impl.mq import msgspec_decode, msgspec_encode
from lmcache.v1.platform.base.ipc_wire import VmmCudaIPCData
from lmcache.v1.platform.devices.cuda.ipc_wrapper import set_vmm_fd_resolver

from .descriptors import ROLE, DescriptorError, Keep, Workers
from .events import TimelineEvents

logger = logging.getLogger("lmcache.warpipe")

# Seconds for the transfers of a dead worker that are under way: their waits end with the proof of its death.
_TRANSFER_LIMIT = 60.0
# Seconds in which a worker that was just reached is seen as a member, if it lives.
_JOIN_LIMIT = 10.0
_ENDED_MAX = 1024


def build_server_modules(build: Any) -> WarpipeModule:
    """Called by LMCache. ``config`` may have a ``name``, by which the next daemon takes this one's place: by default the
    address.

    Raises ``RuntimeError`` if the daemon has no transfers by handles.
    """
    transfers = [module for module in build.modules if isinstance(module, LMCacheDrivenTransferModule)]
    if not transfers:
        raise RuntimeError("this daemon maps no KV memory; leave out --supported-transfer-mode engine_driven")
    name = build.config.get("name", f"{build.mp_config.host}:{build.mp_config.port}")
    return WarpipeModule(build.server_context, transfers[0], build.modules, name)


class _Registration(NamedTuple):
    """An instance's KV memory."""

    workers: frozenset[str]
    export_ids: frozenset[bytes]


class WarpipeModule(InstanceLivenessTarget):  # type: ignore[misc]
    """A module of LMCache's server. It stands before four handlers of the transfer module, which do LMCache's own work."""

    def __init__(self, context: Any, transfer: Any, modules: Any, name: str) -> None:
        self._context, self._transfer, self._name = context, transfer, name
        self._mirrors = [module for module in modules if hasattr(module, "drop_instance_state")]
        self._workers = Workers()
        self._changed = threading.Condition()
        # Guarded by ``_changed``: the instances, transfers under way, and instances that end.
        self._instances: dict[int, _Registration] = {}
        self._busy: Counter[int] = Counter()
        self._ending: set[int] = set()
        self._alive: set[str] = set()
        # The last ones that ended: the end of a worker may be known before its registration is complete.
        self._gone: deque[str] = deque(maxlen=_ENDED_MAX)
        self._stalled: set[str] = set()
        self._restored: set[int] = set()
        # Instances that are not registered, and have had one ping refused.
        self._refused: deque[int] = deque(maxlen=_ENDED_MAX)
        # LMCache's other transfers have registrations of their own.
        self._others_register = any(isinstance(module, EngineDrivenTransferModule) for module in modules)
        self._closed = False
        self._found = threading.local()
        self._register, self._unregister = transfer.register_kv_cache, transfer.unregister_kv_cache
        transfer.register_kv_cache = _in_place_of(self._register, self._register_kv_cache)
        transfer.unregister_kv_cache = _in_place_of(self._unregister, self._unregister_kv_cache)
        # A refused store has nothing to release.
        transfer.store = self._counted(transfer.store, lambda key, instance_id: None)
        transfer.retrieve = self._counted(transfer.retrieve, transfer._release_failed_retrieve_locks)
        set_vmm_fd_resolver(self._resolve)
        self._workers.sweep()
        self._members = warpipe.Members.watch(on=self._on_change)
        self._restore()

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        with self._changed:
            instances = {str(instance): sorted(found.workers) for instance, found in self._instances.items()}
            busy = sum(self._busy.values())
            return {"warpipe": {"workers": sorted(self._alive), "instances": instances, "transfers": busy}}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        set_vmm_fd_resolver(None)
        self._members.close()

    def touch_instance(self, instance_id: int) -> None:
        """Part of LMCache's ping, of which one fails for an instance of the daemon before: requests that were under way there
        have no answer to come, and the worker gives them up when it sees its daemon unhealthy. With the next ping it
        registers, if it is not registered again already."""
        known = self._others_register or instance_id in self._transfer.context_entries_snapshot()
        with self._changed:
            if instance_id in self._restored:
                self._restored.discard(instance_id)
            elif known:
                return
            elif instance_id in self._refused:
                self._refused.remove(instance_id)
                return
            else:
                self._refused.append(instance_id)
        raise RuntimeError(f"instance {instance_id} was registered with the daemon before this one")

    def drop_instance_state(self, instance_id: int) -> None:
        """LMCache has ended a silent instance's registration itself."""
        self._forget(instance_id)

    # Descriptors.

    def _resolve(self, export_id: bytes) -> int:
        with self._changed:
            skip = frozenset(self._stalled)
        fd, worker = self._workers.fetch(export_id, skip)
        if (found := getattr(self._found, "workers", None)) is not None:
            found.add(worker)
        return fd

    # Handlers of the transfer module.

    def _register_kv_cache(self, instance_id: int, kv_caches: Any, *arguments: Any) -> None:
        export_ids = self._new_export_ids(instance_id, kv_caches)
        workers = self._found.workers = set()
        try:
            self._register(instance_id, kv_caches, *arguments)
        except BaseException:
            # LMCache does so where its cache context cannot be made, and not where a later step fails.
            for kv_cache in kv_caches:
                kv_cache.close()
            raise
        finally:
            self._found.workers = None
        with self._changed:
            if workers:
                self._instances[instance_id] = _Registration(frozenset(workers), export_ids)
            # LMCache leaves an instance that it knows as it is, and asks for no descriptor.
            registration = self._instances.get(instance_id)
            if registration is None:
                return
            joined = registration.workers <= self._alive
            gone = not registration.workers.isdisjoint(self._gone)
        if gone:
            self._end(instance_id)
            return
        if not joined:
            # It is about to be seen as a member, or was killed before it could be.
            timer = threading.Timer(_JOIN_LIMIT, self._end_unless_joined, [instance_id, registration])
            timer.daemon = True
            timer.start()
        self._keep(instance_id, registration.workers, (kv_caches, *arguments))

    def _new_export_ids(self, instance_id: int, kv_caches: Any) -> frozenset[bytes]:
        """The export ids of a registration. LMCache takes what it has mapped of an id as it is, whatever size the next one
        with that id states; so each is registered once.

        Raises ``DescriptorError``.
        """
        wires = [kv_cache.to_wire() for kv_cache in kv_caches]
        listed = [wire.export_id for wire in wires if isinstance(wire, VmmCudaIPCData) and wire.kind == "posix_fd"]
        export_ids = frozenset(listed)
        with self._changed:
            others = [found.export_ids for instance, found in self._instances.items() if instance != instance_id]
        if len(export_ids) < len(listed) or not export_ids.isdisjoint(frozenset().union(*others)):
            raise DescriptorError(f"instance {instance_id} registers a descriptor that is registered already")
        return export_ids

    def _unregister_kv_cache(self, instance_id: int) -> None:
        with self._changed:
            if instance_id in self._ending:
                return
            self._ending.add(instance_id)
            busy = self._busy[instance_id]
        if busy:
            # LMCache would unmap memory that a transfer uses when its wait is over. Its other requests go on, and the reply.
            threading.Thread(target=self._end, args=[instance_id], daemon=True).start()
        else:
            self._end(instance_id)

    def _counted(self, handler: Callable[..., Any], release: Callable[[Any, int], None]) -> Callable[..., Any]:
        """A handler: the end of an instance waits for its calls, and one with an event that is never complete is refused."""

        def counted(key: Any, instance_id: int, block_ids: Any, event: bytes, *arguments: Any) -> Any:
            with self._changed:
                # Afterwards LMCache refuses the call, as one of an instance that it does not know.
                self._changed.wait_for(lambda: instance_id not in self._ending, _TRANSFER_LIMIT)
                self._busy[instance_id] += 1
            try:
                if self._is_complete(instance_id, event):
                    return handler(key, instance_id, block_ids, event, *arguments)
                release(key, instance_id)
                return b"", False
            finally:
                with self._changed:
                    self._busy[instance_id] -= 1
                    if not self._busy[instance_id]:
                        del self._busy[instance_id]
                    self._changed.notify_all()

        return _in_place_of(handler, counted)

    def _is_complete(self, instance_id: int, event: bytes) -> bool:
        """Waits for an event before LMCache does so in its handler: it answers nothing if that fails, and the engine would
        wait without a limit."""
        entry = self._transfer.context_entries_snapshot().get(instance_id)
        if entry is None or not isinstance(entry.event_backend, TimelineEvents):
            return True
        try:
            entry.event_backend.import_event(event, entry.cache_context.device).wait()
        except (warpipe.Error, ValueError) as error:
            logger.warning("a transfer of instance %d is refused: %s", instance_id, error)
            return False
        return True

    # Registrations that outlive the daemon.

    def _keep(self, instance_id: int, workers: frozenset[str], arguments: tuple[Any, ...]) -> None:
        types = get_rpc_spec("register_kv_cache").payload_types[1:]
        payloads = [msgspec_encode(value, kind) for value, kind in zip(arguments, types, strict=True)]
        for worker in workers:
            try:
                self._workers.keep(worker, Keep(self._name, instance_id, payloads))
            except (OSError, DescriptorError) as error:
                logger.warning("after a restart of this daemon, worker %s has to register again itself: %s", worker, error)

    def _restore(self) -> None:
        # LMCache does so later, before it serves.
        getattr(torch_dev, "init", lambda: None)()
        for worker in self._workers.names():
            try:
                for kept in self._workers.recall(worker, self._name):
                    self._restore_one(worker, kept)
            except (OSError, DescriptorError) as error:
                logger.warning("no registrations from worker %s: %s", worker, error)

    def _restore_one(self, worker: str, kept: Keep) -> None:
        types = get_rpc_spec("register_kv_cache").payload_types[1:]
        try:
            arguments = [msgspec_decode(payload, kind) for payload, kind in zip(kept.payloads, types, strict=True)]
            self._register_kv_cache(kept.instance, *arguments)
        # Whatever LMCache finds wrong with one registration, the daemon serves the others.
        except Exception:
            logger.exception("instance %d of worker %s could not be registered again", kept.instance, worker)
            return
        with self._changed:
            self._restored.add(kept.instance)
        logger.info("instance %d of worker %s is registered again", kept.instance, worker)

    # The end of a worker, and of its registration.

    def _on_change(self, change: Any) -> None:
        member = change.member
        if member.role != ROLE:
            return
        with self._changed:
            (self._stalled.add if change.what == "stalled" else self._stalled.discard)(member.name)
            if change.what not in ("left", "died"):
                self._alive.add(member.name)
                return
            self._alive.discard(member.name)
            self._gone.append(member.name)
        self._workers.remove(member.name)
        self._end_instances_of(member.name)

    def _end_instances_of(self, worker: str) -> None:
        with self._changed:
            instances = [instance for instance, found in self._instances.items() if worker in found.workers]
        for instance in instances:
            self._end(instance)

    def _end_unless_joined(self, instance_id: int, registration: _Registration) -> None:
        with self._changed:
            if registration.workers <= self._alive or self._instances.get(instance_id) != registration:
                return
        self._end(instance_id)

    def _end(self, instance_id: int) -> None:
        with self._changed:
            self._ending.add(instance_id)
            self._changed.wait_for(lambda: self._closed or not self._busy[instance_id], _TRANSFER_LIMIT)
            busy = self._busy[instance_id]
        try:
            if busy:
                logger.error("instance %d has ended in the middle of a transfer that does not end", instance_id)
                return
            self._unregister(instance_id)
            for mirror in self._mirrors:
                mirror.drop_instance_state(instance_id)
            logger.info("instance %d has ended; its KV memory is released", instance_id)
        except Exception:
            logger.exception("instance %d has ended, and its KV memory could not be released", instance_id)
        finally:
            self._forget(instance_id)
            with self._changed:
                self._ending.discard(instance_id)
                self._changed.notify_all()

    def _forget(self, instance_id: int) -> None:
        with self._changed:
            registration = self._instances.pop(instance_id, None)
            self._restored.discard(instance_id)
        for worker in registration.workers if registration else ():
            try:
                self._workers.forget(worker, self._name, instance_id)
            except (OSError, DescriptorError) as error:
                logger.debug("worker %s keeps its registration: %s", worker, error)


def _in_place_of(handler: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with the signature and the marks of LMCache's handler, which both of its transports look at."""
    signature = inspect.signature(handler)

    @functools.wraps(handler)
    def standing(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return call(*bound.args)

    return standing
