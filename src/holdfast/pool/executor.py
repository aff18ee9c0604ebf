"""Pool: a drop-in for `concurrent.futures.ProcessPoolExecutor` whose workers may die.

This module has what the user sees and sets. The dispatcher's thread does the work. Workers start when they are needed.
"""

import atexit
import itertools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, overload

from holdfast.core.autoscale import Autoscale
from holdfast.core.host import HostMaker, KnowsMemory, WorkerProcess
from holdfast.core.ledger import Ledger
from holdfast.diagnose.incident import Incident
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.report import Report
from holdfast.diagnose.run_folder import RunFolder
from holdfast.diagnose.stats import PoolStats, to_dict
from holdfast.errors import HoldfastError
from holdfast.local.trainer.local_host import LocalHost
from holdfast.policy import Policy, parse_bytes
from holdfast.pool.call import Call, name_of
from holdfast.pool.call_codec import LetterWriter
from holdfast.pool.dispatcher import Dispatcher
from holdfast.pool.mapping import Feed, ahead_of, chunks_of, length_of
from holdfast.pool.pool_job import PoolJob
from holdfast.pool.pool_narrator import PoolNarrator, stats_of
from holdfast.pool.progress import Show, Tracker
from holdfast.shm import forks
from holdfast.shm.main_module import MainModule
from holdfast.system.cgroups import growth_bytes

P = ParamSpec("P")
T = TypeVar("T")
# How many tasks a worker holds: the one it is on, and others. The dispatcher takes those back if a worker is idle.
# With one task at a time the worker would wait for each next one, and 10,000 empty tasks take twice the processor time.
DEPTH = 16


class Pool(Executor):
    """Runs calls in worker processes. If a call kills its worker, only that call fails: its `TaskLost` says why.

    It takes the arguments of ProcessPoolExecutor, and one more:

    policy: `retries`, `retry_on`, `retry_delay` for calls that raise or are lost; `sample_timeout`: seconds for a call;
    `worker_memory`: for a worker. None: no retries, and HOLDFAST_* variables for the rest.
    """

    _host_maker: ClassVar[HostMaker] = LocalHost

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        if max_workers is None:
            max_workers = len(os.sched_getaffinity(0))
        elif max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if max_tasks_per_child is not None:
            if not isinstance(max_tasks_per_child, int):
                raise TypeError("max_tasks_per_child must be an integer")
            if max_tasks_per_child <= 0:
                raise ValueError("max_tasks_per_child must be >= 1")
        if policy is None:
            # A call may not be safe to run twice. So no environment variable can set this, only the program.
            policy = replace(Policy.from_environment(), retries=0)
        elif not isinstance(policy, Policy):
            raise TypeError(f"policy must be a holdfast.Policy, not {policy!r}")
        context = multiprocessing.get_context(mp_context) if isinstance(mp_context, str) else mp_context
        method = (context if context is not None else multiprocessing.get_context()).get_start_method()
        self.policy = policy
        self._workers = max_workers
        self._method: str = method
        self._job = PoolJob(initializer, initargs, policy.retry_on, policy.retry_delay)
        self._share = max_tasks_per_child
        self._record = Record(kept_in=RunFolder.from_environment("pool"))
        self._numbers = itertools.count()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._dispatcher: Dispatcher | None = None
        self._shut = False
        self._feeds: list[Feed] = []

    # Calls ---------------------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """`fn(*args, **kwargs)` in a worker."""
        return self._submit(fn, args, kwargs)

    def submit_with(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        timeout: float | None = None,
        retries: int | None = None,
        memory: int | str | None = None,
        **kwargs: Any,
    ) -> Future[T]:
        """`fn(*args, **kwargs)` in a worker, with limits for this call.

        timeout: seconds from its start. After that Holdfast takes its stack and kills it, and the future raises
        TimeoutError. retries: how often it may run again after it was lost, timed out, or raised one of
        `Policy.retry_on`. memory: what it may allocate, in bytes or as "2GiB". Beyond that, the line that allocates
        raises MemoryError.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be None or seconds above 0, not {timeout!r}")
        if retries is not None and retries < 0:
            raise ValueError(f"retries must be 0 or more, not {retries!r}")
        size = parse_bytes(memory) if isinstance(memory, str) else memory or 0
        return self._submit(fn, args, kwargs, timeout=timeout, retries=retries, memory=size)

    def _submit(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        retries: int | None = None,
        memory: int = 0,
        items: int = 0,
        first: int = 0,
        tracker: Tracker | None = None,
    ) -> Future[Any]:
        dispatcher = self._dispatcher
        if dispatcher is None or self._shut or dispatcher.broken is not None or os.getpid() != self._owner:
            dispatcher = self._opened()
        policy = self.policy
        call = Call(
            next(self._numbers),
            fn,
            args,
            kwargs,
            lives=1 + (policy.retries if retries is None else retries),
            timeout_s=policy.sample_timeout if timeout is None else timeout,
            memory=memory,
            items=items,
            first=first,
            tracker=tracker,
        )
        if not dispatcher.submit(call):
            raise self._refusal()
        return call.future

    @overload
    def map(
        self,
        fn: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        return_exceptions: Literal[False] = False,
        progress: bool | str | Show = False,
    ) -> Iterator[T]: ...

    @overload
    def map(
        self,
        fn: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        return_exceptions: bool,
        progress: bool | str | Show = False,
    ) -> Iterator[T | Exception]: ...

    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        return_exceptions: bool = False,
        progress: bool | str | Show = False,
    ) -> Iterator[Any]:
        """The results of `fn` for all items, in order. `chunksize` items travel together; each has its own outcome.

        `buffersize`: how many tasks may be ahead of the results that you have taken. Without it, all items are drawn at
        once, but a generator at most 10,000 tasks ahead. `return_exceptions`: the exception of an item comes in the
        place of its result, and the others go on. `progress`: True prints on stderr how far it is; a text stands at the
        start of that line; a function gets a `holdfast.Progress` about once a second, in the pool's own thread.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        several = chunksize > 1
        calls: Iterator[Any] = zip(*iterables, strict=False)
        if several:
            calls = chunks_of(calls, chunksize)
        tracker = None
        if progress:
            dispatcher = self._opened()
            tracker = Tracker(progress, name_of(fn), length_of(iterables), dispatcher.pace)
            dispatcher.watch.add(tracker)
        submit = partial(_call_chunk if several else _call, self, fn, tracker)
        feed = Feed(submit, calls, ahead_of(iterables, buffersize), return_exceptions, several, tracker)
        feed.fill()
        if buffersize is None and not feed.over:
            self._feeds = [other for other in self._feeds if not other.over] + [feed]
        return feed.results(timeout)

    # The workers ---------------------------------------------------------------------------------------------------

    def _opened(self) -> Dispatcher:
        if os.getpid() != self._owner:
            raise forks.wrong_process("pool", self._owner, "make a pool in this process")
        with self._lock:
            if self._shut or (self._dispatcher is not None and self._dispatcher.broken is not None):
                raise self._refusal()
            if self._dispatcher is None:
                self._dispatcher = self._start()
            return self._dispatcher

    def _refusal(self) -> Exception:
        broken = self._broken
        if broken is not None:
            again: HoldfastError = type(broken)(*broken.args)
            again.__cause__ = broken.__cause__
            return again
        return RuntimeError("cannot schedule new futures after shutdown")

    @property
    def _broken(self) -> HoldfastError | None:
        return self._dispatcher.broken if self._dispatcher is not None else None

    # Private names of the standard library's pool that other libraries use.

    @property
    def _max_workers(self) -> int:
        return self._workers

    @property
    def _processes(self) -> dict[int, WorkerProcess]:
        handles = self._dispatcher.handles if self._dispatcher is not None else []
        return {handle.pid or -1 - i: handle for i, handle in enumerate(handles)}

    def _start(self) -> Dispatcher:
        policy, fork = self.policy, self._method == "fork"
        depth = DEPTH if self._share is None else 1
        calls: dict[int, Call] = {}
        growth = growth_bytes(policy.worker_bytes, self._workers)
        host = self._host_maker(
            self._workers,
            depth,
            self._job,
            fork=fork,
            sample_timeout=None,
            growth_bytes=growth,
            take_back=True,
            facts=None if self._record.kept_in is None else self._record.kept_in.log_of_facts(),
        )
        # The ledger counts attempts and blames nobody: some tasks may not run twice, whatever killed their worker.
        plain = replace(policy, bad_sample="raise")
        autoscale = Autoscale(self._workers, self._workers, adapt=False)
        if isinstance(host, KnowsMemory):
            autoscale.room(*host.room)
        allowed = autoscale.allowed.workers
        ledger = Ledger(self._workers, depth, plain, in_order=False, allowed=allowed, share=self._share, even=True)
        narrator = PoolNarrator(self._record, policy, growth, self._method, calls)
        dispatcher = Dispatcher(
            host, ledger, autoscale, LetterWriter(MainModule(fork)), narrator, calls, depth, self._numbers
        )
        # A pool that is dropped finishes what it has begun. So does a pool that exists when the interpreter ends.
        dropped = weakref.finalize(self, dispatcher.close)
        dropped.atexit = False
        try:
            atexit.register(dispatcher.finish)
            dispatcher.start()
        except BaseException:
            dropped.detach()
            atexit.unregister(dispatcher.finish)
            raise
        return dispatcher

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. `wait`: return when all calls are done and every process has ended."""
        if os.getpid() != self._owner:
            return
        if wait and not cancel_futures and not self._shut:
            while self._feeds:
                self._feeds.pop().drain()
        self._feeds.clear()
        with self._lock:
            self._shut = True
            dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.close(cancel=cancel_futures)
            if wait:
                dispatcher.join()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """Ctrl-C ends the calls that run. Workers do not react to it by themselves."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.kill_workers()
        else:
            self.shutdown()

    def kill_workers(self) -> None:
        """End all processes at once. Tasks that run are lost, others cancelled; the pool takes no more."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._shut = True
            dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.kill()
            dispatcher.join()

    # The same as `kill_workers`: a worker notes SIGTERM and goes on, see local/worker/worker_loop.py.
    terminate_workers = kill_workers

    # What happened -------------------------------------------------------------------------------------------------

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All that went wrong so far, oldest first (the first thousand)."""
        return tuple(self._record.incidents)

    def stats(self) -> dict[str, Any]:
        """Totals so far, how many calls run and wait right now, and what each worker has done and used."""
        return to_dict(self._totals())

    def report(self) -> Report:
        """What happened so far: `print(pool.report())`, or `.to_json()`."""
        return Report(self._record, self._totals())

    def _totals(self) -> PoolStats:
        dispatcher = self._dispatcher
        return dispatcher.stats() if dispatcher is not None else stats_of(self._record, 0, 0, self._workers)


def _call(
    pool: Pool, fn: Callable[..., Any], tracker: Tracker | None, args: tuple[Any, ...], first: int
) -> Future[Any]:
    return pool._submit(fn, args, {}, first=first, tracker=tracker)


def _call_chunk(
    pool: Pool, fn: Callable[..., Any], tracker: Tracker | None, chunk: list[tuple[Any, ...]], first: int
) -> Future[Any]:
    return pool._submit(fn, (chunk,), {}, items=len(chunk), first=first, tracker=tracker)
