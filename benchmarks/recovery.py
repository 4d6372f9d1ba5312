"""What a failure costs: near saves at every step, from a death to the first new step, and the time that stays useful.

    python benchmarks/recovery.py --rows 1000000 --rounds 5

``every-step`` trains the same model three times in turn: without saves, with a delta every ``--save-every`` steps, and
with near saves beside these that are due at every step; once with all of a step on the cores that the saves need too,
and once with a wait of ``--accelerator-ms`` in place of the dense network, as where an accelerator computes it.

``death`` starts a trainer of the second kind, kills it by SIGKILL at random steps, and starts it anew: on its near
saves, or without them and without compiled loops, as on a host that is new. The parent waits for the process, so
``detect`` is the least that there is; ``--host-sec`` says how long it takes to notice that a host is gone and to get
another, which no benchmark of one machine can measure.

``useful`` simulates a job from these costs, at ``--process-failures`` and ``--host-failures`` a day.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import describe_machine
from measuring import report, scratch
from recovery_lives import Life, Line, Recipe, Took, Trainer
from useful_time import DAY, Job, Kept, useful_share

from recckpt.policies.schedule import best_interval

CASES = ("every-step", "death", "useful")
_NARROW = 16  # the dense layers where they are not what is measured
_YARDSTICK_PERCENT = 3.1  # of LowDiff, arXiv:2509.04084: differential checkpoints at every iteration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--look-ups", type=int, default=2048, help="of a step")
    parser.add_argument("--hidden", type=int, default=640, help="width of the dense layers of every-step")
    parser.add_argument("--threads", type=int, default=0, help="of the training; torch's own default where it is 0")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one delta to the next")
    parser.add_argument("--near-every", type=int, default=5, help="steps from one near save to the next, of death")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=5, help="of every-step")
    parser.add_argument("--deaths", type=int, default=3, help="of each kind")
    parser.add_argument("--accelerator-ms", type=float, default=100.0)
    parser.add_argument("--process-failures", type=float, default=3.0, help="a day")
    parser.add_argument("--host-failures", type=float, default=1.0, help="a day")
    parser.add_argument("--host-sec", type=float, default=60.0, help="to notice that a host is gone, and get another")
    parser.add_argument("--checkpoint-sec", type=float, default=600.0, help="from one seldom checkpoint to the next")
    parser.add_argument("--days", type=float, default=3000.0, help="of the simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    options = parser.parse_args()
    if "useful" in options.cases and set(options.cases) != set(CASES):
        parser.error("--cases useful needs the costs that every-step and death measure: name them, too")
    logging.disable(logging.WARNING)
    report({"case": "machine", **describe_machine()})
    steps, deaths = list[Line](), list[Line]()
    with scratch(options.root) as root:
        for wait in (0.0, options.accelerator_ms) if "every-step" in options.cases else ():
            steps.append(every_step(root, options, wait))
            report(steps[-1])
            shutil.rmtree(root / "bare")
            shutil.rmtree(root / "plain")
            shutil.rmtree(root / "near")
        if "death" in options.cases:
            deaths = death(root, options)
            for line in deaths:
                report(line)
    if "useful" in options.cases:
        for of_step in steps:
            for line in useful(options, of_step, *deaths):
                report(line)


def recipe(options: argparse.Namespace, hidden: int, *rest: Any) -> Recipe:
    return Recipe(options.rows, options.look_ups, hidden, options.threads, *rest)


def every_step(root: Path, options: argparse.Namespace, accelerator_ms: float) -> Line:
    """Return what near saves at every step cost, beside the same steps without; in turn, a delta or none each."""
    ways = {"bare": (None, None), "plain": (options.save_every, None), "near": (options.save_every, 1)}
    width = _NARROW if accelerator_ms else options.hidden
    trainers = {
        name: Trainer(root / name, recipe(options, width, *every, accelerator_ms)) for name, every in ways.items()
    }
    for trainer in trainers.values():
        trainer.fill()
        trainer.train(options.save_every // 2)  # so that the delta lies in the middle of what is timed
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name in ways if number % 2 else reversed(ways):
            took[name].append(trainers[name].train(options.save_every))
    seconds = {name: [each.sec for each in segments] for name, segments in took.items()}
    over = {
        part: [
            100 * (getattr(near, part) - getattr(plain, part)) / plain.sec
            for near, plain in zip(took["near"], took["plain"], strict=True)
        ]
        for part in ("sec", "held_sec", "held_cpu_sec", "cpu_sec")
    }
    delta_costs = [plain - bare for plain, bare in zip(seconds["plain"], seconds["bare"], strict=True)]
    pause = statistics.median(save["pause_sec"] for save in trainers["plain"].saves[1:])
    counts = trainers["near"].manager.counts
    for trainer in trainers.values():
        trainer.manager.close()
    where = f"the dense network is a wait of {accelerator_ms:g} ms" if accelerator_ms else "all on the cores"
    return {
        "case": f"near saves at every step, {where}",
        "rows": options.rows,
        "step_ms": _ms(statistics.median(seconds["bare"]) / options.save_every),
        "steps_from_delta_to_delta": options.save_every,
        "overhead_percent": round(statistics.median(over["sec"]), 2),
        "yardstick_percent": _YARDSTICK_PERCENT,
        "overhead_percent_by_round": [round(value, 1) for value in over["sec"]],
        "held_up_percent": round(statistics.median(over["held_sec"]), 2),  # of that, in manager.step()
        "held_up_cpu_percent": round(statistics.median(over["held_cpu_sec"]), 2),
        "cpu_percent_of_a_core": round(statistics.median(over["cpu_sec"]), 1),
        "near_saves_a_step": round(counts.near / trainers["near"].manager.global_step, 2),
        "near_failed": counts.near_failed,
        "delta_costs_ms": _ms(max(pause, statistics.median(delta_costs))),
        "delta_pause_ms": _ms(pause),
        "load": os.getloadavg()[0],
    }


def death(root: Path, options: argparse.Namespace) -> list[Line]:
    """Return, for each kind of failure, the seconds to the first new step with their parts, and the steps lost."""
    draw = random.Random(options.seed)
    parts: dict[str, list[Line]] = {"process": [], "host": []}
    lost: dict[str, list[int]] = {"process": [], "host": []}
    late: dict[str, list[Line]] = {"process": [], "host": []}
    trained = recipe(options, _NARROW, options.save_every, options.near_every, options.accelerator_ms)
    life = Life(trained, root)
    life.read("step")
    for number in range(options.deaths):
        for kind, found in parts.items():
            life.train(options.save_every + draw.randrange(options.save_every))
            killed, ended = life.kill()
            late["process"] += life.late_near
            late["host"] += life.saves
            if kind == "host":
                shutil.rmtree(root / "near")
            last, loops = life.last, root / f"loops-{number}"
            life = Life(trained, root, loops if kind == "host" else None)
            model, restored, first = life.read("model"), life.read("restored"), life.read("step")
            lost[kind].append(last - restored["step"])
            found.append(
                {
                    "detect": ended - killed,
                    "start": model["time"] - ended,
                    "restore": restored["time"] - model["time"],
                    "first_step": first["time"] - restored["time"],
                    "in_all": first["time"] - killed,
                    "in_all_cpu": first["cpu_sec"],
                }
            )
    life.kill()
    return [
        {
            "case": f"death of a {kind}",
            "rows": options.rows,
            "sec": {part: round(statistics.median(each[part] for each in found), 3) for part in found[0]},
            "in_all_sec": [round(each["in_all"], 1) for each in found],
            "steps_lost": lost[kind],
            "interval_steps": {"process": options.near_every, "host": options.save_every}[kind],
            "late_steps": statistics.median(each["late_steps"] for each in late[kind]),
            "late_steps_at_most": max(each["late_steps"] for each in late[kind]),
            "late_sec": round(statistics.median(each["late_sec"] for each in late[kind]), 3),
            "load": os.getloadavg()[0],
        }
        for kind, found in parts.items()
    ]


def useful(options: argparse.Namespace, steps: Line, of_process: Line, of_host: Line) -> list[Line]:
    """Return the share of useful time without near saves and with them, at some intervals of either."""
    step_sec, cost, late_sec = steps["step_ms"] / 1e3, steps["delta_costs_ms"] / 1e3, of_host["late_sec"]
    failure_sec = DAY / (options.process_failures + options.host_failures)
    seldom = Kept(max(late_sec, options.checkpoint_sec), cost, late_sec)
    every_sec = step_sec / max(steps["near_saves_a_step"], 1e-3)
    near_cost = max(1e-6, steps["overhead_percent"] / 100 * every_sec)
    near = Kept(every_sec, near_cost, of_process["late_sec"])
    often = max(every_sec, best_interval(near_cost, DAY / options.process_failures))
    alone = Job(
        seldom,
        None,
        of_process["sec"]["in_all"],
        of_host["sec"]["in_all"] + options.host_sec,
        options.process_failures,
        options.host_failures,
    )
    ways = {
        "checkpoints as often as pays": replace(
            alone, checkpoints=replace(seldom, every_sec=max(late_sec, best_interval(cost, failure_sec)))
        ),
        "seldom checkpoints": alone,
        "seldom checkpoints, near saves as often as pays": replace(alone, near=replace(near, every_sec=often)),
        "seldom checkpoints, near saves at every step": replace(alone, near=near),
    }
    found = []
    for way, job in ways.items():
        share, lost_sec = useful_share(job, options.days, options.seed)
        found.append(
            {
                "case": f"useful time, {way}",
                "step_ms": steps["step_ms"],
                "failures_a_day": {"process": options.process_failures, "host": options.host_failures},
                "host_sec": options.host_sec,
                "checkpoint_every_sec": round(job.checkpoints.every_sec, 1),
                "near_every_sec": round(job.near.every_sec, 2) if job.near else None,
                "useful_percent": round(100 * share, 2),
                "steps_lost_a_failure": round(lost_sec / step_sec, 1),
            }
        )
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


if __name__ == "__main__":
    main()
