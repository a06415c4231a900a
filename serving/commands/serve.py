"""`beamline serve`: a model repository behind gRPC."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import threading
from contextlib import suppress

from beamline.serving.commands.serve_options import add_arguments, config_of
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from beamline.serving.telemetry.logs import LogFormat, configure

__all__ = ["HELP", "add_arguments", "config_of", "run"]

HELP = "serve the models of a repository over gRPC"

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0  # to end in good order, behind the drain
FAILED = 1  # the exit code for a supervisor, where an engine failed


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    form = LogFormat(args.log_format)
    configure(form, args.log_level, form is LogFormat.JSON if args.access_log is None else args.access_log)
    _warn(config)
    return asyncio.run(_serve(config))


def _warn(config: ServeConfig) -> None:
    local = config.host in ("localhost", "::1") or config.host.startswith("127.")
    protected = config.tokens is not None or (config.tls is not None and config.tls.client_ca is not None)
    if not local and not protected:
        log.warning("whoever reaches %s may call, load and unload: see --tokens and --tls-client-ca", config.host)
    if config.tokens is not None and config.tls is None and not local:
        log.warning("tokens travel unencrypted to %s: see --tls-cert, unless something else encrypts", config.host)


async def _serve(config: ServeConfig) -> int:
    stop = _Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    server = Server(config)
    # The usual request to look again; by default it would end the process.
    loop.add_signal_handler(signal.SIGHUP, server.look_again)
    if not await _started(server, stop.asked):
        return 0
    # What is here now stays: to go through it again and again would keep the event loop from calls for 20 to 80 ms.
    gc.collect()
    gc.freeze()
    # One line for programs, with the ports as their options name them; everything else goes to standard error.
    ready = f"ready grpc={server.grpc_address} http={server.http_address} metrics={server.metrics_address}"
    print(ready, flush=True)
    if await _ended_by_failure(server, stop.asked):
        return await _end_failed(server)
    if stop.by_supervisor and config.drain_delay_seconds:
        log.info("leaving: health checks say no, calls are answered for %s seconds more", config.drain_delay_seconds)
        await server.leave()
    log.info("draining: no new calls, finishing those that run (again to stop at once)")
    if config.drain_seconds is not None:
        _exit_after(config.drain_seconds + _STOP_SECONDS)
    drained = await server.drain()
    if server.failed.is_set():
        return await _end_failed(server)
    if config.drain_seconds is None:
        _exit_after(_STOP_SECONDS)
    await server.stop()
    if not drained:
        log.error("stopped with calls unfinished after %s seconds", config.drain_seconds)
    return 0 if drained else 1


async def _end_failed(server: Server) -> int:
    _exit_after(_STOP_SECONDS)  # what hangs would keep the process
    await server.answer_failed()
    await server.stop()
    return FAILED


async def _started(server: Server, stop: asyncio.Event) -> bool:
    """False where it was asked to end before: a model may take long to load, or hang."""
    starting, asked = asyncio.create_task(server.start()), asyncio.create_task(stop.wait())
    await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if starting.done():
        starting.result()
        return True
    log.info("ending before all models are loaded")
    _exit_after(_STOP_SECONDS)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    return False


async def _ended_by_failure(server: Server, stop: asyncio.Event) -> bool:
    """Waits for the end: asked for, or because engines don't step any more."""
    waits = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    return server.failed.is_set() and not stop.is_set()


def _exit_after(seconds: float) -> None:
    """The last resort: a step that hangs in a device's driver, say, would keep the process for ever."""

    def exit_now() -> None:
        log.error("still not stopped after %s seconds: exiting at once", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()


class _Stop:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.by_supervisor = False  # by one that may run load balancers, and not by a person at a terminal

    def on_signal(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self.by_supervisor = number == signal.SIGTERM
        self.asked.set()
