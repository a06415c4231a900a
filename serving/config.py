"""How a server is set up: one frozen record, made by the command line or by a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a model in process needs no gRPC, which TLS is for
    from beamline.serving.security.tls import TlsFiles

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What one call may ask for, whatever the model."""

    max_inputs: int = 1024
    max_text_bytes: int = MIB
    max_sequences: int = 16384  # texts, or parts of them, of one call: a megabyte of ordinary sentences
    # Of one call at once in the engine: enough to fill the slots, too few for one caller to own the queue.
    max_in_flight: int = 64
    max_unread_tokens: int = 4096  # of one stream; whoever falls further behind is cut off


@dataclass(frozen=True, slots=True)
class ServeConfig:
    repository: Path | None = None  # None only with `fake`
    remote: str | None = None  # the address of which `repository` is a copy; None: it is the repository itself
    model_name: str | None = None  # of the only model of the repository; None: its own
    fake: bool = False
    host: str = "127.0.0.1"
    grpc_port: int = 8001  # 0: any free port
    metrics_port: int = 8002
    http_port: int | None = None  # of the JSON gateway; None: there is none
    metrics_need_token: bool = False
    default_model: str | None = None  # what an empty model name means
    all_versions: bool = False  # not only the newest of each model, where its serving.toml says nothing
    load: tuple[str, ...] = ()  # models to begin with, as NAME or NAME/VERSION; empty: all
    on_demand: bool = False  # load models when they are asked for, but for those of `load`
    load_seconds: float | None = 600.0  # a model that takes longer to load is given up; None: never
    watch_seconds: float | None = None  # how often to look for changes in the repository; None: never
    # Well above max_text_bytes, so that a text that is too long gets our sentence, not a transport error.
    max_message_bytes: int = 16 * MIB
    max_pending_bytes: int = 64 * MIB  # of large requests that are here at once
    write_seconds: float | None = 30.0  # in which a reader takes nothing; then its call is given up; None: any time
    drain_delay_seconds: float = 5.0  # between the first health check that says no, and the first call that is refused
    drain_seconds: float | None = 20.0  # then calls are cut off; None: as long as they take
    max_connections: int | None = None  # of gRPC, and of the gateway; None: as the limit of open files allows
    max_connections_per_address: int | None = None  # of the gateway; None: no limit, because of proxies
    keepalive_seconds: float = 60.0  # then a silent gRPC client is asked if it is there
    max_connection_seconds: float | None = None  # then a gRPC connection is closed; None: never
    load_reports: bool = False  # with every answer, for load balancers (ORCA)
    watchdog_seconds: float = 60.0  # a step that takes longer is one that will not end
    device: str = "auto"  # or cpu, cuda, tensorrt
    threads: int = 0  # of a model; 0: as many as there are cores
    engines: int = 0  # of a model, which share its threads on the CPU; 0: as suits it
    max_slots: int = 32  # requests that are decoded at once
    max_queue: int = 1024  # requests that wait behind them
    early_refusal: bool = True  # of a request whose deadline would pass while it waits
    prefix_cache_bytes: int = 512 * MIB  # of each language model; 0: off
    share_prefix_cache: bool = False  # between the holders of different tokens
    prompt_slowdown: float = 2.0  # how much longer a stream may wait for a token while prompts are taken in
    fake_step_seconds: float = 0.0
    fake_slots: int = 8
    tls: TlsFiles | None = None  # None: no encryption
    tokens: Path | None = None  # a file of token hashes; None: everybody may call
    max_calls_per_client: int | None = None  # at once
    text: TextLimits = field(default_factory=TextLimits)
