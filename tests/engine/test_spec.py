"""What a run is: every value parsed strictly, files and flags alike, and checked together."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import spec
from engine.errors import Refused
from engine.spec import ConsumerSpec, Listen, ReceiverSpec, RingSpec, RunSpec

LOOPBACK = Listen("udp", "127.0.0.1", 5000, {})
OTHER = Listen("udp", "127.0.0.1", 6000, {})
FLAGS = {"listen": [LOOPBACK]}


def from_file(folder: Path, text: str, **flags: Any) -> RunSpec:
    path = folder / "run.toml"
    path.write_text(text)
    return spec.read(path, flags)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────

HOSTS = st.one_of(
    st.ip_addresses(v=4).filter(lambda address: not address.is_multicast).map(str),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,20})?", fullmatch=True),
)


@given(HOSTS, st.integers(0, 65535))
def test_a_url_is_read_back(host: str, port: int) -> None:
    where = spec.listen(f"udp://{host}:{port}")
    assert where == Listen("udp", host, port, {})
    assert str(where) == f"udp://{host}:{port}"


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("127.0.0.1:5000", "is no URL"),
        ("udp:127.0.0.1:5000", "is no URL"),
        ("udp://127.0.0.1", "port missing"),
        ("udp://127.0.0.1:", "port missing"),
        ("udp://127.0.0.1:65536", "port 65536"),
        ("udp://127.0.0.1:-1", "port -1"),
        ("udp://127.0.0.1:٣", "port ٣"),
        ("udp://127.0.0.1:5000/x", "is no URL"),
        ("udp://:5000", "names no address"),
        ("udp://256.1.1.1:5000", "no IPv4 address"),
        ("udp://127.1:5000", "no IPv4 address"),
        ("udp://[::g]:5000", "is no IPv6 address"),
        ("tcp://127.0.0.1:5000?interface=lo", "nothing can be chosen after ? with tcp"),
        ("sctp://127.0.0.1:5000", "sctp is not known: give udp://, tcp://, smc://"),
        ("udp://two words:5000", "is no host name"),
        (5000, "is no text"),
    ],
)
def test_what_cannot_be_listened_on(url: object, what: str) -> None:
    with pytest.raises(ValueError, match=what.replace("?", r"\?")):
        spec.listen(url)


@pytest.mark.parametrize("scheme", ["tcp", "smc"])
@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("gro", "on", "--gro on"),
        ("receive", "recvmsg", "--receive recvmsg"),
        ("connect", "127.0.0.1:1", "--connect"),
        ("busy-poll", 10, "--busy-poll"),
        ("rx-wait", "spin", "--rx-wait spin"),
        ("sender", "s", "--sender"),
        ("packets", 5, "--packets"),
    ],
)
def test_what_makes_no_sense_for_a_stream(scheme: str, flag: str, value: object, named: str) -> None:
    url = f"{scheme}://127.0.0.1:5000"
    assert spec.read(None, {"listen": [spec.listen(url)]}).sources
    with pytest.raises(Refused, match=f"{named} is for packets, and {url} is a stream: leave it out"):
        spec.read(None, {"listen": [spec.listen(url)], flag: value})


def test_consumers() -> None:
    assert spec.consumer("latency") == ConsumerSpec(handler="latency")
    assert spec.consumer("latency@1") == ConsumerSpec(handler="latency", cpus=(1,))
    assert spec.consumer("rate@1,3-4,policy=skip") == ConsumerSpec(
        handler="rate", cpus=(1, 3, 4), policy="skip"
    )
    assert spec.consumer("gaps@2-3,wait=spin,name=a.b-c") == ConsumerSpec(
        handler="gaps", cpus=(2, 3), wait="spin", name="a.b-c"
    )
    assert spec.consumer("dump=/tmp/out=1.ts@0") == ConsumerSpec(
        handler="dump", argument="/tmp/out=1.ts", cpus=(0,)
    )
    assert spec.consumer("quotes.handlers:best_bid,name=bid") == ConsumerSpec(
        handler="quotes.handlers:best_bid", name="bid"
    )


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("rate,split=3", [None] * 3), ("rate@1,split=3", [(1,)] * 3), ("rate@1-3,split=3", [(1,), (2,), (3,)])],
)
def test_each_member_of_a_split_is_a_consumer(text: str, cpus: list[tuple[int, ...] | None]) -> None:
    run = spec.read(None, FLAGS | {"consumer": [spec.consumer(text), spec.consumer("rate")]})
    *members, other = run.consumers
    assert [(m.name, m.group, m.member, m.split) for m in members] == [
        (f"rate.{k}", "rate", k, 3) for k in range(3)
    ]
    assert [m.cpus for m in members] == cpus
    assert (other.name, other.group, other.split) == ("rate-2", "", 1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no handler ''"),
        ("latencies", "no handler 'latencies': give latency, rate"),
        ("latency@", "is no CPU list"),
        ("latency@x", "is no CPU list"),
        ("latency@1,1", "names a CPU twice"),
        ("latency@1,policy=skip,3", "'3' is no option"),
        ("latency,3", "'3' is no option"),
        ("latency,policy=drop", "'drop' is not known: give gate or skip"),
        ("latency,wait=sleep", "'sleep' is not known"),
        ("latency,split=two", "'two' is out of range"),
        ("latency,demote=0", "'0' is no time"),
        ("latency,split=2,by=packet", "'packet' is not known: give block or flow"),
        ("latency,share=2", "unknown option 'share': give policy=, wait=, split=, by=, demote= or name="),
        ("latency,wait=spin,wait=spin", "wait is given twice"),
        ("latency,name=a/b", "name 'a/b'"),
        ("latency,name=" + "n" * 33, "use 1 to 32"),
        ("latency=3", "takes no argument"),
        ("dump", "names no file"),
        ("dump=", "names no file"),
        ("dump=a,b", "'b' is no option"),
        ("module:", "no handler 'module:'"),
        (":name", "no handler ':name'"),
        ("a:b:c", "no handler"),
    ],
)
def test_what_is_no_consumer(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        spec.consumer(text)


@given(
    st.sampled_from(["latency", "rate", "gaps", "dump=some/file", "some.module:handler"]),
    st.none() | st.lists(st.integers(0, 4095), min_size=1, max_size=5, unique=True),
    st.none() | st.sampled_from(["gate", "skip"]),
    st.none() | st.sampled_from(["block", "yield", "spin"]),
    st.none() | st.from_regex(r"[A-Za-z0-9_.-]{1,32}", fullmatch=True),
)
def test_any_consumer_is_read_as_written(
    handler: str, cpus: list[int] | None, policy: str | None, wait: str | None, name: str | None
) -> None:
    text = handler + (f"@{','.join(map(str, cpus))}" if cpus else "")
    options = {"policy": policy, "wait": wait, "name": name}
    text += "".join(f",{key}={value}" for key, value in options.items() if value)
    read = spec.consumer(text)
    assert (read.handler, read.argument) == spec.split_handler(handler)
    assert read.cpus == (tuple(cpus) if cpus else None)
    assert (read.policy, read.wait, read.name) == (policy or "gate", wait or "block", name or "")


PARSERS = [*spec.RUN.values(), *spec.RECEIVER.values(), *spec.CONSUMER.values(), spec.size, spec.consumer]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3)
)


@given(st.sampled_from(PARSERS), ANYTHING)
@example(spec.switch, [])
@example(spec.seconds, float("nan"))
@example(spec.seconds, True)
@example(spec.RUN["fifo"], True)
def test_parsers_answer_anything_with_a_value_or_a_value_error(parse: spec.Parser, raw: object) -> None:
    refused = ""
    try:
        parse(raw)
    except ValueError as error:
        refused = str(error)
    assert not refused or ": " in refused  # what is wrong: what to do


@pytest.mark.parametrize(
    "raw", ["0", "-1", "nan", "inf", "1e10", "ten", "", "0x1", 0, 0.0, float("nan"), True]
)
def test_what_is_no_time(raw: object) -> None:
    with pytest.raises(ValueError, match="is no time"):
        spec.seconds(raw)


def test_times() -> None:
    assert [spec.seconds(raw) for raw in (10, "10", 0.5, "0.5")] == [10.0, 10.0, 0.5, 0.5]


def test_switches_are_words_or_toml() -> None:
    assert [spec.switch(raw) for raw in ("on", "off", True, False)] == [True, False, True, False]
    for raw in ("true", "1", 1, 0, None):
        with pytest.raises(ValueError, match="give on or off"):
            spec.switch(raw)


# ── files and flags ──────────────────────────────────────────────────────────────────────────────────

WHOLE = """
name = "quotes"
timestamps = "off"
stamp = "seed"
sender = "feed"
fifo = 5
mlock = true
duration = 60
packets = 1000
every = 0.5
plain = true
[[receiver]]
listen = "udp://0.0.0.0:5000"
rx-cpu = "0-1"
receive = "recvmsg"
batch = 32
rcvbuf = "8MiB"
[ring]
size = "32MiB"
[[consumer]]
handler = "latency"
cpus = 2
policy = "skip"
wait = "spin"
[[consumer]]
handler = "dump=a,b@c.ts"
name = "file"
"""


def test_a_whole_file(tmp_path: Path) -> None:
    assert from_file(tmp_path, WHOLE) == RunSpec(
        name="quotes",
        receivers=(
            ReceiverSpec(
                listen=Listen("udp", "0.0.0.0", 5000, {}),
                rx_cpu=(0, 1),
                receive="recvmsg",
                batch=32,
                rcvbuf=8 << 20,
            ),
        ),
        ring=RingSpec(size=32 << 20),
        consumers=(
            ConsumerSpec(handler="latency", cpus=(2,), policy="skip", wait="spin", name="latency"),
            ConsumerSpec(handler="dump", argument="a,b@c.ts", name="file"),
        ),
        timestamps=False,
        stamp="seed",
        sender="feed",
        fifo=5,
        mlock=True,
        duration=60.0,
        packets=1000,
        every=0.5,
        plain=True,
    )


def test_flags_override_the_file(tmp_path: Path) -> None:
    run = from_file(
        tmp_path,
        WHOLE,
        **FLAGS,
        name="other",
        batch=8,
        ring=1 << 20,
        consumer=[ConsumerSpec(handler="rate")],
        timestamps=True,
    )
    assert (run.name, run.timestamps, run.stamp) == ("other", True, "seed")
    assert run.receivers[0] == ReceiverSpec(
        listen=LOOPBACK, rx_cpu=(0, 1), receive="recvmsg", batch=8, rcvbuf=8 << 20
    )
    assert run.ring.size == 1 << 20
    assert run.consumers == (ConsumerSpec(handler="rate", name="rate"),)


def test_flags_alone_and_the_defaults() -> None:
    run = spec.read(None, FLAGS)
    assert run == RunSpec(name="rx5000", receivers=(ReceiverSpec(listen=LOOPBACK),))
    assert (run.ring.size, run.every, run.timestamps) == (40 << 20, 1.0, True)
    assert (run.receivers[0].batch, run.receivers[0].rcvbuf) == (64, None)


def test_a_flag_completes_a_file_without_a_receiver(tmp_path: Path) -> None:
    assert from_file(tmp_path, "duration = 1", **FLAGS).receivers[0].listen == LOOPBACK


def test_cpus_on_the_receiver_as_on_consumers(tmp_path: Path) -> None:
    text = '[[receiver]]\nlisten = "udp://127.0.0.1:1"\ncpus = "3"'
    assert from_file(tmp_path, text).receivers[0].rx_cpu == (3,)


def test_port_0_names_the_engine_by_its_pid() -> None:
    free = Listen("udp", "127.0.0.1", 0, {})
    assert spec.read(None, {"listen": [free]}).name == f"rx{os.getpid()}"


RECEIVER = '[[receiver]]\nlisten = "udp://127.0.0.1:5000"\n'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nam = 'x'", "unknown key 'nam': did you mean name?"),
        ("listen = 'udp://127.0.0.1:1'", "unknown key 'listen': it belongs under [[receiver]]"),
        ("recever = 1", "unknown key 'recever': did you mean receiver?"),
        (RECEIVER + "btch = 3", "receiver 1: unknown key 'btch': did you mean batch?"),
        (RECEIVER + "busy-poll = 0", "receiver 1: busy-poll: '0' is out of range"),
        (RECEIVER + "gro = true", "receiver 1: gro: 'True' is not known: give auto or on or off"),
        (
            RECEIVER + "gro = 'on'\n[ring]\nsize = '128KiB'",
            "--gro on needs a ring that holds frames of 64KiB",
        ),
        (RECEIVER + "batch = 0", "receiver 1: batch: '0' is out of range"),
        (RECEIVER + "batch = 6.4", "receiver 1: batch: 6.4 is no text"),
        (RECEIVER + "batch = true", "receiver 1: batch: True is no text"),
        (RECEIVER + "rcvbuf = -1", "receiver 1: rcvbuf: '-1' is no size"),
        ("[receiver]\nlisten = 'udp://127.0.0.1:1'", "receiver is no list of tables: write [[receiver]]"),
        ("receiver = [1]", "receiver is no list of tables"),
        ("ring = '1MiB'", "ring is no table: write [ring]"),
        ("[ring]\nsize = '1 MB'", "ring: size: '1 MB' is no size"),
        (RECEIVER + "[[consumer]]\npolicy = 'gate'", "consumer 1 has no handler"),
        (RECEIVER + "[[consumer]]\nhandler = 'latency'\nshare = 2", "consumer 1: unknown key 'share'"),
        (RECEIVER + "[[consumer]]\nhandler = 'latency@1'", "consumer 1: handler: no handler 'latency@1'"),
        (RECEIVER + "[[consumer]]\nhandler = 'latency'\nargument = 'x'", "unknown key 'argument'"),
        ("every = nan", "every: 'nan' is no time"),
        ("name = 'a/b'", "name: name 'a/b'"),
        ("json = 1", "json: '1' is not known: give on or off"),
        ("x =", "no TOML: "),
        ("a" * 3, "no TOML: "),
        ("duration = 1", "nothing to listen on: give --listen"),
        ("[[receiver]]\nbatch = 1", "nothing to listen on"),
        (RECEIVER * 2, "udp://127.0.0.1:5000 is listened on twice: give --receivers 2, which share it"),
        (RECEIVER + "receivers = 65", "give a whole number from 1 to 64"),
        (RECEIVER + "steer = 'cpu'", "steer=cpu chooses among receivers: give --receivers N, too"),
        (RECEIVER + "[ring]\nsize = 5", "--ring 5: a ring does not fit"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(Refused) as refusal:
        from_file(tmp_path, text)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(Refused, match=what):
            spec.read(path, {})
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(Refused, match="not UTF-8"):
        spec.read(tmp_path / "latin.toml", {})


KEYS = st.sampled_from([*spec.RUN, *spec.RECEIVER, *spec.CONSUMER, "receiver", "ring", "consumer", "size"])
SCALARS = (
    st.booleans()
    | st.integers(-10, 10**20)
    | st.floats()
    | st.sampled_from(
        ["udp://127.0.0.1:0", "latency", "rate", "on", "0-1", "64MiB", "skip", "spin", "recvmsg", "x y", "é"]
    )
)
TABLES = st.recursive(
    st.dictionaries(KEYS, SCALARS, max_size=4),
    lambda inner: st.dictionaries(KEYS, SCALARS | inner | st.lists(inner, max_size=2), max_size=5),
    max_leaves=6,
)


@given(TABLES)
def test_any_toml_is_a_run_or_refused(table: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(as_toml(table))
        file.flush()
        try:
            run = spec.read(Path(file.name), FLAGS)
        except Refused:
            return
    assert len(run.receivers) == 1
    assert len({c.name for c in run.consumers}) == len(run.consumers)


def as_toml(value: Any) -> str:
    """A table at the top level, everything below inline."""
    return "\n".join(f"{key} = {inline(item)}" for key, item in value.items())


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else repr(value)


# ── the whole ────────────────────────────────────────────────────────────────────────────────────────


def run_with(ring: int, **options: Any) -> RunSpec:
    return RunSpec(receivers=(ReceiverSpec(listen=LOOPBACK),), ring=RingSpec(size=ring), **options)


@pytest.mark.parametrize(("ring", "largest"), [(64 << 10, 32), (1 << 20, 512), (40 << 20, 3000)])
def test_the_largest_batch_is_named_and_fits(ring: int, largest: int) -> None:
    assert spec.largest_batch(run_with(ring)) == largest
    spec.read(None, {**FLAGS, "ring": ring, "batch": largest})
    if largest < spec.MAX_BATCH:
        with pytest.raises(Refused, match=f"give --batch {largest} or less"):
            spec.read(None, {**FLAGS, "ring": ring, "batch": largest + 1})


@given(st.integers(64 << 10, 1 << 38))
def test_the_largest_batch_reserves_an_eighth_at_most(ring: int) -> None:
    from rings.layout import Geometry

    batch, geometry = spec.largest_batch(run_with(ring)), Geometry.fitting(ring)
    assert 1 <= batch <= spec.MAX_BATCH
    assert batch * spec.STRIDE_BYTES <= geometry.arena_bytes // 8
    assert batch <= geometry.frames // 8


def test_a_ring_that_says_whose_each_frame_is_holds_less() -> None:
    by_flow = ConsumerSpec(handler="rate", split=2, by="flow")
    assert not run_with(64 << 10).sources
    assert run_with(64 << 10, consumers=(by_flow,)).sources
    assert spec.largest_batch(run_with(80 << 10)) == 2 * spec.largest_batch(
        run_with(80 << 10, consumers=(by_flow,))
    )


CONSUMERS = st.lists(
    st.builds(
        ConsumerSpec,
        handler=st.sampled_from(["latency", "rate", "mod:rate", f"mod:{'h' * 40}", "mod:ä"]),
        name=st.sampled_from(["", "", "latency", "latency-2", "rate-3"]),
    ),
    max_size=12,
)


@given(CONSUMERS)
def test_every_consumer_has_a_name_of_its_own(consumers: list[ConsumerSpec]) -> None:
    given_names = [c.name for c in consumers if c.name]
    if len(set(given_names)) < len(given_names):
        with pytest.raises(Refused, match="two consumers are named"):
            spec.read(None, {**FLAGS, "consumer": consumers})
        return
    named = spec.read(None, {**FLAGS, "consumer": consumers}).consumers
    names = [c.name for c in named]
    assert len(set(names)) == len(names)
    assert all(1 <= len(name.encode()) <= spec.NAME_BYTES for name in names)
    assert all(before.name in ("", after.name) for before, after in zip(consumers, named, strict=True))


def test_names_count_up() -> None:
    three = [ConsumerSpec(handler="latency")] * 3
    assert [c.name for c in spec.read(None, {**FLAGS, "consumer": three}).consumers] == [
        "latency",
        "latency-2",
        "latency-3",
    ]


def test_two_consumers_may_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    consumers = [spec.consumer(f"dump={path}"), spec.consumer(f"dump={tmp_path}/./out")]
    with pytest.raises(Refused, match="two consumers write one file"):
        spec.read(None, {**FLAGS, "consumer": consumers})


def test_json_and_plain_exclude_each_other() -> None:
    with pytest.raises(Refused, match="exclude each other"):
        spec.read(None, {**FLAGS, "json": True, "plain": True})


def test_the_handlers_that_flags_name_are_those_that_are_built_in() -> None:
    from engine.handlers.api import BUILT_IN

    assert {*spec.HANDLERS, *spec.SINKS} == set(BUILT_IN)


@pytest.mark.parametrize(
    ("rx_cpu", "cpus"), [(None, [None, None]), ((1,), [(1,), (1,)]), ((1, 3), [(1,), (3,)])]
)
def test_each_member_of_a_port_is_a_receiver(
    rx_cpu: tuple[int, ...] | None, cpus: list[tuple[int, ...] | None]
) -> None:
    flags = {"receivers": 2} | ({"rx-cpu": rx_cpu} if rx_cpu else {})
    run = spec.read(None, {"listen": [LOOPBACK, OTHER], **flags})
    assert [receiver.listen.port for receiver in run.receivers] == [5000, 5000, 6000, 6000]
    assert [receiver.member for receiver in run.receivers] == [0, 1, 0, 1]
    assert [receiver.rx_cpu for receiver in run.receivers] == cpus * 2


def test_there_are_not_more_receivers_than_a_consumer_can_sleep_on() -> None:
    with pytest.raises(Refused, match="66 receivers: give at most 64"):
        spec.read(None, {"listen": [LOOPBACK, OTHER], "receivers": 33})
