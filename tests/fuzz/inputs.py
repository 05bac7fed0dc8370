"""Hostile strings, JSON and bytes, drawn from a `random.Random`."""

from __future__ import annotations

import json
import random
from typing import Any

#: What has broken programs before; also pieces of our own grammars, so that parsers get far.
BAD = (
    "", " ", "\t", "\n", "\r\n", "\x00", "\x07", "\x1b[31mred", "\x1b]0;title\x07", "\x9b31m", "\x7f",
    "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\x85", "\udc80\udcff", "\ud800",
    "$(touch /tmp/hostile)", "`id`", "; rm -rf /", "&& id", "| id", "'", '"', "\\", "|", ",", ":", "=",
    "a=b", " Priority=4000000000", "JobId=1 Priority=9", "ReservationName=x", "--elastic=1", "-1",
    "../../etc/passwd", "/dev/full", "~", "*", "?", "%s%n%x", "{0}", "{", "}", "[bold]x[/]", "[", "]",
    "é", "日本", "𝔘", "٤", "²", "Ⅷ", "1e999", "NaN", "Infinity", "-0", "1_0", "0x10", "+1",
    "9" * 19, "9" * 400, "9" * 5000, "A" * 1024, "g[1-3]", "g[01-02,07]", "g[3-1]", "g[1-x]",
    "g[1-999999999]", "g[0-9][0-9][0-9]", "'; DROP TABLE jobs;--", "None", "null", "true", "(null)",
    "2-16", "types=a100:v100", "batch=1-2", "unit=2", "unit=a100:2/v100:4", "notice=5", "freeze=auto",
    "elastic:2-16", "4x2", "2x2x1", "1-4", "now", "now-1day", "UNLIMITED", "1-00:00:00", "gres/gpu:a100:4",
    "gres/gpu=4", "cpu=8", "mem=2G", "=inf", "gpu", "a100", "v100", "SwitchName=s1 Level=0 Nodes=g[1-2]",
    "BlockName=b1", "Level=x", "LinkSpeed=0", "Count=9", "Links=-1,4", "Name=gpu", "NodeName=g01",
)  # fmt: skip

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 4, 7, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64, 10**30, 10**400,
    -(10**400), 0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip


def text(rng: random.Random, most: int = 4) -> str:
    """Return some pieces of `BAD`, or any characters, surrogates included."""
    if rng.random() < 0.2:
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000))))
                       for _ in range(rng.randrange(40)))  # fmt: skip
    return "".join(rng.choice(BAD) for _ in range(rng.randint(1, most)))


def near(rng: random.Random, seed: str) -> str:
    """Return a valid text, mostly with a change."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at, to = sorted((rng.randint(0, len(seed)), rng.randint(0, len(seed))))
        piece = rng.choice(
            (rng.choice(BAD), chr(rng.randrange(256)), str(rng.randrange(300)), seed[at:to])
        )
        seed = seed[:at] + piece + seed[rng.choice((at, to)) :]
    return seed


def value(rng: random.Random, depth: int = 3) -> Any:
    """Return any JSON value, and values that Python's reader accepts besides."""
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return text(rng)
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng, 1): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def changed(rng: random.Random, body: Any) -> Any:
    """Return a valid JSON value with a part replaced, left out, renamed or added."""
    if rng.random() < 0.15 or not isinstance(body, dict | list) or not body:
        return value(rng)
    if isinstance(body, list):
        at = rng.randrange(len(body))
        return [*body[:at], changed(rng, body[at]), *body[at + 1 :]]
    name = rng.choice(sorted(body))
    act = rng.randrange(8)
    rest = {k: v for k, v in body.items() if k != name}
    if act == 0:
        return rest
    if act == 1:
        return {**rest, text(rng, 1): body[name]}
    if act == 2:
        return {**body, text(rng, 1): value(rng)}
    return {**body, name: changed(rng, body[name])}


def bytes_(rng: random.Random, seed: bytes = b"") -> bytes:
    """Return a valid message with bytes changed, cut or doubled, or random bytes."""
    data = bytearray(seed or rng.randbytes(rng.randrange(200)))
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        act = rng.randrange(5)
        if act == 0:
            del data[at:]
        elif act == 1:
            data[at : at + 1] = rng.randbytes(1)
        elif act == 2:
            data[at:at] = rng.choice(BAD).encode("utf-8", "surrogatepass")
        elif act == 3:
            data[at:at] = data[: rng.randrange(len(data) + 1)]
        else:
            del data[at : at + rng.randrange(20)]
    return bytes(data)


def wire(body: Any, rng: random.Random) -> bytes:
    """Return JSON text, sometimes with a repeated key or extreme depth."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1 and data[:1] == b"{" and len(data) > 2:
        return b"{" + data[1:-1] + b"," + data[1:-1] + b"}"
    if rng.random() < 0.03:
        depth = rng.choice((100, 2000, 20000))
        return b"[" * depth + data + b"]" * depth
    return data
