"""Real input: an MPEG transport stream of ffmpeg's test source, as ffmpeg sends it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from runs import Run

pytestmark = pytest.mark.skipif(
    shutil.which("ffmpeg") is None, reason="ffmpeg is not installed: `apt-get install ffmpeg`"
)


def ffmpeg(*args: str) -> None:
    subprocess.run(["ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-y", *args], check=True)


def test_a_transport_stream_arrives_byte_for_byte(name: str, tmp_path: Path) -> None:
    """It must show, 3: ffmpeg writes its stream to a file and to us; both have the same bytes."""
    source, stream, dump = (tmp_path / part for part in ("source.ts", "stream.ts", "dump.ts"))
    ffmpeg("-f", "lavfi", "-i", "testsrc=size=640x360:rate=25:duration=2", "-b:v", "6M", f"{source}")
    with Run(name, "--consumer", f"dump={dump}", "--consumer", "rate") as run:
        there = f"udp://127.0.0.1:{run.port}?pkt_size=1316"
        ffmpeg(
            *("-re", "-i", f"{source}", "-map", "0", "-c", "copy"),
            *("-f", "tee", f"[f=mpegts]{stream}|[f=mpegts]{there}"),
        )
        summary = run.end()
    assert summary["receivers"][0]["socket_dropped"] == 0
    assert dump.read_bytes() == stream.read_bytes()
    written, rate = (consumer["result"] for consumer in summary["consumers"])
    assert written["bytes"] == stream.stat().st_size
    # Seven transport packets of 188 bytes fill a datagram; the end of a picture sends fewer.
    sizes = {int(size): count for size, count in rate["sizes"].items()}
    assert max(sizes, key=lambda size: sizes[size]) == 1316
    assert set(sizes) <= {188 * n for n in range(1, 8)}
    assert sum(size * count for size, count in sizes.items()) == stream.stat().st_size
    assert sum(sizes.values()) == written["packets"] == summary["receivers"][0]["packets"]
