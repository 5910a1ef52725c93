"""`rxring bench`: an experiment from its first word to its report, and what is done with results.

    rxring bench list | NAME | compare A B | report DIR

result.json is written after every run: what is stopped, by Ctrl-C or by worse, goes on with the same --out.
The configuration of the machine is read before the runs and after them; what changed meanwhile makes the
result invalid.
"""

from __future__ import annotations

import importlib
import json as json_module
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from bench import compare, machine, noise, remote, report
from bench.children import end_children
from bench.place import open_place
from bench.progress import Progress, duration
from bench.runner import EXPERIMENTS, Case, Setting, Taken, judge, measure, summary
from bench.section import Section
from bench.spread import CI
from engine.errors import Refused

RUNS, QUICK_RUNS = 5, 3
QUICK_S = 50.0  # `--quick` is for a look: no round is begun that would end later, unless --runs asks for it
_QUIET = 0.5  # runnable tasks, over the last minute
_STOPPED = 130


def run(
    name: str,
    *,
    quick: bool = False,
    runs: int | None = None,
    seed: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    peer: str | None = None,
    port: int = remote.PORT,
    json: bool = False,
) -> int:
    """Do an experiment, or go on with it; the exit code.

    0; 1 where the result is invalid; 130 where it was stopped. A missed claim is a result.
    """
    experiment = _experiment(name)
    folder = out or Path("results") / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
    options: dict[str, Any] = {
        "quick": quick,
        "runs": runs or (QUICK_RUNS if quick else RUNS),
        "device": device,
        "peer": f"{peer} --port {port}" if peer else None,
    }
    earlier = _earlier(folder, name, options, seed)
    options["seed"] = random.randrange(1 << 31) if seed is None else seed
    with ExitStack() as stack:
        stack.enter_context(_signals_interrupt())
        names = (device,) if device else getattr(experiment, "PLACES", ())
        places = tuple(stack.enter_context(open_place(place)) for place in names if not peer)
        if peer:
            places = (remote.place(device or "", peer, port),)
        cases = list(experiment.cases(Setting(quick, places)))
        before, varies = machine.config(places), getattr(experiment, "VARIES", ())
        result = _begin(name, options, folder, before, earlier, varies)
        taken = _taken(cases, folder, earlier)
        budget_s = QUICK_S if quick and runs is None else float("inf")
        stopped = _measure(experiment, cases, folder, result, taken, budget_s)
        result["changes"] += _changes(before, machine.config(places), "during the runs", varies)
    _finish(experiment, cases, result, taken, complete=not stopped)
    report.save(folder, result)
    told = _report(folder, result, experiment)
    if json:
        report.print_json(result)
    else:
        report.print_result(result, told)
    _note(f"written to {folder}")
    if stopped:
        return _STOPPED
    return 0 if result["valid"] else 1


def _experiment(name: str) -> Any:
    if name not in EXPERIMENTS:
        raise Refused(f"no experiment {name!r}: `rxring bench list` names them")
    return importlib.import_module(f"bench.{name}")


def _command(name: str, options: dict[str, Any]) -> str:
    device = "".join(f" --{key} {options[key]}" for key in ("device", "peer") if options[key])
    quick = " --quick" if options["quick"] else ""
    return f"rxring bench {name}{quick} --runs {options['runs']} --seed {options['seed']}{device}"


def _earlier(folder: Path, name: str, options: dict[str, Any], seed: int | None) -> dict[str, Any] | None:
    """What the folder holds of this experiment, to go on with; None where it holds nothing.

    Refused where that is complete, or was begun with other options.
    """
    if not (folder / "result.json").exists():
        return None
    found = load(folder)
    if found.get("complete", True):
        raise Refused(f"{folder} holds a complete result of {found['name']}: give another --out")
    asked = options | {"seed": found["config"]["seed"] if seed is None else seed}
    if found["command"] != _command(name, asked):
        raise Refused(
            f"{folder} holds a part of `{found['command']}`: go on with that, or give another --out"
        )
    return found


def load(path: Path) -> dict[str, Any]:
    """A result, of its folder or its file. Refused where there is none."""
    file = path / "result.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json_module.loads(file.read_text())
        return found | {"name": found["name"], "cases": found["cases"], "config": found["config"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise Refused(f"no result in {path} ({reason}): give a folder of `rxring bench`") from None


def _begin(
    name: str,
    options: dict[str, Any],
    folder: Path,
    config: dict[str, Any],
    earlier: dict[str, Any] | None,
    varies: Sequence[str],
) -> dict[str, Any]:
    """result.json without the cases. What was begun earlier keeps the configuration of its beginning."""
    git = machine.git()
    if earlier:
        _note(f"going on with {folder}")
        changes = _changes(earlier["config"], config, "before going on", varies)
        made = sum(len(case["runs"]) for case in earlier["cases"])
        notes = [*earlier["notes"], f"it was stopped after {made} runs, and gone on with at {_now()}"]
        if git != earlier["git"]:
            notes.append(
                f"begun on commit {report.commit(earlier['git'])}, gone on with on {report.commit(git)}"
            )
        return earlier | {"changes": earlier["changes"] + changes, "notes": notes}
    of_runs = {"seed": options["seed"], "runs": options["runs"], "quick": options["quick"], "ci": CI}
    load = config["load"]
    return {
        "name": name,
        "command": _command(name, options),
        "begun": _now(),
        "out": str(folder),
        "git": git,
        "config": of_runs | config,
        "complete": False,
        "valid": False,
        "cases": [],
        "claims": [],
        "changes": [],
        "notes": [f"the machine was not quiet: its load was {load:.1f} before the runs"] * (load > _QUIET),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _changes(
    before: dict[str, Any], after: dict[str, Any], when: str, varies: Sequence[str]
) -> list[dict[str, Any]]:
    """Of what `machine.config` tells, but for what the experiment itself sets at its places."""
    before = {key: value for key, value in before.items() if key in after}
    found = machine.changes(before, after)
    own = tuple(f".{name}." for name in varies)
    return [
        {"when": when, **change}
        for change in found
        if not (change["key"].startswith("sides.") and any(name in f"{change['key']}." for name in own))
    ]


def _taken(cases: Sequence[Case], folder: Path, earlier: dict[str, Any] | None) -> dict[str, Taken]:
    """By case. Refused where the cases are not those that were begun."""
    if earlier is None:
        return {case.name: Taken() for case in cases}
    begun = {case["name"]: case for case in earlier["cases"]}
    for case in cases:
        same = case.name in begun and begun[case.name]["parameters"] == _as_json(case.parameters)
        if not same or len(begun) != len(cases):
            raise Refused(f"the cases are no longer those of {folder}, see {case.name!r}: give another --out")
    return {name: Taken(case["runs"], case["repeated"]) for name, case in begun.items()}


def _as_json(value: Any) -> Any:
    return json_module.loads(json_module.dumps(value))


def _measure(
    experiment: Any,
    cases: Sequence[Case],
    folder: Path,
    result: dict[str, Any],
    taken: dict[str, Taken],
    budget_s: float,
) -> bool:
    """Make the runs, between two looks at the noise. Was it stopped?"""
    config, rounds = result["config"], result["config"]["runs"]
    cpus = config["cpus"]
    config.setdefault("noise", {"before the runs": noise.measure(cpus)})
    to_do = {case.name: rounds - len(taken[case.name].runs) for case in cases if not case.skip}
    expected = {case.name: case.parameters["seconds"] for case in cases if "seconds" in case.parameters}

    def save() -> None:
        result["cases"] = [summary(case, taken[case.name]) for case in cases]
        report.save(folder, result)

    with Progress(to_do, rounds, expected) as progress:
        left = progress.seconds_left()
        takes = (
            "how long it takes is said after the first round" if left is None else f"about {duration(left)}"
        )
        head = f"{result['name']}: {len(to_do)} cases, {rounds} rounds, seed {config['seed']}"
        progress.say(f"{head}: {sum(to_do.values())} runs to do, {takes}")
        warm_up = getattr(experiment, "WARM_UP", False)
        try:
            save()
            made = measure(
                *(cases, rounds, config["seed"], taken, progress),
                warm_up=warm_up,
                save=save,
                budget_s=budget_s,
            )
        except KeyboardInterrupt:
            end_children()
            return True
    if made < rounds:
        result["notes"].append(f"{made} of {rounds} rounds: --quick is for a minute, --runs {rounds} for all")
    config["noise"]["after the runs"] = noise.measure(cpus)
    return False


def _finish(
    experiment: Any, cases: Sequence[Case], result: dict[str, Any], taken: dict[str, Taken], *, complete: bool
) -> None:
    result["complete"] = complete
    result["cases"] = [summary(case, taken[case.name]) for case in cases]
    result["claims"] = judge(experiment.CLAIMS, result["cases"])
    result["valid"] = all(case["valid"] for case in result["cases"]) and not result["changes"]
    notes = [f"not run: {case.name}: {case.skip}" for case in cases if case.skip]
    for when, found in result["config"]["noise"].items():
        notes += filter(None, [noise.warning(when, found)])
    result["notes"] += [note for note in notes if note not in result["notes"]]


def _report(folder: Path, result: dict[str, Any], experiment: Any) -> list[Section]:
    """Write it; the sections that the experiment tells."""
    told = list(experiment.tell(result)) if hasattr(experiment, "tell") else []
    for line in report.write(folder, result, told, experiment.__doc__ or ""):
        _note(line)
    return told


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── the command line ─────────────────────────────────────────────────────────────────────────────────

_JSON = click.option("--json", is_flag=True, help="One JSON object on stdout.")


@click.command()
@click.argument("name", metavar="list | compare A B | report DIR | NAME")
@click.option("--quick", is_flag=True, help="Shorter runs, and fewer.")
@click.option("--runs", type=click.IntRange(1), metavar="N", help=f"Rounds ({RUNS}).")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Of the order within the rounds (random).")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="(results/NAME-TIME)")
@click.option("--device", metavar="lo|veth|DEV", help="Where packets go (what the experiment says).")
@click.option("--peer", metavar="HOST", help="The other machine; DEV leads there.")
@click.option(
    "--role", type=click.Choice(("receiver", "sender")), default="receiver", help="Of this machine."
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=remote.PORT, help="Where the sender's listens."
)
@_JSON
def _run(name: str, role: str, **options: Any) -> int:
    """An experiment: its cases in turn, their medians and spread, and whether what is claimed holds.

    Given the --out of one that was stopped, it goes on. Between two machines, start --role sender first.
    """
    if (peer := options["peer"]) is None and role == "sender":
        raise Refused("--role sender needs the other machine: give --peer HOST")
    if role == "sender":
        remote.serve(peer, options["port"])
        return 0
    return run(name, **options)


@click.command()
@_JSON
def _list(json: bool) -> int:
    """The experiments."""
    report.print_list({name: report.purpose(name) for name in EXPERIMENTS}, json=json)
    return 0


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@_JSON
def _compare(a: Path, b: Path, json: bool) -> int:
    """Two results: what differed in the configuration, which cases can be told apart."""
    found = compare.compare(load(a), load(b))
    if json:
        report.print_json(found)
    else:
        report.print_sections(compare.sections(found, str(a), str(b)))
    return 0


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def _report_again(folder: Path) -> int:
    """The report of a result, written anew."""
    result = load(folder)
    _report(folder, result, _experiment(result["name"]))
    _note(f"written to {shlex.quote(str(folder))}")
    return 0


_COMMANDS: dict[str, click.Command] = {"list": _list, "compare": _compare, "report": _report_again}


def main(argv: Sequence[str]) -> int:
    """`rxring bench …`; its exit code. Bad arguments raise click.ClickException or Refused."""
    words = list(argv) or ["list"]
    command: Callable[..., Any] = _COMMANDS[words[0]].main if words[0] in _COMMANDS else _run.main
    name = f"rxring bench {words.pop(0)}" if words[0] in _COMMANDS else "rxring bench"
    try:
        return command(words, name, standalone_mode=False) or 0
    except click.Abort:  # click's word for Ctrl-C
        raise KeyboardInterrupt from None
