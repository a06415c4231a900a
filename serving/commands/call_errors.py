"""What a client's command says of a call that failed: the server's own sentence, or why there was none."""

from __future__ import annotations

from typing import Any

import grpc

from beamline.serving.contract.call import REQUEST_ID

# What gRPC says of a connection that never came to be, and what it means here: without TLS, and with it.
_HINTS: dict[bool, tuple[tuple[str, str], ...]] = {
    False: (
        ("Socket closed", "if it wants TLS, give --tls-ca"),
        ("reset by peer", "if it wants TLS, give --tls-ca"),
    ),
    True: (
        ("WRONG_VERSION_NUMBER", "it does not talk TLS: leave --tls-ca away"),
        ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in --tls-ca"),
        ("Hostname Verification", "its certificate is for another name than --target has"),
        ("Socket closed", "if it wants to see a certificate, give --tls-cert and --tls-key of an authority it trusts"),
        ("reset by peer", "if it wants to see a certificate, give --tls-cert and --tls-key of an authority it trusts"),
    ),
}


def sentence_of(error: Any, target: str, tls: bool) -> str:
    """`error` is the call's `grpc.RpcError`; `tls`: the connection was to be encrypted."""
    code, details = error.code(), str(error.details())
    answered = any(key == REQUEST_ID for key, _ in error.trailing_metadata() or ())
    if code is not grpc.StatusCode.UNAVAILABLE or answered:
        option = ", here: --token-file" if code is grpc.StatusCode.UNAUTHENTICATED else ""
        return f"{details} ({code.name}{option})"
    hint = next((hint for says, hint in _HINTS[tls] if says in details and "failed to connect" in details), None)
    return f"the server at {target} is not available: {details}{f' ({hint})' if hint else ''}"
